"""Recovery of a failed default model through readiness checks only."""

import asyncio

import httpx
import pytest

from dragoman import create_app
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from tests.server.test_own_engine import Late, talk


class Recovering(Late):
    """Loads at the third attempt."""

    async def start(self) -> None:
        await super().start()
        if self.starts < 3:
            raise RuntimeError("no memory left")


async def said_until_ready(client: httpx.AsyncClient) -> set[tuple[int, str]]:
    """The readiness of the server and its model, until both are ready."""
    said: set[tuple[int, str]] = set()
    async with asyncio.timeout(60):
        while True:
            response = await client.get("/ready")
            now = response.status_code, response.json()["models"]["late"]
            if now == (200, "ready"):
                return said
            said.add(now)
            await asyncio.sleep(0.02)


def test_readiness_checks_reload_failed_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dragoman.models.model_host.FIRST_PAUSE", 1.0)
    engine = Recovering(1)

    async def script(client: httpx.AsyncClient) -> None:
        said: list[httpx.Response] = []
        async with asyncio.timeout(60):
            while not said or said[-1].status_code != 200:
                said.append(await client.get("/ready"))
                await asyncio.sleep(0.02)
        states = [response.json()["models"]["recovering"] for response in said]
        assert set(states[:-1]) <= {"loading", "failed"}
        assert states[-1] == "ready"

    talk(create_app(engine), script)
    assert engine.starts == 3


def test_failed_model_is_not_ready_while_reloading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dragoman.models.model_host.FIRST_PAUSE", 1.0)
    app = create_app(Late(1))

    async def script(client: httpx.AsyncClient) -> None:
        host = app.catalog.resolve("").host
        await host.ready()
        assert (await client.get("/ready")).status_code == 200
        host._handle_engine_lost("it died too often")
        assert await said_until_ready(client) == {(503, "failed"), (503, "loading")}

    talk(app, script)


def test_server_is_ready_if_fallback_can_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.models.model_host.FIRST_PAUSE", 1.0)
    default = ModelSpec("late", "tests.support.engines:SlowToLoad", fallback="other")
    app = create_app(settings=Settings(models=(default, ModelSpec("other", "scripted")), models_dir=()))

    async def script(client: httpx.AsyncClient) -> None:
        host, other = app.catalog.resolve("").host, app.catalog.resolve("other").host
        # Before its first load the fallback does not make the server ready.
        assert (await client.get("/ready")).status_code == 503
        await host.ready()
        host._handle_engine_lost("it died too often")
        assert await said_until_ready(client) == {(200, "failed"), (200, "loading")}
        host._handle_engine_lost("it died too often")
        other.fail(RuntimeError("no memory left"))
        assert (await client.get("/ready")).status_code == 503
        await app.catalog.stop()

    talk(app, script)

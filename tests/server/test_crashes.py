"""Workers that crash, once and repeatedly, and recovery of failed models."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from dragoman import Engine, create_app
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.engine import Output
from dragoman.core.request import GenerationRequest
from tests.support.requests import CHAT, ask, eventually, refused, talk, talking, text_of
from tests.support.server_process import Running, Serving

WORKER = {"engine": "tests.support.engines:Weighty"}
DIE = [{"role": "user", "content": "die"}]


def test_repeatedly_crashing_model_reports_reason_and_recovers_on_demand(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "a": WORKER}}
    with serving(tmp_path, config) as running, talking(running) as client:
        for _ in range(3):
            refused(ask(client, CHAT, model="a", messages=DIE), 502, code="engine_died")
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "failed")
        shown = client.get("/admin/models").json()["data"][1]
        assert shown["failure"] == "its process died 3 times soon after its start (exit -9)"
        assert "model a: its process died 3 times" in running.log.read_text()
        assert not running.workers()
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert client.get("/admin/models").json()["data"][1].get("failure") is None


def kill(running: Running) -> None:
    for pid in running.workers():
        os.kill(pid, signal.SIGKILL)


def seen(client: httpx.Client, name: str) -> set[str]:
    """The states of a model in all routes that report one."""
    listed = {entry["id"]: entry for entry in client.get("/admin/models").json()["data"]}[name]
    model = client.get(f"/v1/models/{name}").json()
    if listed["state"] == "loading":
        assert listed["loading_seconds"] >= 0
        assert model["loading_seconds"] >= 0
        assert listed.get("memory") is None
    line = next(line for line in client.get("/metrics").text.splitlines() if f'model_state{{model="{name}"' in line)
    told = line.partition('state="')[2].partition('"')[0]
    return {listed["state"], model["state"], client.get("/ready").json()["models"][name], told}


def test_restarting_model_is_loading_and_then_answers(tmp_path: Path, serving: Serving) -> None:
    hold = tmp_path / "hold"
    config = {"models": {"a": {**WORKER, "hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").status_code == 503)
        assert seen(client, "a") == {"loading"}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client, CHAT, model="a")
            assert eventually(lambda: client.get("/admin/models").json()["data"][0]["waiting"] == 1)
            hold.unlink()
            assert text_of(waiting.result()) == "a " * 5
        assert seen(client, "a") == {"ready"}
        assert client.get("/ready").status_code == 200


def test_restart_wait_is_limited_like_first_load(tmp_path: Path, workers: int, serving: Serving) -> None:
    hold = tmp_path / "hold"
    models = {
        "a": {**WORKER, "hold": str(hold), "slots": 1},
        "b": {**WORKER, "hold": str(hold), "fallback": "other"},
        "other": {"engine": "scripted", "replies": [{"output": "instead"}]},
    }
    config = {"models": models, "limits": {"load_seconds": 0.5 if workers == 1 else 0}}
    with serving(tmp_path, config) as running, talking(running) as client:
        for name in ("b", "other"):
            client.post(f"/admin/models/{name}/load")
        assert eventually(lambda: set(client.get("/ready").json()["models"].values()) == {"ready"})
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "loading")
        with ThreadPoolExecutor(3) as pool:
            for task in [pool.submit(ask, client, CHAT, model="a", stream=at == 1) for at in range(3)]:
                refused(task.result(), 503, code="model_loading")
                assert int(task.result().headers["retry-after"]) >= 1
        assert text_of(ask(client, CHAT, model="b")) == "instead"
        hold.unlink()
        assert eventually(lambda: client.get("/ready").status_code == 200)
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5


def test_restarting_model_can_be_unloaded(tmp_path: Path, serving: Serving) -> None:
    hold = tmp_path / "hold"
    config = {"models": {"first": {"engine": "scripted"}, "a": {**WORKER, "hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        client.post("/admin/models/a/load").raise_for_status()
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "loading")
        unloaded = client.post("/admin/models/a/unload")
        assert (unloaded.status_code, unloaded.json()["state"]) == (200, "cold")
        assert not running.workers()


class Recovering(Engine):
    """Loads slowly, and fails the first times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(0.5)
        if self.starts <= self.failures:
            raise RuntimeError("no memory left")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


LOADED = {(200, "loading")}
"""The server is ready when the engine is, shortly before the model's state changes."""


class TestReadinessChecks:
    """They load a failed default model again."""

    @pytest.fixture(autouse=True)
    def pause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("dragoman.models.engine_loader.FIRST_PAUSE", 0.5)

    async def seen_until_ready(self, client: httpx.AsyncClient, name: str) -> set[tuple[int, str]]:
        """The readiness of the server and of the model, until both are ready."""
        seen: set[tuple[int, str]] = set()
        async with asyncio.timeout(60):
            while True:
                response = await client.get("/ready")
                now = response.status_code, response.json()["models"][name]
                if now == (200, "ready"):
                    return seen
                seen.add(now)
                await asyncio.sleep(0.02)

    def test_failed_load_is_repeated(self) -> None:
        engine = Recovering(failures=2)
        seen = talk(create_app(engine), lambda client: self.seen_until_ready(client, "recovering"))
        assert seen - LOADED == {(503, "failed"), (503, "loading")}
        assert engine.starts == 3

    def test_lost_engine_is_loaded_again(self) -> None:
        app = create_app(Recovering())

        async def script(client: httpx.AsyncClient) -> None:
            host = app.catalog.resolve("").host
            await host.ready()
            assert (await client.get("/ready")).status_code == 200
            host.lose_engine("it died too often")
            seen = await self.seen_until_ready(client, "recovering")
            assert seen - LOADED == {(503, "failed"), (503, "loading")}

        talk(app, script)

    def test_server_is_ready_if_fallback_can_answer(self) -> None:
        default = ModelSpec("late", "tests.support.engines:SlowToLoad", fallback="other")
        app = create_app(settings=Settings(models=(default, ModelSpec("other", "scripted")), models_dir=()))

        async def script(client: httpx.AsyncClient) -> None:
            host, other = app.catalog.resolve("").host, app.catalog.resolve("other").host
            # Before its first load the fallback does not make the server ready.
            assert (await client.get("/ready")).status_code == 503
            await host.ready()
            host.lose_engine("it died too often")
            assert await self.seen_until_ready(client, "late") == {(200, "failed"), (200, "loading")}
            host.lose_engine("it died too often")
            other.fail(RuntimeError("no memory left"))
            assert (await client.get("/ready")).status_code == 503
            await app.catalog.stop()

        talk(app, script)

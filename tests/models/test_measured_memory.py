"""Measurements of a model's memory."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine, Output
from dragoman.core.errors import ModelFailed
from dragoman.core.request import GenerationRequest
from dragoman.models import Catalog, memory
from dragoman.models.engine_loader import OnEngineLost

SESSION_MEMORY = "dragoman.models.engine_loader.session_memory"
SETTINGS = Settings(models=(ModelSpec("m", "scripted"),), models_dir=(), memory=1000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store measurements in a temporary folder."""
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))


async def test_largest_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 0, 300, 200])
    monkeypatch.setattr(SESSION_MEMORY, lambda pid: next(sizes))
    catalog = Catalog(SETTINGS)
    host = catalog.resolve("m").host
    await host.ready()
    seen = [catalog.lifecycle.residency_of(host).current_memory()]
    for _ in range(3):
        await host.measure()
        seen.append(catalog.lifecycle.residency_of(host).current_memory())
    assert seen == [100, 100, 300, 300]
    await catalog.stop()


async def test_model_grown_beyond_the_budget_is_loaded_again_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 600
    monkeypatch.setattr(SESSION_MEMORY, lambda pid: size)
    for _ in range(2):
        catalog = Catalog(SETTINGS)
        host = catalog.resolve("m").host
        for _ in range(2):
            size = 600
            await host.ready()
            size = 1100
            await host.measure()
            assert catalog.lifecycle.residency_of(host).admits
            catalog.lifecycle.request_unload(host)
            async with asyncio.timeout(60):
                while host.state != "cold":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while memory.expected_memory(SETTINGS.models[0]) != 1000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await catalog.stop()


class Plain(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


async def test_engine_lost_during_measurement_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks: list[OnEngineLost] = []
    has_gone = threading.Event()

    async def engine_factory(spec: ModelSpec, limits: Limits, on_lost: OnEngineLost) -> Engine:
        callbacks.append(on_lost)
        return Plain()

    loop = asyncio.get_running_loop()

    def lose() -> None:
        callbacks[-1]("it died too often")
        has_gone.set()

    def measure(pid: int | None) -> int:
        if not has_gone.is_set():
            loop.call_soon_threadsafe(lose)
            has_gone.wait(60)
        return 100

    monkeypatch.setattr(SESSION_MEMORY, measure)
    catalog = Catalog(SETTINGS, engine_factory=engine_factory)
    host = catalog.resolve("m").host
    with pytest.raises(ModelFailed):
        await host.ready()
    assert (host.state, host.failure) == ("failed", "it died too often")
    assert isinstance(await host.ready(), Plain)
    assert (host.state, host.failure) == ("ready", None)
    await catalog.stop()

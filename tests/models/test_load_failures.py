"""Loads that fail, and requests that leave while a model is being loaded."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine, Output
from dragoman.core.errors import ModelFailed, ModelLoading
from dragoman.core.request import GenerationRequest
from dragoman.models import Catalog, ModelHost
from dragoman.models.engine_loader import OnEngineLost

EXPLODING = ModelSpec("m", "tests.support.engines:Exploding")
INESTIMABLE = ModelSpec("m", "tests.support.engines:Unweighable")
SLOW = ModelSpec("m", "tests.support.engines:SlowToLoad")
MISTAKEN = ModelSpec("m", "scripted", None, {"chunk": "many"})
NO_WAIT = Limits(load_seconds=0)


def settings(spec: ModelSpec, limits: Limits = NO_WAIT, memory: int | None = None) -> Settings:
    return Settings(models=(spec,), models_dir=(), limits=limits, memory=memory)


async def settled(host: ModelHost) -> str:
    async with asyncio.timeout(60):
        while host.state in ("waiting", "loading"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return host.state


async def refused_for(host: ModelHost) -> float:
    with pytest.raises(ModelFailed) as raised:
        await host.enter()
    return raised.value.retry_after or 0


@pytest.mark.parametrize("spec", [EXPLODING, MISTAKEN], ids=lambda spec: spec.engine)
async def test_failed_load_is_logged_without_a_waiting_request(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(settings(spec))
    host = catalog.resolve("m").host
    with pytest.raises(ModelLoading):
        await host.enter()
    assert await settled(host) == "failed"
    with pytest.raises(ModelFailed):
        await host.enter()
    await catalog.stop()
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    message = "no such device" if spec is EXPLODING else "chunk: expected"
    assert f"model m: not loaded: {message}" in error.getMessage()
    assert (error.exc_info is not None) == (spec is EXPLODING)


async def test_refusal_after_a_failure_has_a_retry_time(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog(settings(EXPLODING, Limits(load_seconds=5)))
    host = catalog.resolve("m").host
    for _ in range(20):
        with pytest.raises(ModelFailed) as raised:
            await host.enter()
        assert 3 < (raised.value.retry_after or 0) <= 5
        assert str(raised.value.__cause__) == "no such device"
    assert caplog.text.count("not loaded") == 1
    # A manual retry doubles the pause.
    host.load()
    await settled(host)
    assert 8 < await refused_for(host) <= 10
    assert caplog.text.count("not loaded") == 2
    catalog.reconfigure(settings(EXPLODING, Limits(load_seconds=5)))
    assert catalog.resolve("m").host is host
    assert 3 < await refused_for(host) <= 5
    await catalog.stop()
    assert caplog.text.count("not loaded") == 3


async def test_failed_memory_estimate_fails_the_model(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.models.engine_loader.FIRST_PAUSE", 0.0)
    catalog = Catalog(settings(INESTIMABLE, Limits(load_seconds=5), memory=10**9))
    host = catalog.resolve("m").host
    for _ in range(2):
        with pytest.raises(ModelFailed):
            await host.enter()
        assert (host.state, host.failure) == ("failed", "its memory was not estimated")
    await catalog.stop()
    assert caplog.text.count("model m: not loaded: its memory was not estimated") == 2
    assert "RuntimeError" in caplog.text


async def test_too_large_model_is_logged_without_a_waiting_request(caplog: pytest.LogCaptureFixture) -> None:
    catalog = Catalog(settings(ModelSpec("m", "scripted", None, {"crash_after": 5}), memory=1000))
    host = catalog.resolve("m").host
    host.load()
    assert await settled(host) == "failed"
    with pytest.raises(ModelFailed):
        await host.enter()
    await catalog.stop()
    assert "model m: not loaded: it needs 100 MiB" in caplog.text


async def test_failed_model_is_retried_after_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    monkeypatch.setattr("dragoman.models.engine_loader.FIRST_PAUSE", 0.101)
    monkeypatch.setattr("dragoman.models.engine_loader.MAX_PAUSE", 0.402)
    catalog = Catalog(settings(EXPLODING))
    host = catalog.resolve("m").host
    host.retry_load()
    assert host.state == "cold"
    host.load()
    async with asyncio.timeout(60):
        while len(caplog.records) < 5:
            host.retry_load()
            await asyncio.sleep(0.01)
    await catalog.stop()
    pauses = [after.created - before.created for before, after in pairwise(caplog.records)]
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.4), strict=True))


class SlowEngine(Engine):
    """An engine with its own clock: each load takes `seconds` and fails while it is `broken`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 1000.0
        self.broken = True
        self.on_lost: OnEngineLost | None = None

    def monotonic(self) -> float:
        return self.now

    async def build(self, spec: ModelSpec, limits: Limits, on_lost: OnEngineLost) -> Engine:
        self.on_lost = on_lost
        return self

    async def start(self) -> None:
        self.now += self.seconds
        if self.broken:
            raise RuntimeError("out of memory")

    def lose(self, after: float) -> None:
        self.now += after
        assert self.on_lost is not None
        self.on_lost("it died too often")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[SlowEngine, Catalog, ModelHost]:
    engine = SlowEngine(seconds)
    for module in ("engine_loader", "model_host"):
        monkeypatch.setattr(f"dragoman.models.{module}.time", engine)
    catalog = Catalog(settings(EXPLODING, Limits(load_seconds=5)), engine_factory=engine.build)
    return engine, catalog, catalog.resolve("m").host


@pytest.mark.parametrize("seconds", [1, 70, 130, 900])
async def test_pauses_grow_for_slow_loads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    engine, catalog, host = slow(monkeypatch, seconds)
    pauses = []
    for _ in range(7):
        pauses.append(await refused_for(host))
        engine.now += pauses[-1]
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    await catalog.stop()


async def test_successful_load_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, catalog, host = slow(monkeypatch, 1)
    for _ in range(5):
        pause = await refused_for(host)
        engine.now += pause
    assert await refused_for(host) == 60
    engine.broken = False
    host.load()
    assert await settled(host) == "ready"
    engine.lose(after=2)
    assert host.state == "failed"
    assert await host.ready() is engine
    await catalog.stop()


@pytest.mark.parametrize(("seconds", "lived", "pause"), [(1, 2, 20), (130, 280, 20), (1, 100, 10), (130, 1000, 10)])
async def test_long_lived_model_resets_the_pause(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lived: float, pause: float
) -> None:
    engine, catalog, host = slow(monkeypatch, seconds)
    assert await refused_for(host) == 5
    engine.now += 5
    engine.broken = False
    assert await host.ready() is engine
    engine.lose(after=lived)
    engine.broken = True
    assert await refused_for(host) == pause
    await catalog.stop()


@pytest.mark.parametrize(
    ("limits", "error"), [(Limits(), asyncio.CancelledError), (Limits(load_seconds=0.2), ModelLoading)]
)
async def test_request_that_leaves_does_not_cancel_the_load(limits: Limits, error: type[BaseException]) -> None:
    catalog = Catalog(settings(SLOW, limits))
    host = catalog.resolve("m").host
    try:
        leaving = asyncio.create_task(host.ready())
        await asyncio.sleep(0.1)
        host.set_limits(Limits())
        staying = asyncio.create_task(host.ready())
        await asyncio.sleep(0.2)
        if error is asyncio.CancelledError:
            leaving.cancel()
        with pytest.raises(error):
            await leaving
        async with asyncio.timeout(60):
            await staying
        assert not catalog.lifecycle.residency_of(host).running
        assert not catalog.lifecycle.residency_of(host).waiting
    finally:
        await catalog.stop()

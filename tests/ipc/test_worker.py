"""An engine in a worker behaves like one in this process, and the server survives its crashes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterable
from typing import Any

import msgspec
import pytest
import uvloop

from dragoman.core.embeddings import Embedding
from dragoman.core.engine import RenderedPrompt, stream_events
from dragoman.core.errors import (
    BadRequest,
    ConfigError,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    ModelFailed,
    ModelLoading,
    NotSupported,
    Unavailable,
)
from dragoman.core.events import Finished, Started, TextDelta
from dragoman.core.request import Tool
from dragoman.ipc.worker_engine import WorkerEngine
from tests.ipc.conftest import MakeWorker
from tests.support.workers import alive, ask, children, events, until

pytestmark = pytest.mark.anyio


async def test_worker_behaves_like_its_engine(engine: WorkerEngine) -> None:
    assert [(info.name, info.owner, info.context) for info in engine.models()] == [("obedient", "tests", 99)]
    assert (engine.device, engine.slots, engine.emits_tool_calls) == ("pretend", 3, True)
    assert engine.supports() == {"chat", "completion", "count_tokens", "render", "tokenize"}
    said = await events(engine, "count 3")
    assert said == [Started(), *(TextDelta(f"{at} ", tokens=(at,)) for at in range(3)), Finished()]
    assert engine.kv_used == 0.03
    assert list(await engine.tokenize("héllo", True)) == [5, 1]
    assert await engine.detokenize([1, 2]) == "1 2"
    request = msgspec.structs.replace(ask("show this"), tools=(Tool("f", parameters={"a": [1, None]}),))
    assert await engine.render(request) == RenderedPrompt("f: this", (1, 2), "hermes")
    with pytest.raises(NotSupported):
        await engine.embed(["a"])
    assert await events(engine, "print 1")


async def test_options_and_name_reach_the_engine(make_worker: MakeWorker) -> None:
    engine = make_worker("Configured", greeting="happy birthday")
    assert await events(engine, "x") == [Started(), TextDelta("happy birthday configured"), Finished()]


async def test_errors_keep_their_type_and_fields(engine: WorkerEngine) -> None:
    for refuse in (events(engine, "refuse not like that"), engine.render(ask("refuse not like that"))):
        with pytest.raises(BadRequest) as refused:
            await refuse
        assert (refused.value.message, refused.value.param) == ("not like that", "messages[0]")
    for fail in (events(engine, "raise boom"), engine.render(ask("raise boom"))):
        with pytest.raises(EngineFailed):
            await fail
    with pytest.raises(BadRequest):
        await engine.detokenize([])
    assert len(await events(engine, "count 2")) == 4


async def test_embeddings_cross_the_connection(make_worker: MakeWorker) -> None:
    engine = make_worker("Embedding")
    await engine.start()
    assert engine.supports() == {"embeddings"}
    made = await engine.embed(["abc", (1, 2)])
    assert list(made) == [Embedding.of([1, 0], tokens=3), Embedding.of([1, 0], tokens=2)]


async def test_cancelled_method_call_stops_the_work(make_worker: MakeWorker) -> None:
    engine = make_worker("Embedding")

    async def until_working(count: int) -> None:
        async with asyncio.timeout(60):
            while (await engine.embed(["working"]))[0].tokens != count:  # noqa: ASYNC110 (in another process)
                await asyncio.sleep(0.01)

    await until_working(1)
    waiting = [asyncio.create_task(engine.embed(["wait"])) for _ in range(3)]
    await until_working(4)
    for task in waiting:
        task.cancel()
    await until_working(1)


async def test_concurrent_requests_share_one_worker(make_worker: MakeWorker) -> None:
    engine, before = make_worker(), children()
    results = await asyncio.gather(*(events(engine, f"count {length}") for length in range(1, 60)))
    assert [len(result) - 2 for result in results] == list(range(1, 60))
    assert len(children() - before) == 1


async def test_cancelled_generation_ends_in_the_worker(engine: WorkerEngine) -> None:
    assert engine._worker is not None
    unfinished = engine._worker.unfinished
    stream = stream_events(engine, ask("slowly 100000"))
    await anext(stream)
    await stream.aclose()
    tasks = [asyncio.create_task(engine.deliver(ask("slowly 100000"), lambda _: None)) for _ in range(20)]
    await asyncio.sleep(0)
    assert len(unfinished) >= len(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: not unfinished)
    assert len(await events(engine, "count 2")) == 4


async def test_worker_restarts_after_a_kill(engine: WorkerEngine) -> None:
    first = engine.pid
    assert first is not None
    running = asyncio.create_task(events(engine, "slowly 10000"))
    await asyncio.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await running
    # No request is needed.
    await until(lambda: engine.pid not in (None, first))
    assert len(await events(engine, "count 2")) == 4


async def test_request_waits_for_a_restart_up_to_load_seconds(
    make_worker: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = make_worker(load_seconds=0.02)
    await engine.start()
    assert engine.pid is not None
    assert not engine.is_restarting
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.is_restarting)
    with pytest.raises(ModelLoading):
        await events(engine, "count 2")
    assert engine.restart_seconds > 0
    await engine.wait_until_running()
    assert len(await events(engine, "count 2")) == 4
    assert not engine.is_restarting
    assert "model obedient: running again after " in caplog.text


async def test_stalled_worker_is_killed(make_worker: MakeWorker) -> None:
    engine = make_worker("Blocking", stall_seconds=0.5)
    await engine.start()
    first = engine.pid
    assert first is not None
    with pytest.raises(EngineTimeout):
        await events(engine, "x")
    assert not alive(first)


async def test_worker_stalled_by_a_method_call_is_killed(make_worker: MakeWorker) -> None:
    engine = make_worker(stall_seconds=0.5)
    await engine.start()
    await asyncio.sleep(0.7)  # an idle worker is not stalled
    async with asyncio.timeout(60):
        begun = time.monotonic()
        with pytest.raises(EngineTimeout):
            await engine.tokenize("hang", False)
        assert time.monotonic() - begun > 0.45


@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("asyncio", {"loop_factory": uvloop.new_event_loop})])
async def test_requests_to_a_dying_worker_raise_engine_died(engine: WorkerEngine, anyio_backend: Any) -> None:
    worker = engine._worker
    assert worker is not None
    assert engine.pid is not None
    opened = stream_events(engine, ask("slowly 1000"))
    await anext(opened)
    os.kill(engine.pid, signal.SIGKILL)
    # The death has not been noticed yet.
    late = await asyncio.gather(events(engine, "slowly 1000"), engine.tokenize("x", False), return_exceptions=True)
    assert [type(error) for error in late] == [EngineDied, EngineDied]
    await opened.aclose()
    with pytest.raises(EngineDied):
        await worker.deliver(ask("count 1"), lambda events: None)
    assert len(await events(engine, "count 2")) == 4


async def test_stop_leaves_no_process(engine: WorkerEngine) -> None:
    pid = engine.pid
    assert pid is not None
    await engine.stop()
    assert not alive(pid)
    with pytest.raises(Unavailable, match="stopped"):
        await events(engine, "count 1")
    assert engine.pid is None


async def drain(stream: AsyncIterable[object]) -> None:
    async for _ in stream:
        pass


async def test_stop_while_a_worker_dies_fails_its_requests(
    engine: WorkerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, is_waiting = Process.wait, asyncio.Event()

    async def wait_slowly(process: Process) -> int:
        is_waiting.set()
        await asyncio.sleep(0.1)
        return await wait(process)

    monkeypatch.setattr(Process, "wait", wait_slowly)
    pid = engine.pid
    assert pid is not None
    stream = stream_events(engine, ask("slowly 1000"))
    await anext(stream)
    os.kill(pid, signal.SIGKILL)
    await is_waiting.wait()
    await engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    async with asyncio.timeout(10):
        with pytest.raises(EngineDied):
            await drain(stream)


async def test_stop_during_start_leaves_no_process(make_worker: MakeWorker) -> None:
    engine, before = make_worker("Slow"), children()
    request = asyncio.create_task(events(engine, "x"))
    await until(lambda: children() - before)
    started = children() - before
    await engine.stop()
    with pytest.raises(Unavailable, match="stopped"):
        await request
    assert not any(map(alive, started))


async def test_worker_with_undecodable_description_is_killed(make_worker: MakeWorker) -> None:
    engine, before = make_worker("Incomprehensible"), children()
    with pytest.raises(ModelFailed):
        await asyncio.wait_for(engine.start(), 60)
    assert not any(map(alive, children() - before))


async def test_config_error_at_start_is_raised(make_worker: MakeWorker) -> None:
    engine = make_worker("Broken")
    with pytest.raises(ConfigError, match="not one"):
        await engine.start()
    with pytest.raises(ModelFailed):
        await events(engine, "x")


async def test_worker_that_keeps_dying_is_given_up() -> None:
    reasons: list[str] = []
    engine = WorkerEngine("tests.ipc.engines:Obedient", "obedient", {}, on_lost=reasons.append)
    await engine.start()
    for at in range(3):
        with pytest.raises((EngineDied, ModelFailed)):
            await events(engine, f"die {at}")
    await until(lambda: reasons)
    assert reasons == ["its process died 3 times soon after its start (exit -11)"]
    with pytest.raises(ModelFailed):
        await events(engine, "count 1")
    await engine.stop()


PARENT = """
import asyncio, sys
from dragoman.ipc.worker_engine import WorkerEngine
from tests.support.workers import events
async def main():
    engine = WorkerEngine(sys.argv[1], "b", {})
    await engine.start()
    print(engine.pid, flush=True)
    await events(engine, "x")
asyncio.run(main())
"""


LOCKING = pytest.param("Locking", marks=pytest.mark.skipif(sys.platform != "linux", reason="the kernel kills it"))


@pytest.mark.parametrize("name", ["Blocking", "Spinning", LOCKING])
async def test_kill_9_of_the_parent_leaves_no_worker(name: str) -> None:
    program = [sys.executable, "-c", PARENT, f"tests.ipc.engines:{name}"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=os.environ) as parent:  # noqa: ASYNC220 (a short wait)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        await asyncio.sleep(0.3)  # the worker is stuck now
        assert alive(child)
        parent.kill()
    try:
        await until(lambda: not alive(child))
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)

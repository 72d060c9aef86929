"""An engine in a worker behaves like one in this process, and the server survives its crashes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import (
    BadRequest,
    ConfigError,
    DragomanError,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    ModelFailed,
    ModelLoading,
    Unavailable,
)
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest, Message, Text, Tool
from dragoman.ipc.worker_engine import WorkerEngine


def ask(text: str) -> GenerationRequest:
    return GenerationRequest(id="1", messages=(Message("user", (Text(text),)),))


def worker(name: str = "Obedient", stall_seconds: float = 60.0, **options: Any) -> WorkerEngine:
    return WorkerEngine(f"tests.ipc.engines:{name}", name.lower(), options, stall_seconds)


def run(engine: WorkerEngine, scenario: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        try:
            await scenario
        finally:
            await engine.stop()

    asyncio.run(whole())


async def events(engine: WorkerEngine, text: str) -> list[Event]:
    return [event async for ready in engine.generate(ask(text)) for event in ready]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_gone(pid: int) -> None:
    for _ in range(1200):
        if not alive(pid):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} is still running")


def test_worker_behaves_like_its_engine() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        assert [(info.name, info.owner, info.context) for info in engine.models()] == [("obedient", "tests", 99)]
        assert (engine.device, engine.slots) == ("pretend", 3)
        assert engine.supports() == {"chat", "completion", "render", "tokenize"}
        said = await events(engine, "count 3")
        assert said == [Started(), *(TextDelta(f"{at} ", tokens=(at,)) for at in range(3)), Finished()]
        assert engine.kv_used == 0.03
        assert list(await engine.tokenize("héllo", True)) == [5, 1]
        assert await engine.detokenize([1, 2]) == "1 2"

    run(engine, scenario())


def test_render() -> None:
    engine = worker()

    async def scenario() -> None:
        request = msgspec.structs.replace(ask("show this"), tools=(Tool("f", parameters={"a": [1, None]}),))
        assert await engine.render(request) == RenderedPrompt("f: this", (1, 2), "hermes")
        with pytest.raises(BadRequest) as refused:
            await engine.render(ask("refuse not like that"))
        assert (refused.value.message, refused.value.param) == ("not like that", "messages[0]")
        with pytest.raises(EngineFailed):
            await engine.render(ask("raise boom"))
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_options_and_name_reach_the_engine() -> None:
    engine = worker("Configured", greeting="happy birthday")

    async def scenario() -> None:
        assert await events(engine, "x") == [Started(), TextDelta("happy birthday configured"), Finished()]

    run(engine, scenario())


def test_errors_keep_their_type_and_fields() -> None:
    engine = worker()

    async def scenario() -> None:
        with pytest.raises(BadRequest) as refused:
            await events(engine, "refuse not like that")
        assert (refused.value.message, refused.value.param) == ("not like that", "messages[0]")
        with pytest.raises(EngineFailed):
            await events(engine, "raise boom")
        with pytest.raises(BadRequest):
            await engine.detokenize([])
        assert await events(engine, "print 1")

    run(engine, scenario())


def test_concurrent_requests_are_independent() -> None:
    engine = worker()

    async def scenario() -> None:
        results = await asyncio.gather(*(events(engine, f"count {length}") for length in range(1, 60)))
        assert [len(result) - 2 for result in results] == list(range(1, 60))

    run(engine, scenario())


def test_closing_the_stream_cancels_the_generation() -> None:
    engine = worker()

    async def scenario() -> None:
        stream = engine.generate(ask("slowly 100000"))
        await anext(stream)
        await stream.aclose()
        child = engine._worker
        assert child is not None
        for _ in range(1200):
            if not child.streams:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the generation was not cancelled")

    run(engine, scenario())


def test_cancel_before_the_first_event() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        tasks = [asyncio.create_task(events(engine, "slowly 1000")) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await events(engine, "count 2")) == 4
        assert engine._worker is not None
        assert not engine._worker.streams

    run(engine, scenario())


def test_worker_restarts_after_a_kill() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        assert first is not None
        running = asyncio.create_task(events(engine, "slowly 10000"))
        await asyncio.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineDied):
            await running
        assert len(await events(engine, "count 2")) == 4
        assert engine.pid not in (None, first)

    run(engine, scenario())


def test_request_waits_for_a_restart_up_to_load_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = WorkerEngine("tests.ipc.engines:Obedient", "obedient", {}, load_seconds=0.02)

    async def scenario() -> None:
        await engine.start()
        assert engine.pid is not None
        assert not engine.is_restarting
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not engine.is_restarting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with pytest.raises(ModelLoading):
            await events(engine, "count 2")
        assert engine.restart_seconds > 0
        await engine.wait_until_running()
        assert len(await events(engine, "count 2")) == 4
        assert not engine.is_restarting

    run(engine, scenario())
    assert "model obedient: running again after " in caplog.text


def test_worker_restarts_without_a_request() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for _ in range(1200):
            await asyncio.sleep(0.05)
            if engine.pid not in (None, first):
                return
        raise AssertionError("no new worker")

    run(engine, scenario())


def test_stalled_worker_is_killed() -> None:
    engine = worker("Blocking", stall_seconds=0.5)

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        assert first is not None
        with pytest.raises(EngineTimeout):
            await events(engine, "x")
        await until_gone(first)

    run(engine, scenario())


def test_worker_stalled_by_a_question_is_killed() -> None:
    engine = worker(stall_seconds=0.5)

    async def scenario() -> None:
        await engine.start()
        await asyncio.sleep(0.6)  # an idle worker is not stalled
        async with asyncio.timeout(60):
            begun = time.monotonic()
            with pytest.raises(EngineTimeout):
                await engine.tokenize("hang", False)
            assert time.monotonic() - begun > 0.45

    run(engine, scenario())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_to_a_dying_worker_raise_engine_died(loop: Any) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        child = engine._worker
        assert child is not None
        assert engine.pid is not None
        opened = engine.generate(ask("slowly 1000"))
        await anext(opened)
        os.kill(engine.pid, signal.SIGKILL)
        # The event loop closes the pipe before the death is noticed.
        child._input.close()
        with pytest.raises(EngineDied):
            await events(engine, "count 1")
        with pytest.raises(EngineDied):
            await engine.tokenize("x", False)
        await opened.aclose()
        async with asyncio.timeout(60):
            while engine._worker is child:  # noqa: ASYNC110 (it ends in another process)
                await asyncio.sleep(0.01)
        assert len(await events(engine, "count 2")) == 4
        await engine.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


def test_request_to_a_dead_worker_raises_engine_died() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        child = engine._worker
        assert child is not None
        await child.kill()
        child.fail_pending()
        with pytest.raises(EngineDied):
            child.open(ask("count 1"))

    run(engine, scenario())


def test_stopped_engine_does_not_restart() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        await engine.stop()
        with pytest.raises(Unavailable, match="stopped"):
            await events(engine, "count 1")
        assert engine.pid is None

    run(engine, scenario())


def test_stop_during_start_leaves_no_process() -> None:
    engine = worker("Slow")

    async def scenario() -> None:
        before = children()
        request = asyncio.create_task(events(engine, "x"))
        child = await new_child(before)
        await engine.stop()
        with pytest.raises(Unavailable, match="stopped"):
            await request
        assert not alive(child)

    run(engine, scenario())


def test_worker_with_undecodable_description_is_killed() -> None:
    engine = worker("Incomprehensible")

    async def scenario() -> None:
        before = children()
        start = asyncio.create_task(engine.start())
        child = await new_child(before)
        with pytest.raises(ModelFailed):
            await asyncio.wait_for(start, 10)
        assert not alive(child)

    run(engine, scenario())


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    return {int(pid) for task in tasks for pid in _started_by(task)}


def _started_by(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:
        # The thread has just ended.
        return []


async def new_child(before: set[int]) -> int:
    """Return the new child of this process."""
    async with asyncio.timeout(60):
        while not children() - before:  # noqa: ASYNC110 (nothing says when a process appears)
            await asyncio.sleep(0.01)
    (child,) = children() - before
    return child


def test_config_error_at_start_is_raised() -> None:
    engine = worker("Broken")

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="not one"):
            await engine.start()
        with pytest.raises((ConfigError, DragomanError)):
            await events(engine, "x")

    run(engine, scenario())


def test_concurrent_first_requests_start_one_worker() -> None:
    engine = worker()
    pids = set()

    async def one() -> None:
        await events(engine, "count 1")
        pids.add(engine.pid)

    async def scenario() -> None:
        await asyncio.gather(*(one() for _ in range(10)))
        assert len(pids) == 1

    run(engine, scenario())


def test_stop_leaves_no_process() -> None:
    engine = worker()
    pids: list[int | None] = []

    async def scenario() -> None:
        await engine.start()
        pids.append(engine.pid)

    run(engine, scenario())
    assert pids[0] is not None
    assert not alive(pids[0])


PARENT = """
import asyncio, sys
from dragoman.ipc.worker_engine import WorkerEngine
async def main():
    engine = WorkerEngine(sys.argv[1], "b", {})
    await engine.start()
    print(engine.pid, flush=True)
    from tests.ipc.test_worker import events
    await events(engine, "x")
asyncio.run(main())
"""


@pytest.mark.parametrize("engine", ["Blocking", "Spinning"])
def test_kill_9_of_the_parent_leaves_no_worker(engine: str) -> None:
    program = [sys.executable, "-c", PARENT, f"tests.ipc.engines:{engine}"]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, env=os.environ)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)  # the worker is stuck now
        assert alive(child)
        parent.kill()
    asyncio.run(until_gone(child))

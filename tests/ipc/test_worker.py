"""An engine in a child process behaves as if it were here, and the server outlives it."""

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

from dragoman.core.engine import Rendered
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
    raise AssertionError(f"process {pid} is still there")


def test_it_is_the_engine_it_runs() -> None:
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


def test_prompts_are_shown() -> None:
    engine = worker()

    async def scenario() -> None:
        request = msgspec.structs.replace(ask("show this"), tools=(Tool("f", parameters={"a": [1, None]}),))
        assert await engine.render(request) == Rendered("f: this", (1, 2), "hermes")
        with pytest.raises(BadRequest) as refused:
            await engine.render(ask("refuse not like that"))
        assert (refused.value.message, refused.value.param) == ("not like that", "messages[0]")
        with pytest.raises(EngineFailed):
            await engine.render(ask("raise boom"))
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_options_and_name_arrive() -> None:
    engine = worker("Configured", greeting="happy birthday")

    async def scenario() -> None:
        assert await events(engine, "x") == [Started(), TextDelta("happy birthday configured"), Finished()]

    run(engine, scenario())


def test_errors_arrive_as_what_they_were() -> None:
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


def test_many_at_once_keep_apart() -> None:
    engine = worker()

    async def scenario() -> None:
        told = await asyncio.gather(*(events(engine, f"count {length}") for length in range(1, 60)))
        assert [len(said) - 2 for said in told] == list(range(1, 60))

    run(engine, scenario())


def test_closing_the_iterator_cancels_in_the_child() -> None:
    engine = worker()

    async def scenario() -> None:
        stream = engine.generate(ask("slowly 100000"))
        await anext(stream)
        await stream.aclose()
        child = engine._child
        assert child is not None
        for _ in range(1200):
            if not child.streams:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the child was not told, or did not stop")

    run(engine, scenario())


def test_cancelled_before_it_began() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        tasks = [asyncio.create_task(events(engine, "slowly 1000")) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(await events(engine, "count 2")) == 4
        assert engine._child is not None
        assert not engine._child.streams

    run(engine, scenario())


def test_its_death_is_an_error_and_then_a_new_life() -> None:
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


def test_a_request_waits_for_a_new_life_as_long_as_it_may(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = WorkerEngine("tests.ipc.engines:Obedient", "obedient", {}, load_seconds=0.02)

    async def scenario() -> None:
        await engine.start()
        assert engine.pid is not None
        assert not engine.is_away
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not engine.is_away:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with pytest.raises(ModelLoading):
            await events(engine, "count 2")
        assert engine.away_seconds > 0
        await engine.back()
        assert len(await events(engine, "count 2")) == 4
        assert not engine.is_away

    run(engine, scenario())
    assert "model obedient: there again after " in caplog.text


def test_it_is_started_again_without_being_asked() -> None:
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
        raise AssertionError("no new child")

    run(engine, scenario())


def test_one_that_hangs_is_ended() -> None:
    engine = worker("Blocking", stall_seconds=0.5)

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        assert first is not None
        with pytest.raises(EngineTimeout):
            await events(engine, "x")
        await until_gone(first)

    run(engine, scenario())


def test_one_that_hangs_over_a_question_is_ended() -> None:
    engine = worker(stall_seconds=0.5)

    async def scenario() -> None:
        await engine.start()
        await asyncio.sleep(0.6)  # idle, which is no silence
        async with asyncio.timeout(60):
            begun = time.monotonic()
            with pytest.raises(EngineTimeout):
                await engine.tokenize("hang", False)
            assert time.monotonic() - begun > 0.45

    run(engine, scenario())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_at_the_moment_of_its_death_get_502(loop: Any) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        child = engine._child
        assert child is not None
        assert engine.pid is not None
        opened = engine.generate(ask("slowly 1000"))
        await anext(opened)
        os.kill(engine.pid, signal.SIGKILL)
        # The event loop closes the pipe before anybody has been told.
        child._input.close()
        with pytest.raises(EngineDied):
            await events(engine, "count 1")
        with pytest.raises(EngineDied):
            await engine.tokenize("x", False)
        await opened.aclose()
        async with asyncio.timeout(60):
            while engine._child is child:  # noqa: ASYNC110 (it ends in another process)
                await asyncio.sleep(0.01)
        assert len(await events(engine, "count 2")) == 4
        await engine.stop()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


def test_a_request_that_meets_a_buried_child_gets_502() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        child = engine._child
        assert child is not None
        await child.kill()
        child.bury()
        with pytest.raises(EngineDied):
            child.open(ask("count 1"))

    run(engine, scenario())


def test_after_the_end_there_is_no_new_life() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        await engine.stop()
        with pytest.raises(Unavailable, match="stopped"):
            await events(engine, "count 1")
        assert engine.pid is None

    run(engine, scenario())


def test_stopping_while_it_starts_leaves_no_child() -> None:
    engine = worker("Slow")

    async def scenario() -> None:
        before = children()
        asked = asyncio.create_task(events(engine, "x"))
        child = await new_child(before)
        await engine.stop()
        with pytest.raises(Unavailable, match="stopped"):
            await asked
        assert not alive(child)

    run(engine, scenario())


def test_one_that_starts_but_cannot_be_understood_is_ended() -> None:
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
    """The child of this process that was not there before."""
    async with asyncio.timeout(60):
        while not children() - before:  # noqa: ASYNC110 (nothing says when a process appears)
            await asyncio.sleep(0.01)
    (child,) = children() - before
    return child


def test_one_that_cannot_start_says_why() -> None:
    engine = worker("Broken")

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="not one"):
            await engine.start()
        with pytest.raises((ConfigError, DragomanError)):
            await events(engine, "x")

    run(engine, scenario())


def test_many_who_ask_start_one_child() -> None:
    engine = worker()
    pids = set()

    async def one() -> None:
        await events(engine, "count 1")
        pids.add(engine.pid)

    async def scenario() -> None:
        await asyncio.gather(*(one() for _ in range(10)))
        assert len(pids) == 1

    run(engine, scenario())


def test_stopping_leaves_no_child() -> None:
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
def test_kill_9_of_the_parent_leaves_no_child(engine: str) -> None:
    program = [sys.executable, "-c", PARENT, f"tests.ipc.engines:{engine}"]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, env=os.environ)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)  # by now it is stuck in a call that never returns
        assert alive(child)
        parent.kill()
    asyncio.run(until_gone(child))

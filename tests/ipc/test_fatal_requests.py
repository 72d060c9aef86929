"""A request that crashed the worker twice is refused."""

import asyncio
import logging
import os
import signal

import msgspec
import pytest

from dragoman.core.engine import stream_events
from dragoman.core.errors import EngineDied, RequestRefused
from dragoman.ipc.engine_client import WorkerRequest
from dragoman.ipc.messages import pack
from dragoman.ipc.worker_engine import MAX_REQUESTS, MEMORY_SECONDS, FatalRequests, WorkerEngine
from tests.support.workers import ask, events

pytestmark = pytest.mark.anyio


def is_refused(fatal: FatalRequests, request: WorkerRequest) -> bool:
    try:
        fatal.check(request)
    except RequestRefused:
        return True
    return False


def test_two_crashes_refuse_the_same_request_from_any_caller() -> None:
    fatal = FatalRequests()
    fatal.note_crash(ask("die"))
    assert not is_refused(fatal, ask("die"))
    fatal.note_crash(msgspec.structs.replace(ask("die"), id="2", principal="bob"))
    assert is_refused(fatal, ask("die"))
    assert is_refused(fatal, msgspec.structs.replace(ask("die"), id="3", principal="alice", labels={"user": "x"}))
    assert is_refused(fatal, pack(ask("die")))
    assert not is_refused(fatal, ask("live"))
    assert not is_refused(fatal, msgspec.structs.replace(ask("die"), max_tokens=3))


def test_crashes_are_forgotten() -> None:
    now = 0.0
    fatal = FatalRequests(lambda: now)
    for _ in range(2):
        fatal.note_crash(ask("die"))
    assert is_refused(fatal, ask("die"))
    now += MEMORY_SECONDS
    assert not is_refused(fatal, ask("die"))
    for text in ("die", "die", *map(str, range(MAX_REQUESTS))):
        fatal.note_crash(ask(text))
    assert not is_refused(fatal, ask("die"))


async def test_call_that_crashed_the_worker_twice_is_refused(
    engine: WorkerEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for call in (lambda: events(engine, "die 1"), lambda: engine.tokenize("die", False)):
        for _ in range(2):
            with pytest.raises(EngineDied):
                await call()
            await engine.wait_until_running()
        before = engine.pid
        with pytest.raises(RequestRefused) as raised:
            await call()
        assert (raised.value.status, raised.value.code) == (400, "request_refused")
        assert len(await events(engine, "count 2")) == 4
        assert list(await engine.tokenize("live", False)) == [4, 0]
        assert engine.pid == before


async def test_crash_with_several_requests_counts_against_no_request(engine: WorkerEngine) -> None:
    for _ in range(3):
        other = stream_events(engine, ask("slowly 100000"))
        await anext(other)
        with pytest.raises(EngineDied):
            await events(engine, "die 1")
        with pytest.raises(EngineDied):
            [ready async for ready in other]
        async with asyncio.timeout(60):
            await engine.wait_until_running()


async def test_kill_from_outside_does_not_count_against_a_request(engine: WorkerEngine) -> None:
    for _ in range(3):
        stream = stream_events(engine, ask("slowly 100000"))
        await anext(stream)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            [ready async for ready in stream]
        async with asyncio.timeout(60):
            await engine.wait_until_running()

"""A request that crashed the worker twice is refused."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from dragoman.core.errors import BadRequest, EngineDied, RequestRefused
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.ipc.fatal_requests import MEMORY_SECONDS, MOST_REQUESTS, FatalRequests
from dragoman.ipc.worker_messages import Detokenize, Tokenize
from tests.ipc.test_worker import ask, events, run, worker


def is_refused(fatal: FatalRequests, request: GenerationRequest | msgspec.Raw | Tokenize | Detokenize) -> bool:
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
    assert is_refused(fatal, msgspec.Raw(msgspec.msgpack.encode(ask("die"))))
    assert not is_refused(fatal, ask("live"))
    assert not is_refused(fatal, msgspec.structs.replace(ask("die"), max_tokens=3))


def test_question_ids_are_ignored() -> None:
    fatal = FatalRequests()
    fatal.note_crash(Tokenize(1, "die", True))
    fatal.note_crash(Tokenize(2, "die", True))
    assert is_refused(fatal, Tokenize(3, "die", True))
    assert not is_refused(fatal, Tokenize(3, "die", False))
    assert not is_refused(fatal, Detokenize(3, (1,)))


def test_crashes_are_forgotten() -> None:
    now = 0.0
    fatal = FatalRequests(lambda: now)
    fatal.note_crash(ask("die"))
    fatal.note_crash(ask("die"))
    assert is_refused(fatal, ask("die"))
    now += MEMORY_SECONDS
    assert not is_refused(fatal, ask("die"))
    fatal.note_crash(ask("die"))
    fatal.note_crash(ask("die"))
    for at in range(MOST_REQUESTS):
        fatal.note_crash(ask(f"die {at}"))
    assert not is_refused(fatal, ask("die"))


def test_request_that_crashed_the_worker_twice_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        for _ in range(2):
            with pytest.raises(EngineDied):
                await events(engine, "die 1")
            await engine.wait_until_running()
        before = engine.pid
        with pytest.raises(RequestRefused) as raised:
            await events(engine, "die 1")
        assert (raised.value.status, raised.value.code) == (400, "request_refused")
        assert len(await events(engine, "count 2")) == 4
        unsendable = GenerationRequest(messages=(Message("user", (Text("half \ud83d"),)),))
        with pytest.raises(BadRequest):
            await anext(engine.generate(unsendable))
        assert engine.pid == before

    with caplog.at_level(logging.CRITICAL):
        run(engine, scenario())


def test_question_that_crashed_the_worker_twice_is_refused() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        for _ in range(2):
            with pytest.raises(EngineDied):
                await engine.tokenize("die", False)
            await engine.wait_until_running()
        with pytest.raises(RequestRefused):
            await engine.tokenize("die", False)
        assert list(await engine.tokenize("live", False))

    run(engine, scenario())


async def rest(stream: AsyncGenerator[Sequence[Event], None]) -> list[Sequence[Event]]:
    return [ready async for ready in stream]


def test_crash_with_several_requests_counts_against_no_request() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        for _ in range(3):
            other = engine.generate(ask("slowly 100000"))
            await anext(other)
            with pytest.raises(EngineDied):
                await events(engine, "die 1")
            with pytest.raises(EngineDied):
                await rest(other)
            async with asyncio.timeout(60):
                await engine.wait_until_running()

    run(engine, scenario())


def test_kill_from_outside_does_not_count_against_a_request() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        for _ in range(3):
            stream = engine.generate(ask("slowly 100000"))
            await anext(stream)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                await rest(stream)
            async with asyncio.timeout(60):
                await engine.wait_until_running()

    run(engine, scenario())

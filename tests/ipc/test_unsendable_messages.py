"""What cannot cross the pipe, or be read behind it, is an error of the request that it belongs to."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from dragoman.core.errors import BadRequest, EngineDied, EngineFailed
from dragoman.core.request import Tool
from dragoman.ipc.worker_messages import HEADER, Start, encode
from tests.ipc.test_worker import ask, events, run, worker


@pytest.mark.parametrize("what", ["numpy 1", "half 1", "numbers 1"])
def test_events_that_cannot_be_sent_fail_their_own_request(what: str) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        wanted = ["count 5", what, "count 5", what]
        told = await asyncio.gather(*(events(engine, text) for text in wanted), return_exceptions=True)
        assert [len(said) if isinstance(said, list) else type(said) for said in told] == [
            *(7, EngineFailed),
            *(7, EngineFailed),
        ]
        assert engine._child is not None
        assert not engine._child.busy

    run(engine, scenario())


def test_an_error_whose_words_cannot_be_sent_still_arrives() -> None:
    engine = worker()

    async def scenario() -> None:
        with pytest.raises(BadRequest, match=r"not \?"):
            await events(engine, "complain 1")

    run(engine, scenario())


@pytest.mark.parametrize("what", ["wrong 1", "eos 1"])
def test_events_that_cannot_be_read_fail_their_own_request(what: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        wanted = ["slowly 20", what, "slowly 20", what]
        told = await asyncio.gather(*(events(engine, text) for text in wanted), return_exceptions=True)
        assert [len(said) if isinstance(said, list) else type(said) for said in told] == [
            *(22, EngineFailed),
            *(22, EngineFailed),
        ]
        assert engine._child is not None
        assert not engine._child.busy
        assert engine.pid == first

    run(engine, scenario())
    assert caplog.messages == ["what the engine told cannot be read"] * 2


def test_what_goes_on_after_it_could_not_be_read_is_cancelled() -> None:
    engine = worker(stall_seconds=1)

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        with pytest.raises(EngineFailed):
            await events(engine, "wrong 100000000")
        assert list(await engine.tokenize("abc", False)) == [3, 0]
        assert len(await events(engine, "count 2")) == 4
        assert engine.pid == first

    run(engine, scenario())


def test_a_message_of_nobody_that_cannot_be_read_is_a_death_and_then_a_new_life() -> None:
    engine = worker()

    async def scenario() -> None:
        with pytest.raises(EngineDied):
            await events(engine, "full 1")
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_an_answer_that_cannot_be_sent_or_read_is_an_error() -> None:
    engine = worker()

    async def scenario() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(EngineFailed):
                await engine.tokenize("numpy", False)
            with pytest.raises(EngineFailed):
                await engine.tokenize("words", False)
            assert list(await engine.tokenize("abc", False)) == [3, 0]

    run(engine, scenario())


def test_a_request_that_cannot_be_sent_is_the_callers_mistake() -> None:
    engine = worker()
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}

    async def scenario() -> None:
        big = msgspec.structs.replace(ask("count 1"), tools=(Tool("f", parameters=schema),))
        for wrong in (big, ask("count \ud83d")):
            with pytest.raises(BadRequest, match="cannot be passed to the engine"):
                await anext(engine.generate(wrong))
        with pytest.raises(BadRequest, match="cannot be passed to the engine"):
            await engine.detokenize([10**30])
        assert engine._child is not None
        assert not engine._child.busy
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_a_message_that_cannot_be_read_ends_the_child() -> None:
    command = [sys.executable, "-m", "dragoman.ipc.worker_main"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdin.write(encode(Start("tests.ipc.engines:Obedient", "o", {})))
        child.stdin.flush()
        assert child.stdout.read(HEADER.size)
        child.stdin.write(HEADER.pack(3) + b"\xc1\xc1\xc1")
        child.stdin.flush()
        try:
            assert child.wait(10) == 1
            assert b"could not be read" in child.stderr.read()
        finally:
            child.kill()

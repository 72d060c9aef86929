"""Messages that cannot be encoded or decoded fail only their own request."""

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
def test_unencodable_events_fail_only_their_request(what: str) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        texts = ["count 5", what, "count 5", what]
        results = await asyncio.gather(*(events(engine, text) for text in texts), return_exceptions=True)
        assert [len(result) if isinstance(result, list) else type(result) for result in results] == [
            *(7, EngineFailed),
            *(7, EngineFailed),
        ]
        assert engine._worker is not None
        assert not engine._worker.busy

    run(engine, scenario())


def test_error_with_unencodable_message_still_arrives() -> None:
    engine = worker()

    async def scenario() -> None:
        with pytest.raises(BadRequest, match=r"not \?"):
            await events(engine, "complain 1")

    run(engine, scenario())


@pytest.mark.parametrize("what", ["wrong 1", "eos 1"])
def test_undecodable_events_fail_only_their_request(what: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first = engine.pid
        texts = ["slowly 20", what, "slowly 20", what]
        results = await asyncio.gather(*(events(engine, text) for text in texts), return_exceptions=True)
        assert [len(result) if isinstance(result, list) else type(result) for result in results] == [
            *(22, EngineFailed),
            *(22, EngineFailed),
        ]
        assert engine._worker is not None
        assert not engine._worker.busy
        assert engine.pid == first

    run(engine, scenario())
    assert caplog.messages == ["engine output cannot be decoded"] * 2


def test_generation_is_cancelled_after_undecodable_output() -> None:
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


def test_undecodable_message_without_request_restarts_the_worker() -> None:
    engine = worker()

    async def scenario() -> None:
        with pytest.raises(EngineDied):
            await events(engine, "full 1")
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_unencodable_or_undecodable_answer_raises() -> None:
    engine = worker()

    async def scenario() -> None:
        async with asyncio.timeout(60):
            with pytest.raises(EngineFailed):
                await engine.tokenize("numpy", False)
            with pytest.raises(EngineFailed):
                await engine.tokenize("words", False)
            assert list(await engine.tokenize("abc", False)) == [3, 0]

    run(engine, scenario())


def test_unencodable_request_is_a_bad_request() -> None:
    engine = worker()
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}

    async def scenario() -> None:
        big = msgspec.structs.replace(ask("count 1"), tools=(Tool("f", parameters=schema),))
        for wrong in (big, ask("count \ud83d")):
            with pytest.raises(BadRequest, match="cannot be passed to the engine"):
                await anext(engine.generate(wrong))
        with pytest.raises(BadRequest, match="cannot be passed to the engine"):
            await engine.detokenize([10**30])
        assert engine._worker is not None
        assert not engine._worker.busy
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_worker_exits_on_undecodable_message() -> None:
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

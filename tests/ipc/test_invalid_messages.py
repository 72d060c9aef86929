"""Messages that cannot be encoded or decoded fail only their own request."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from dragoman.core.engine import stream_events
from dragoman.core.errors import BadRequest, EngineDied, EngineFailed
from dragoman.core.request import Tool
from dragoman.ipc.framing import HEADER, encode
from dragoman.ipc.messages import Start
from dragoman.ipc.worker_engine import WorkerEngine
from tests.ipc.conftest import MakeWorker
from tests.support.workers import ask, events

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("what", "logged"),
    [
        *((unencodable, []) for unencodable in ("numpy 1", "half 1", "numbers 1")),
        *((undecodable, ["engine output cannot be decoded"] * 2) for undecodable in ("wrong 1", "eos 1")),
    ],
)
async def test_invalid_events_fail_only_their_request(
    engine: WorkerEngine, what: str, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = engine.pid
    texts = ["slowly 20", what, "slowly 20", what]
    results = await asyncio.gather(*(events(engine, text) for text in texts), return_exceptions=True)
    assert [len(result) if isinstance(result, list) else type(result) for result in results] == [
        *(22, EngineFailed),
        *(22, EngineFailed),
    ]
    assert engine._worker is not None
    assert not engine._worker.unfinished
    assert engine.pid == first
    assert caplog.messages == logged


async def test_error_with_unencodable_message_still_arrives(engine: WorkerEngine) -> None:
    with pytest.raises(BadRequest, match=r"not \?"):
        await events(engine, "complain 1")


async def test_generation_is_cancelled_after_undecodable_output(make_worker: MakeWorker) -> None:
    engine = make_worker(stall_seconds=1)
    await engine.start()
    first = engine.pid
    with pytest.raises(EngineFailed):
        await events(engine, "wrong 100000000")
    assert list(await engine.tokenize("abc", False)) == [3, 0]
    assert len(await events(engine, "count 2")) == 4
    assert engine.pid == first


async def test_undecodable_message_without_request_restarts_the_worker(engine: WorkerEngine) -> None:
    with pytest.raises(EngineDied):
        await events(engine, "full 1")
    assert len(await events(engine, "count 2")) == 4


async def test_unencodable_or_undecodable_answer_raises(engine: WorkerEngine) -> None:
    async with asyncio.timeout(60):
        for text in ("numpy", "words"):
            with pytest.raises(EngineFailed):
                await engine.tokenize(text, False)
        assert list(await engine.tokenize("abc", False)) == [3, 0]


async def test_unencodable_request_is_a_bad_request(engine: WorkerEngine) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}
    big = msgspec.structs.replace(ask("count 1"), tools=(Tool("f", parameters=schema),))
    for wrong in (big, ask("\ud83d")):
        with pytest.raises(BadRequest, match="cannot be passed to the engine"):
            await anext(stream_events(engine, wrong))
    with pytest.raises(BadRequest, match="cannot be passed to the engine"):
        await engine.detokenize([10**30])
    assert engine._worker is not None
    assert not engine._worker.unfinished
    assert len(await events(engine, "count 2")) == 4


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

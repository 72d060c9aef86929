"""Generations that are forwarded to another process."""

import asyncio
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import EngineDied
from dragoman.core.events import Finished, TextDelta
from dragoman.ipc.worker_messages import GenerationProgress, PackedStep, pack, unpack
from tests.ipc.test_worker import ask, events, run, worker

FORWARDED_KEY = 2 << 32
"""Keys of another process than the parent."""


class RecordingSink:
    def __init__(self) -> None:
        self.received: dict[int, list[GenerationProgress]] = {}

    def put(self, progress: msgspec.Raw) -> None:
        part = unpack(progress)
        self.received.setdefault(part.id, []).append(part)

    async def until_ended(self, key: int) -> list[GenerationProgress]:
        async with asyncio.timeout(60):
            while not self.received.get(key, [GenerationProgress(key)])[-1].ended:  # noqa: ASYNC110 (another process reports)
                await asyncio.sleep(0.01)
        return self.received[key]


class FailingSink(RecordingSink):
    """Raises at the first message."""

    def put(self, progress: msgspec.Raw) -> None:
        super().put(progress)
        if len(self.received) == 1 and not self.received[FORWARDED_KEY][1:]:
            raise RuntimeError("unexpected")


def packed(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(ask(text)))


def test_complete_reply_does_not_keep_the_worker_busy() -> None:
    engine = worker(stall_seconds=1)

    async def scenario() -> None:
        await engine.start()
        first, sink = engine.pid, RecordingSink()
        await engine.forward(sink, FORWARDED_KEY, packed("slowly 5"))
        assert engine._worker is not None
        assert engine._worker.busy
        parts = await sink.until_ended(FORWARDED_KEY)
        said = [event for part in parts for event in part.events]
        assert [event.text for event in said if isinstance(event, TextDelta)] == [f"{at} " for at in range(5)]
        assert isinstance(said[-1], Finished)
        assert not engine._worker.busy
        await asyncio.sleep(1.5)
        assert engine.pid == first
        engine.stop_forwarding(FORWARDED_KEY, ended=True)
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_stop_forwarding_cancels_and_a_death_fails_the_others() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        sink = RecordingSink()
        for key in (FORWARDED_KEY, FORWARDED_KEY + 1):
            await engine.forward(sink, key, packed("slowly 10000"))
        await asyncio.sleep(0.1)
        engine.stop_forwarding(FORWARDED_KEY, ended=False)
        child = engine._worker
        assert child is not None
        assert set(child.forwarded) == {FORWARDED_KEY + 1}
        await child.kill()
        failure = (await sink.until_ended(FORWARDED_KEY + 1))[-1].failure
        assert failure is not None
        assert isinstance(failure.error(), EngineDied)
        assert not any(part.ended for part in sink.received[FORWARDED_KEY])

    run(engine, scenario())


def test_delivery_error_restarts_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first, sink = engine.pid, FailingSink()
        await engine.forward(sink, FORWARDED_KEY, packed("slowly 10000"))
        failure = (await sink.until_ended(FORWARDED_KEY))[-1].failure
        assert failure is not None
        assert isinstance(failure.error(), EngineDied)
        async with asyncio.timeout(60):
            # The restart needs no request.
            while engine.is_restarting:  # noqa: ASYNC110 (another process reports)
                await asyncio.sleep(0.01)
        assert engine.pid != first
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())
    assert caplog.messages[0] == "model obedient: a message of the engine's process could not be delivered"


def test_output_without_a_reader_is_not_decoded(caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        assert engine._worker is not None
        wrong: Any = None
        engine._worker.deliver(PackedStep((pack(GenerationProgress(FORWARDED_KEY, (TextDelta(wrong),))),)))

    run(engine, scenario())
    assert not caplog.messages

"""Generations that are forwarded to another process."""

import asyncio
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import EngineDied
from dragoman.core.events import Finished, TextDelta
from dragoman.ipc.messages import GenerationProgress, PackedStep, pack, unpack
from dragoman.ipc.worker_engine import WorkerEngine
from tests.ipc.conftest import MakeWorker
from tests.support.workers import ask, events, until

pytestmark = pytest.mark.anyio

KEY = 2 << 32
"""A key of another process than the parent."""


class RecordingSink:
    def __init__(self) -> None:
        self.received: dict[int, list[GenerationProgress]] = {}

    def put(self, progress: msgspec.Raw) -> None:
        part = unpack(progress)
        self.received.setdefault(part.key, []).append(part)

    async def until_ended(self, key: int) -> list[GenerationProgress]:
        await until(lambda: key in self.received and self.received[key][-1].ended)
        return self.received[key]


class FailingSink(RecordingSink):
    """Raises at the first message."""

    def put(self, progress: msgspec.Raw) -> None:
        super().put(progress)
        if len(self.received[KEY]) == 1:
            raise RuntimeError("unexpected")


def failed_with_death(parts: list[GenerationProgress]) -> bool:
    failure = parts[-1].failure
    return failure is not None and isinstance(failure.error(), EngineDied)


async def test_complete_reply_does_not_keep_the_worker_busy(make_worker: MakeWorker) -> None:
    engine = make_worker(stall_seconds=1)
    await engine.start()
    first, sink = engine.pid, RecordingSink()
    assert engine._worker is not None
    assert engine.forward(sink.put, KEY, pack(ask("slowly 5")))
    assert engine._worker.unfinished
    parts = await sink.until_ended(KEY)
    said = [event for part in parts for event in part.events]
    assert [event.text for event in said if isinstance(event, TextDelta)] == [f"{at} " for at in range(5)]
    assert isinstance(said[-1], Finished)
    assert not engine._worker.unfinished
    await asyncio.sleep(1.5)
    assert engine.pid == first
    engine.stop_forwarding(KEY)
    assert len(await events(engine, "count 2")) == 4


async def test_stop_forwarding_cancels_and_a_death_fails_the_others(engine: WorkerEngine) -> None:
    sink = RecordingSink()
    worker = engine._worker
    assert worker is not None
    for key in (KEY, KEY + 1):
        assert engine.forward(sink.put, key, pack(ask("slowly 10000")))
    await until(lambda: len(sink.received) == 2)
    engine.stop_forwarding(KEY)
    await until(lambda: set(worker.unfinished) == {KEY + 1})
    worker.link.close()
    assert failed_with_death(await sink.until_ended(KEY + 1))
    assert not any(part.ended for part in sink.received[KEY])


async def test_delivery_error_restarts_the_worker(engine: WorkerEngine, caplog: pytest.LogCaptureFixture) -> None:
    first, sink = engine.pid, FailingSink()
    assert engine.forward(sink.put, KEY, pack(ask("slowly 10000")))
    assert failed_with_death(await sink.until_ended(KEY))
    # The restart needs no request.
    await until(lambda: engine.pid not in (None, first))
    assert len(await events(engine, "count 2")) == 4
    assert caplog.messages[0] == "model obedient: a message of the engine's process could not be delivered"


async def test_output_without_a_reader_is_not_decoded(engine: WorkerEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert engine._worker is not None
    wrong: Any = None
    engine._worker.receive(PackedStep((pack(GenerationProgress(KEY, (TextDelta(wrong),))),)))
    assert not caplog.messages

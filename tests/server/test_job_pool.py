"""The pool of jobs: background responses of several callers, and the bodies of batch lines."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import QueueFull
from dragoman.server import background
from dragoman.server.auth.callers import Caller, SavedCaller
from dragoman.server.background import BackgroundRequest, BackgroundResponses
from dragoman.server.batches.line_jobs import JobPool, LineJobs
from dragoman.server.telemetry.metrics import Metrics
from dragoman.storage.batch_states import StoredBatch
from dragoman.storage.batches import WaitingLine
from dragoman.storage.response_values import StoredResponse


class EndlessApp:
    def restore_caller(self, saved: SavedCaller) -> Caller:
        return Caller(saved.principal)

    async def check_model(self, caller: Caller, name: str) -> None:
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()


class EmptyStore:
    async def queue(self, response: StoredResponse, request: bytes, frames: bytes) -> None:
        pass

    def note_lost(self, response_ids: Sequence[str]) -> None:
        pass


async def test_a_caller_leaves_room_for_background_responses_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 4)
    responses = BackgroundResponses(EndlessApp(), EmptyStore(), "/v1/responses")  # type: ignore[arg-type]

    async def start(principal: str, name: str) -> None:
        queued = StoredResponse(name, principal, 1.0, "queued", b"{}", is_background=True)
        saved = SavedCaller.of(Caller(principal))
        await responses.start(queued, BackgroundRequest(saved, "echo", b"{}"), b"")

    await start("ann", "1")
    await start("ann", "2")
    with pytest.raises(QueueFull):
        await start("ann", "3")
    await start("bob", "4")
    await responses.stop(0, asyncio.Event())
    await responses.stop(0, asyncio.Event())


class OneLineStore:
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read_waiting(self, batch_id: str, place: tuple[bytes, int], limit: int) -> Sequence[WaitingLine]:
        self.asked.set()
        return [WaitingLine(1, 0, 2, b"")] if place == (b"", 0) else []


async def test_body_of_a_line_is_read_when_the_line_has_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = OneLineStore(), asyncio.Event()
    pool = JobPool(EndlessApp(), store, None, Metrics(), 1)  # type: ignore[arg-type]
    caller = msgspec.json.encode(SavedCaller.of(Caller("ann")))
    batch = StoredBatch(
        id="batch_0",
        api="openai",
        created=0,
        expires=1,
        state="in_progress",
        endpoint="/v1/embeddings",
        principal="ann",
        caller=caller,
        source="",
        digest="",
        server="",
    )
    jobs = LineJobs(pool, batch, lambda: None)

    async def read_body(line: WaitingLine) -> None:
        read.set()

    monkeypatch.setattr(jobs, "_read_body", read_body)
    await pool.slots.acquire()
    running = asyncio.create_task(jobs.run())
    await store.asked.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not read.is_set()
    pool.slots.release()
    await asyncio.wait_for(running, 30)
    assert read.is_set()

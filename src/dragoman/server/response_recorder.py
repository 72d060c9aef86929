"""Stores one response: its end, and before that the events of its stream. A WebSocket remembers the response too.

Rules
1. A response is stored before its end is sent.
2. The events of a stream are stored in groups, every `WRITE_SECONDS`, beside the stream: it never waits for them. A
   stream that ends earlier is stored as a whole.
3. A stream whose client has gone is cancelled, and its response ends as cancelled. Its events so far can be read.
4. If the storage is not available, requests that rely on it fail: those with `store: true`, a conversation or
   `background`. All others are answered, with a warning.
5. A background response that was cancelled or deleted stops with the next group of events.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.edits import ContextEvent
from dragoman.core.errors import DragomanError, StorageUnavailable
from dragoman.core.events import Event, Started
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.protocols.responses import items as wire_items
from dragoman.protocols.responses.encoder import ResponseEncoder, ResponseEncoding, error_code
from dragoman.protocols.responses.frames import count_frames
from dragoman.server.base_app import BaseApp
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.response_values import (
    EarlyEnd,
    EndedResponse,
    RecordedEvents,
    Recording,
    ResponseStatus,
    StoredItem,
    StoredResponse,
)

WRITE_SECONDS = 0.25
MANY_ITEMS = 500
"""Above this many items, work is done in a thread, even if they are small."""
NOT_STORED = "the response is not stored, because the storage is not available"


class ResponseRecorder:
    """Encodes a reply as its `ResponseEncoding` does, and stores it. A stream has one recorder as its encoder."""

    def __init__(self, app: BaseApp, exchange: HttpExchange, encoding: ResponseEncoding) -> None:
        self.stream_type = encoding.stream_type
        self._app = app
        self._exchange = exchange
        self._encoding = encoding
        self._context = encoding.context
        self._encoder: ResponseEncoder | None = None
        self._frames: list[bytes] = []
        """The frames that are not stored yet."""
        self._stored_count = 0
        """The sequence number of the next frame to store."""
        self._has_begun = encoding.was_queued
        """Whether the database has the response."""
        self._is_shown = False
        """Whether the client may have seen events."""
        self._is_dropped = False
        """Whether the response was cancelled or deleted meanwhile."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
        return self._encoding.encode_reply(request, created, reply)

    def encode_stream(self, request: GenerationRequest, created: int) -> "ResponseRecorder":
        """Begin the stream, or begin it again with a fallback model."""
        self._encoder = self._encoding.encode_stream(request, created)
        self._frames.clear()
        self._stored_count = self._encoding.first_number
        return self

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        assert self._encoder is not None
        return self._note(self._encoder.feed(choice, events), is_shown=type(events[-1]) is not Started)

    def feed_context(self, event: ContextEvent) -> bytes:
        assert self._encoder is not None
        frames = self._encoder.feed_context(event)
        return self._note(frames, is_shown=bool(frames))

    def _note(self, frames: bytes, is_shown: bool) -> bytes:
        """Keep frames to store them. `is_shown`: the client may see them now."""
        if self._context.should_store:
            self._frames.append(frames)
            if self._timer is None and is_shown:
                self._is_shown = True
                self._start_timer()
        return frames

    def end(self) -> bytes:
        assert self._encoder is not None
        frames = self._encoder.end()
        self._frames.append(frames)
        return frames

    def fail(self, error: DragomanError) -> bytes:
        assert self._encoder is not None
        frames = self._encoder.fail(error)
        self._frames.append(frames)
        self._app.tasks.spawn(self._store_failed())
        return frames

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._start_writing)

    def _start_writing(self) -> None:
        self._writing = self._app.tasks.spawn(self._write())

    async def _write(self) -> None:
        try:
            await self._record()
        except StorageUnavailable:
            # The frames are kept. The database has logged the reason.
            pass
        self._timer = None
        if self._is_dropped and self._encoding.was_queued:
            self._exchange.drop()
        elif self._frames and not self._is_dropped:
            self._start_timer()

    async def _record(self) -> None:
        """Store the frames that are not stored yet."""
        written = len(self._frames)
        frames = b"".join(self._frames)
        if not frames:
            return
        is_first = self._stored_count == self._encoding.first_number
        body = b""
        if is_first:
            assert self._encoder is not None
            body = msgspec.json.encode(self._encoder.snapshot("in_progress"))
        events = RecordedEvents(self._stored_count, frames)
        is_recorded = await self._app.responses.record(Recording(self._describe("in_progress", body), events, is_first))
        self._has_begun = True
        self._is_dropped = not is_recorded
        self._stored_count += count_frames(frames)
        del self._frames[:written]

    async def _stop_writing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await asyncio.wait((self._writing,))
            if self._timer is not None:
                self._timer.cancel()

    async def store(self) -> None:
        """Store the response, which is complete. Called before its end is sent."""
        await self._stop_writing()
        ended = await self._encode_end()
        try:
            await self._keep(ended)
        except StorageUnavailable:
            if self._context.must_store:
                if self._encoder is not None:
                    # The end, which is not sent.
                    self._frames.pop()
                raise
            self._exchange.response.warn(NOT_STORED)
        if self._exchange.response_cache is not None:
            record = self._exchange.record
            self._exchange.response_cache.remember(record.principal, record.id, ended.input + ended.output)

    async def _store_failed(self) -> None:
        await self._stop_writing()
        if self._context.should_store:
            await self._keep(await self._encode_end())

    async def _keep(self, ended: EndedResponse) -> None:
        if self._context.should_store or self._context.conversation is not None:
            await self._app.responses.keep(ended)

    async def _encode_end(self) -> EndedResponse:
        response, context = self._encoding.response, self._context
        assert response is not None
        frames = b"".join(self._frames)
        events = RecordedEvents(self._stored_count, frames) if frames and context.should_store else None
        has_ended_well = response["status"] in ("completed", "incomplete")

        def encode() -> EndedResponse:
            return EndedResponse(
                self._describe(response["status"], msgspec.json.encode(response)),
                encode_items(wire_items.storable_items(context.items, response["id"])),
                encode_items(response["output"]),
                events,
                is_recorded=self._has_begun,
                should_store=context.should_store,
                conversation=context.conversation if has_ended_well else None,
                added=context.added,
            )

        is_large = len(context.items) > MANY_ITEMS or self._exchange.weight > LARGE_BODY
        return await run_in_body_thread(encode) if is_large else encode()

    async def abort(self, status: EarlyEnd, error: Exception | None = None) -> None:
        """End a stream that has no end: its client has gone, or it failed before anything was sent."""
        if self._is_shown:
            ending = self._app.tasks.spawn(self._end_early(status, error))
            if self._exchange.job is not None:
                await asyncio.wait((ending,))

    async def _end_early(self, status: EarlyEnd, error: Exception | None) -> None:
        await self._stop_writing()
        if not self._is_dropped:
            await self._record()
        code, message = ("server_error", "internal error; see the server's log")
        if isinstance(error, DragomanError):
            code, message = error_code(error), error.message
        await self._app.responses.end_early(self._exchange.record.id, status, code, message)

    def _describe(self, status: ResponseStatus, body: bytes) -> StoredResponse:
        record = self._exchange.record
        created, is_background = float(self._encoding.created), self._encoding.was_queued
        return StoredResponse(record.id, record.principal, created, status, body, is_background)


def encode_items(items: Sequence[Mapping[str, Any]]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in items)

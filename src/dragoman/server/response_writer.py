"""Writes the response to one request: its headers, and its body whole or as a stream.

Rules
1. Every response carries `x-request-id`. That is the id that the client sent, if it is well-formed; the server's own is
   then in `x-dragoman-request-id`. A response starts once and ends once.
2. A stream sends its head with the first write. Other writers wait until the head is sent.
3. Whole responses and pieces of a stream are synchronous calls if the connection supports it (see `response.DIRECT`).
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence

import msgspec

from dragoman.core.errors import EngineFailed
from dragoman.protocols.wire_protocol import EVENT_STREAM, OPENAI, Family
from dragoman.server.auth.callers import QuotaUsage
from dragoman.server.http.headers import RawHeaders
from dragoman.server.http.response import Response, Send
from dragoman.server.request_timer import RequestTimer
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.server.telemetry.recording import ExchangeRecording

log = logging.getLogger("dragoman.server")

JSON = b"application/json"
COMMENT = b": keep-alive\n\n"
FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}")
MAX_LIST_HEADER = 1000
"""Characters of a header that lists values."""


class ResponseWriter:
    family: Family = OPENAI
    """The error format."""
    quota_lease: QuotaUsage | None = None
    """What the request uses of its key's limits; None if the key has none."""
    is_started = False
    stream_type = EVENT_STREAM
    is_streaming = False
    """Whether a silent stream gets comment frames."""
    _ignored: tuple[str, ...] = ()
    _warnings: tuple[str, ...] = ()
    _head_sent: asyncio.Event | None = None
    """Set while the head of a stream is being sent."""
    comment_task: asyncio.Task[None] | None = None
    recording: ExchangeRecording | None = None
    """Set if the exchange is recorded."""

    def __init__(self, send: Send, direct: Response | None, timer: RequestTimer, record: RequestRecord) -> None:
        self._send = send
        self._direct = direct
        self._timer = timer
        self._record = record
        self.extra_headers: RawHeaders = []
        self.written = timer.started
        """When the stream was written to last."""

    def close_connection(self) -> None:
        self.extra_headers.append((b"connection", b"close"))

    def ignore(self, params: Iterable[str]) -> None:
        """Name parameters that the engine does not honour in X-Dragoman-Ignored, and in the logs."""
        self._ignored = tuple(dict.fromkeys((*self._ignored, *params)))
        # Callers choose the names of unknown fields. What is not like a name may be a prompt, so it is not logged.
        self._record.ignored = tuple([param for param in self._ignored if FIELD_NAME.fullmatch(param)])

    def warn(self, message: str) -> None:
        """Log a warning about the reply, and name it in X-Dragoman-Warning if the headers are not sent yet."""
        log.warning("request %s: %s", self._record.log_id, message, extra={"request_id": self._record.id})
        self._record.warnings += 1
        self._warnings = tuple(dict.fromkeys((*self._warnings, message)))

    def note_budget(self, message: str) -> None:
        """Describe an exhausted budget in X-Dragoman-Budget."""
        self.extra_headers.append((b"x-dragoman-budget", _list_header((message,))))

    def clear_notes(self) -> None:
        """Forget ignored parameters and warnings of a model that failed, before a fallback model runs."""
        self._record.ignored = self._ignored = self._warnings = ()

    def send_json(self, payload: object, status: int = 200) -> Awaitable[None]:
        return self.send(msgspec.json.encode(payload), JSON, status)

    async def send(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        self.is_streaming = False
        self._timer.stop()
        await self.relay(status, self._headers(status, content_type, len(body)), body)

    def switch_protocol(self) -> Awaitable[None]:
        """Accept a WebSocket, which ends the request."""
        self._record.status = 101
        return self.relay(101, [*self._id_headers(), *self.extra_headers], b"")

    async def send_pieces(self, pieces: AsyncIterator[bytes] | None, content_type: bytes, length: int) -> None:
        """Send a body of this length in pieces, which waits while the client does not read. None: only the headers."""
        headers = self._headers(200, content_type, length)
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if pieces is not None:
            async for piece in pieces:
                length -= len(piece)
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            if length:
                raise EngineFailed("the size of a file differs from its record")
        await self._send({"type": "http.response.body", "body": b""})

    async def relay(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole response with exactly these headers."""
        self.is_started = True
        if self.recording is not None:
            self.recording.note_reply(status, body)
        if self._direct is None or not self._direct.reply(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    def _headers(self, status: int, content_type: bytes, length: int | None) -> RawHeaders:
        self.is_started = True
        self._record.status = status
        headers = [(b"content-type", content_type), *self._id_headers(), *self.extra_headers]
        if self.family.id_header is not None:
            headers.append((self.family.id_header, self._record.id.encode()))
        if self._ignored:
            headers.append((b"x-dragoman-ignored", _list_header(self._ignored)))
        if self._warnings:
            headers.append((b"x-dragoman-warning", _list_header(self._warnings)))
        if self.quota_lease is not None:
            headers += self.family.rate_headers(self.quota_lease.rates())
        headers.append((b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length))
        return headers

    def _id_headers(self) -> RawHeaders:
        request_id, sent_id = self._record.id.encode(), self._record.client_request_id
        if sent_id is None:
            return [(b"x-request-id", request_id)]
        return [(b"x-request-id", sent_id.encode()), (b"x-dragoman-request-id", request_id)]

    async def _start_stream(self) -> None:
        if self._head_sent is not None:
            await self._head_sent.wait()
            return
        self._head_sent = sent = asyncio.Event()
        headers = self._headers(200, self.stream_type.encode(), None)
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        finally:
            self._head_sent = None
            sent.set()

    async def write(self, data: bytes) -> None:
        """Write a piece of a stream. The first piece starts the stream."""
        timer = self._timer
        timer.due = math.inf
        if not self.is_started or self._head_sent is not None:
            await self._start_stream()
        if self.recording is not None:
            self.recording.note_piece(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        # The time that the client took to read does not count as a stall of the engine.
        timer.note_progress()
        self.written = timer.last_progress

    def write_now(self, data: bytes) -> bool:
        """Write without waiting. False if the connection cannot; then call `write`."""
        if self._direct is None or not self.is_started or not self._direct.write(data):
            return False
        if self.recording is not None:
            self.recording.note_piece(data)
        self.written = self._timer.last_progress
        return True

    def send_comment(self) -> None:
        if self.comment_task is None or self.comment_task.done():
            self.comment_task = asyncio.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        if self.is_streaming and (not self.is_started or self._head_sent is not None):
            await self._start_stream()
        if not self.is_streaming:
            # The stream has ended since the task was created.
            return
        self.written = time.monotonic()
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def end(self, data: bytes) -> None:
        self.is_streaming = False
        self._timer.due = math.inf
        if self._head_sent is not None:
            await self._head_sent.wait()
        if self.recording is not None:
            self.recording.note_piece(data)
        await self._send({"type": "http.response.body", "body": data})


def _list_header(values: Sequence[str]) -> bytes:
    """Values joined for a header. Characters that are not printable ASCII become `?`: clients choose field names."""
    joined = ", ".join(values)
    shown = joined if len(joined) <= MAX_LIST_HEADER else joined[:MAX_LIST_HEADER] + "..."
    return re.sub(rb"[^ -~]", b"?", shown.encode("ascii", "replace"))

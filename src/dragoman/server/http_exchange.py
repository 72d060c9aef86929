"""One HTTP request: its headers, its body, its time limits, its cancellation, and its response.

Rules
1. When the client disconnects, the task that answers is cancelled.
2. When the request is late or the server stops, the task is cancelled too, and the client gets an error.
3. The whole body is read, within a size and a time limit, before it is decoded.
4. Every response carries `x-request-id`. A response starts once and ends once.
5. A stream sends its head with the first write. Other writers wait until the head is sent.
6. Whole responses and pieces of a stream are synchronous calls if the connection supports it (see `response.DIRECT`).
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from dragoman.config.settings import Limits
from dragoman.core.errors import (
    BadRequest,
    DeadlineExceeded,
    DragomanError,
    EngineFailed,
    EngineTimeout,
    ModelFailed,
    NotFound,
    RequestTimeout,
    TooLarge,
)
from dragoman.protocols.json_body import LARGE_BODY, has_more_elements
from dragoman.protocols.wire_protocol import EVENT_STREAM, OPENAI, Family
from dragoman.server.auth.callers import UNRESTRICTED, Caller, QuotaUsage
from dragoman.server.auth.host_user import Identify, host_principal
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http.headers import RawHeaders, check_media_type, host_name, merge_headers
from dragoman.server.http.response import DIRECT, Receive, Response, Scope, Send
from dragoman.server.telemetry.metrics import CLIENT_DISCONNECTED, Meter, RequestRecord

T = TypeVar("T")
log = logging.getLogger("dragoman.server")

JSON = b"application/json"
COMMENT = b": keep-alive\n\n"
MAX_LIST_HEADER = 1000
"""Characters of a header that lists values."""
OWN_SCOPE = frozenset({"asgi", "extensions", "server"})
"""Parts of an ASGI scope that belong to one process."""
TimeoutFactory = Callable[[float], DragomanError]
"""Makes the error for a step that took longer than this many seconds."""


class RequestTimer:
    """The deadline of one request, and the time allowed for its next step."""

    due = math.inf
    deadline = math.inf
    _allowed = 0.0
    _make_error: TimeoutFactory | None = None

    def __init__(self) -> None:
        self.started = self.last_progress = time.monotonic()

    def expect(self, seconds: float, make_error: TimeoutFactory) -> None:
        """Require each further step within this time."""
        self._allowed = seconds
        self._make_error = make_error
        self.last_progress = now = time.monotonic()
        self.due = now + seconds

    def note_progress(self) -> None:
        self.last_progress = now = time.monotonic()
        self.due = now + self._allowed

    def note_running(self, count: int) -> None:
        """Note how many choices hold a slot. The stall timer pauses at zero."""
        self.note_progress()
        if not count:
            self.due = math.inf

    def stop(self) -> None:
        self.due = self.deadline = math.inf

    def shorten_deadline(self, header: bytes) -> None:
        """Apply the client's X-Dragoman-Timeout header."""
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise BadRequest("the header X-Dragoman-Timeout must be a number of seconds greater than 0")
        self.deadline = min(self.deadline, self.started + seconds)

    def timeout_error(self, now: float) -> DragomanError | None:
        if now > self.deadline:
            return DeadlineExceeded(f"the request took longer than {self.deadline - self.started:g} s")
        if now > self.due and self._make_error is not None:
            return self._make_error(self._allowed)
        return None


class ResponseWriter:
    family: Family = OPENAI
    """The error format."""
    quota_lease: QuotaUsage | None = None
    """What the request uses of its key's limits; None if the key has none."""
    is_started = False
    stream_type = EVENT_STREAM
    is_streaming = False
    """Whether a silent stream gets comment frames."""
    _warnings: tuple[str, ...] = ()
    _head_sent: asyncio.Event | None = None
    """Set while the head of a stream is being sent."""
    comment_task: asyncio.Task[None] | None = None

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
        """Name parameters that the engine does not honour in X-Dragoman-Ignored."""
        self._record.ignored = tuple(dict.fromkeys((*self._record.ignored, *params)))

    def warn(self, message: str) -> None:
        """Log a warning about the reply, and name it in X-Dragoman-Warning if the headers are not sent yet."""
        log.warning("request %s: %s", self._record.id, message, extra={"request_id": self._record.id})
        self._record.warnings += 1
        self._warnings = tuple(dict.fromkeys((*self._warnings, message)))

    def clear_notes(self) -> None:
        """Forget ignored parameters and warnings of a model that failed, before a fallback model runs."""
        self._record.ignored = self._warnings = ()

    def send_json(self, payload: object, status: int = 200) -> Awaitable[None]:
        return self.send(msgspec.json.encode(payload), JSON, status)

    async def send(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        self.is_streaming = False
        self._timer.stop()
        await self.relay(status, self._headers(status, content_type, len(body)), body)

    async def relay(self, status: int, headers: RawHeaders, body: bytes) -> None:
        """Send a whole response with exactly these headers."""
        self.is_started = True
        if self._direct is None or not self._direct.reply(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    def _headers(self, status: int, content_type: bytes, length: int | None) -> RawHeaders:
        self.is_started = True
        self._record.status = status
        request_id = self._record.id.encode()
        headers = [(b"content-type", content_type), (b"x-request-id", request_id), *self.extra_headers]
        if self.family.id_header is not None:
            headers.append((self.family.id_header, request_id))
        if self._record.ignored:
            headers.append((b"x-dragoman-ignored", _list_header(self._record.ignored)))
        if self._warnings:
            headers.append((b"x-dragoman-warning", _list_header(self._warnings)))
        if self.quota_lease is not None:
            headers += self.family.rate_headers(self.quota_lease.rates())
        headers.append((b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length))
        return headers

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
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        # The time that the client took to read does not count as a stall of the engine.
        timer.note_progress()
        self.written = timer.last_progress

    def write_now(self, data: bytes) -> bool:
        """Write without waiting. False if the connection cannot; then call `write`."""
        if self._direct is None or not self.is_started or not self._direct.write(data):
            return False
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
        await self._send({"type": "http.response.body", "body": data})


def _list_header(values: Sequence[str]) -> bytes:
    """Values joined for a header. Characters that are not printable ASCII become `?`: clients choose field names."""
    joined = ", ".join(values)
    shown = joined if len(joined) <= MAX_LIST_HEADER else joined[:MAX_LIST_HEADER] + "..."
    return re.sub(rb"[^ -~]", b"?", shown.encode("ascii", "replace"))


def slow_body_error(seconds: float) -> DragomanError:
    return RequestTimeout(f"the body took longer than {seconds:g} s to arrive")


def stall_error(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine produced nothing for {seconds:g} s")


class HttpExchange:
    is_disconnected = False
    is_answered_by_parent = False
    """Whether another process answers and records the request."""
    stopping: DragomanError | None = None
    """The error to send if the server cancels this request because it stops."""
    caller: Caller = UNRESTRICTED
    meter: Meter | None = None
    weight = 0
    """Bytes of the body, and of the stored items that it refers to."""
    _is_body_read = False
    _ambiguous: bytes | None = None
    """A single-valued header that was sent with several values."""
    _abort_error: DragomanError | None = None
    _listener: asyncio.Task[None] | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        connection = scope.get("extensions", {}).get(DIRECT)
        self._direct: Response | None = None if connection is None else connection.response(scope)
        self.peer: str | None = (scope.get("client") or (None,))[0]
        """The address of the other end of the connection; None for a Unix socket."""
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(self.headers) != len(scope["headers"]):
            self.headers, self._ambiguous = merge_headers(scope["headers"])
        self.record = RequestRecord(id="", route=f"{self.method} {self.path[:100]}")
        self.timer = RequestTimer()
        self.response = ResponseWriter(send, self._direct, self.timer, self.record)
        self._task = asyncio.current_task() if self._direct is None else self._direct.task

    def check_headers(self, allowed: frozenset[bytes] | None) -> None:
        """Refuse a request whose headers are ambiguous or name a host other than the allowed ones."""
        if self._ambiguous is not None:
            self.response.close_connection()
            raise BadRequest(f"the header {self._ambiguous.decode('latin-1')} was sent more than once; send it once")
        name = host_name(self.headers.get(b"host", b""))
        if name is None or (allowed is not None and name not in allowed):
            self.response.close_connection()
            raise BadRequest("the Host header does not name this server; `hosts` in its configuration allows names")

    def serializable_scope(self) -> dict[str, Any]:
        """The part of the scope that another process needs to answer the request."""
        return {name: value for name, value in self._scope.items() if name not in OWN_SCOPE}

    def host_principal(self, identify: Identify | None) -> str | None:
        """The principal of the user of the application that the app is mounted into."""
        return host_principal(self._scope, identify)

    def not_found_error(self, hint: str = "") -> NotFound:
        return NotFound(f"there is nothing at {self.path[:100]}{hint}")

    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1")))

    async def read_body(self, limits: Limits, decode: Callable[[bytes], T]) -> T:
        """Read the body and decode it; a large one is decoded in a thread."""
        headers = self.headers
        coding = headers.get(b"content-encoding", b"identity")
        check_media_type(headers.get(b"content-type", b""), coding, b"origin" in headers)
        if int(headers.get(b"content-length", b"0")) > limits.body_bytes:
            raise self._too_large(limits)
        body = None if self._direct is None else self._direct.take_body()
        if body is None:
            body = await self._receive_body(limits)
        elif len(body) > limits.body_bytes:
            raise self._too_large(limits)
        self._is_body_read = True
        self.weight = len(body)
        is_large = len(body) > LARGE_BODY
        has_too_many, decode_body = partial(has_more_elements, body, limits.body_elements), partial(decode, body)
        if await run_in_body_thread(has_too_many) if is_large else has_too_many():
            limit = limits.body_elements
            raise TooLarge(f"the body has more than {limit} JSON elements (`limits.body_elements` of this server)")
        return await run_in_body_thread(decode_body) if is_large else decode_body()

    async def _receive_body(self, limits: Limits) -> bytes:
        body = bytearray()
        self.timer.expect(limits.body_seconds, slow_body_error)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
                raise asyncio.CancelledError
            body += message.get("body", b"")
            if len(body) > limits.body_bytes:
                raise self._too_large(limits)
            if not message.get("more_body", False):
                break
        self.timer.due = math.inf
        return bytes(body)

    def _too_large(self, limits: Limits) -> TooLarge:
        self.response.close_connection()
        return TooLarge(f"the body is larger than {limits.body_bytes} bytes")

    def check(self, now: float, keepalive_seconds: float) -> None:
        """Called regularly: listen for a disconnect, abort if late, keep a silent stream alive."""
        if self._listener is None and self._is_body_read:
            # Until the body is read, reading it detects a disconnect.
            self._listener = asyncio.create_task(self._cancel_on_disconnect())
        error = self.timer.timeout_error(now)
        if error is not None:
            self._abort(error)
        elif self.response.is_streaming and now - self.response.written > keepalive_seconds:
            self.response.send_comment()

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_disconnected = True
        if self._task is not None:
            self._task.cancel()

    def _abort(self, error: DragomanError) -> None:
        if self._abort_error is None and self._task is not None:
            self._abort_error = error
            if not self._is_body_read:
                # The rest of the body may never arrive.
                self.response.close_connection()
            self._task.cancel()

    def take_cancellation(self) -> DragomanError | None:
        """Clear the task's cancellation and return the error to send; None if the client has disconnected or the
        cancellation came from outside."""
        error = self._abort_error or self.stopping
        if error is None or self.is_disconnected or self._task is None:
            return None
        self._task.uncancel()
        return error

    def public_error(self, error: Exception) -> DragomanError:
        """The error as the client sees it. An unexpected one is logged in full and becomes a plain 500."""
        record, extra = self.record, {"request_id": self.record.id}
        if not isinstance(error, DragomanError):
            log.error("request %s failed", record.id, exc_info=error, extra=extra)
            error = EngineFailed("internal error; see the server's log")
        elif isinstance(error, ModelFailed):
            log.error("request %s: model %s: %s", record.id, record.model, error.__cause__ or error, extra=extra)
        record.error = error.code
        return error

    def close(self) -> None:
        """Called once, when the request has ended."""
        if self._listener is not None:
            self._listener.cancel()
            # A cancelled task refers to this object through its traceback: without this, it would be a cycle.
            self._listener = None
        response = self.response
        if response.comment_task is not None:
            response.comment_task.cancel()
        if self.meter is not None:
            self.meter.close()
        if response.quota_lease is not None:
            response.quota_lease.settle(self.record.spent_tokens)
        self.record.duration_us = int((time.monotonic() - self.timer.started) * 1e6)
        if self.is_disconnected:
            self.record.status = CLIENT_DISCONNECTED

"""One HTTP request: its headers, its body, its cancellation, its time limits and its response.

Rules
1. When the client disconnects, the task that answers is cancelled.
2. When the request is late or the server stops, the task is cancelled too, and the client gets an error.
3. The whole body is read, within a size and a time limit, before it is decompressed and decoded. A body that is
   streamed is used while it arrives; its client waits while a piece is used.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from dragoman.config.settings import Limits
from dragoman.core.errors import (
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelFailed,
    NotFound,
    TooLarge,
    UnsupportedMedia,
)
from dragoman.core.types import Priority
from dragoman.protocols.json_body import LARGE_BODY, has_more_elements
from dragoman.server.app_calls import JOB, RequestJob
from dragoman.server.auth.callers import UNRESTRICTED, Caller
from dragoman.server.auth.host_user import Identify, host_principal
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http.content_codings import ACCEPT_ENCODING, decompress_body, parse_codings
from dragoman.server.http.headers import check_media_type, host_name, merge_headers
from dragoman.server.http.response import DIRECT, Receive, Response, Scope, Send
from dragoman.server.request_timer import STREAM_STEP, RequestTimer, slow_body_error, slow_stream_error
from dragoman.server.response_writer import ResponseWriter
from dragoman.server.telemetry.meter import Meter
from dragoman.server.telemetry.metrics import CLIENT_DISCONNECTED, RequestRecord
from dragoman.server.websocket.handshake import WEBSOCKET
from dragoman.server.websocket.response_cache import RESPONSE_CACHE, RequestResponseCache

T = TypeVar("T")
log = logging.getLogger("dragoman.server")

OWN_SCOPE = frozenset({"asgi", "extensions", "server"})
"""Parts of an ASGI scope that belong to one process."""
BODY_HEADERS = frozenset({b"content-encoding", b"content-length"})
"""Headers that describe the body as it was sent."""


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
        extensions = scope.get("extensions", {})
        connection = extensions.get(DIRECT)
        self._direct: Response | None = None if connection is None else connection.response(scope)
        self.job: RequestJob | None = extensions.get(JOB)
        """Set if the server itself sent the request, for a caller who does not wait."""
        self.is_websocket = WEBSOCKET in extensions
        """Whether the request opens a WebSocket."""
        self.response_cache: RequestResponseCache | None = extensions.get(RESPONSE_CACHE)
        """What the WebSocket of the request remembers; None for a request of HTTP."""
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

    def priority(self, asked: Priority) -> Priority:
        """The priority of a request that asks for this one. A batch job and some keys have batch priority anyway."""
        is_batch_job = self.job is not None and self.job.is_batch
        return "batch" if is_batch_job or "batch" in (asked, self.caller.priority) else "interactive"

    def serializable_scope(self) -> dict[str, Any]:
        """The part of the scope that another process needs to answer the request with the body that was read."""
        headers = [header for header in self._scope["headers"] if header[0] not in BODY_HEADERS]
        return {name: value for name, value in self._scope.items() if name not in OWN_SCOPE} | {"headers": headers}

    def host_principal(self, identify: Identify | None) -> str | None:
        """The principal of the user of the application that the app is mounted into."""
        return host_principal(self._scope, identify)

    def not_found_error(self, hint: str = "") -> NotFound:
        return NotFound(f"there is nothing at {self.path[:100]}{hint}")

    def query(self) -> dict[str, str]:
        return dict(self.query_pairs())

    def query_list(self, name: str) -> list[str]:
        """The values of a parameter that is sent several times, or as `name[]`."""
        return [value for key, value in self.query_pairs() if key in (name, f"{name}[]")]

    def query_pairs(self) -> list[tuple[str, str]]:
        """The names and values of the query, of which some may occur several times."""
        return parse_qsl(self._scope["query_string"].decode("latin-1"))

    async def read_body(self, limits: Limits, decode: Callable[[bytes], T]) -> T:
        """Read the body, decompress and decode it; a large one is decoded in a thread."""
        headers = self.headers
        check_media_type(headers.get(b"content-type", b""), b"origin" in headers)
        codings = self._content_codings() if b"content-encoding" in headers else ()
        if int(headers.get(b"content-length", b"0")) > limits.body_bytes:
            raise self._too_large(limits)
        body = None if self._direct is None else self._direct.take_body()
        if body is None:
            body = await self._receive_body(limits)
        elif len(body) > limits.body_bytes:
            raise self._too_large(limits)
        self._is_body_read = True
        if codings:
            body = await decompress_body(body, codings, limits.body_bytes)
        self.weight = len(body)
        if self.response.recording is not None:
            self.response.recording.note_request(body)
        is_large = len(body) > LARGE_BODY
        has_too_many, decode_body = partial(has_more_elements, body, limits.body_elements), partial(decode, body)
        if await run_in_body_thread(has_too_many) if is_large else has_too_many():
            limit = limits.body_elements
            raise TooLarge(f"the body has more than {limit} JSON elements (`limits.body_elements` of this server)")
        return await run_in_body_thread(decode_body) if is_large else decode_body()

    def _content_codings(self) -> tuple[str, ...]:
        try:
            return parse_codings(self.headers[b"content-encoding"])
        except UnsupportedMedia:
            self.response.extra_headers.append((b"accept-encoding", ACCEPT_ENCODING))
            raise

    async def _receive_body(self, limits: Limits) -> bytes:
        body, has_more = bytearray(), True
        self.timer.expect(limits.body_seconds, slow_body_error)
        while has_more:
            piece, has_more = await self._receive_piece()
            body += piece
            if len(body) > limits.body_bytes:
                raise self._too_large(limits)
        self.timer.due = math.inf
        return bytes(body)

    async def stream_body(self, limits: Limits, most: int, too_large: TooLarge) -> AsyncGenerator[bytes]:
        """The body in pieces. A body of more than `most` bytes raises `too_large`."""
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self.response.extra_headers.append((b"accept-encoding", b"identity"))
            raise UnsupportedMedia("compressed bodies are not accepted here; send it uncompressed")
        if int(self.headers.get(b"content-length", b"0")) > most:
            self.response.close_connection()
            raise too_large
        timer, size, step, has_more = self.timer, 0, STREAM_STEP, True
        timer.expect(limits.body_seconds, slow_stream_error)
        while has_more:
            piece, has_more = await self._receive_piece()
            size += len(piece)
            if size > most:
                self.response.close_connection()
                raise too_large
            if size >= step:
                step = size + STREAM_STEP
                timer.note_progress()
            left, timer.due = timer.due - time.monotonic(), math.inf
            yield piece
            timer.due = time.monotonic() + left
        timer.due = math.inf
        self._is_body_read = True

    async def _receive_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether more follow."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_disconnected = True
            raise asyncio.CancelledError
        return message.get("body", b""), message.get("more_body", False)

    def skip_body(self) -> None:
        """Listen for a disconnect from now on, as the handler does not read a body."""
        self._is_body_read = True
        self._listen()

    def _too_large(self, limits: Limits) -> TooLarge:
        self.response.close_connection()
        return TooLarge(f"the body is larger than {limits.body_bytes} bytes")

    def check(self, now: float, keepalive_seconds: float) -> None:
        """Called regularly: listen for a disconnect, abort if late, keep a silent stream alive."""
        if self._listener is None and self._is_body_read:
            # Until the body is read, reading it detects a disconnect.
            self._listen()
        error = self.timer.timeout_error(now)
        if error is not None:
            self._abort(error)
        elif self._needs_comments and now - self.response.written > keepalive_seconds:
            self.response.send_comment()

    @property
    def _needs_comments(self) -> bool:
        """Whether a silent stream gets comments. A job has no connection, and a WebSocket has pings."""
        return self.response.is_streaming and self.job is None and self.response_cache is None

    def _listen(self) -> None:
        self._listener = asyncio.create_task(self._cancel_on_disconnect())

    async def _cancel_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.drop()

    def drop(self) -> None:
        """End the request as if its client had disconnected."""
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
            log.error("request %s failed", record.log_id, exc_info=error, extra=extra)
            error = EngineFailed("internal error; see the server's log")
        elif isinstance(error, ModelFailed):
            log.error("request %s: model %s: %s", record.log_id, record.model, error.__cause__ or error, extra=extra)
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

"""One HTTP request: its headers, its body, its cancellation, and the writer of its response.

Rules
1. When the client disconnects, the task that answers is cancelled.
2. When the request is late or the server stops, the task is cancelled too, and the client gets an error.
3. The whole body is read, within a size and a time limit, before it is decoded.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from dragoman.config.settings import Limits
from dragoman.core.errors import (
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelFailed,
    RequestTimeout,
    TooLarge,
    UnsupportedMedia,
)
from dragoman.server.asgi import DIRECT, DirectResponse, Receive, Scope, Send
from dragoman.server.auth.quotas import QuotaUsage
from dragoman.server.auth.scopes import UNRESTRICTED, Caller
from dragoman.server.deadlines import RequestTimer
from dragoman.server.http.bodies import decode_body
from dragoman.server.response_writer import JSON, ResponseWriter
from dragoman.server.telemetry import RequestRecord
from dragoman.server.telemetry.meter import Meter
from dragoman.server.telemetry.record import CLIENT_DISCONNECTED

T = TypeVar("T")
log = logging.getLogger("dragoman.server")

SERIALIZABLE = (
    *("type", "http_version", "scheme", "method", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client"),
)
"""Parts of an ASGI scope that can be sent to another process."""
SINGLE_VALUED = frozenset(
    {
        *(b"host", b"authorization", b"x-api-key", b"content-length", b"content-type", b"content-encoding"),
        *(b"origin", b"x-real-ip", b"x-dragoman-timeout", b"x-dragoman-strict", b"traceparent"),
    }
)
"""Headers that may have one value only."""
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


@lru_cache(maxsize=256)
def _host_name(host: bytes) -> bytes | None:
    """The host without its port; None if it is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].lower() if match else None


@lru_cache(maxsize=256)
def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    media = _media_type(headers.get(b"content-type", b""))
    # A web page of another origin must not send a body without a type; other programs may.
    if media != JSON and (media or b"origin" in headers):
        raise UnsupportedMedia("send the body as JSON, with the header 'content-type: application/json'")
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise UnsupportedMedia("compressed bodies are not accepted")


def _slow_body(seconds: float) -> DragomanError:
    return RequestTimeout(f"the body took longer than {seconds:g} s to arrive")


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
        self._direct: DirectResponse | None = None if connection is None else connection.response(scope)
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(self.headers) != len(scope["headers"]):
            self.headers, self._ambiguous = merge_headers(scope["headers"])
        self.record = RequestRecord(id="", route=f"{self.method} {self.path[:100]}")
        self.timer = RequestTimer()
        self.response = ResponseWriter(send, self._direct, self.timer, self.record)
        self._task = asyncio.current_task() if self._direct is None else self._direct.task

    @property
    def quota_lease(self) -> QuotaUsage | None:
        """What the request uses of its key's limits; None if the key has none."""
        return self.response.quota_lease

    @quota_lease.setter
    def quota_lease(self, lease: QuotaUsage) -> None:
        self.response.quota_lease = lease

    def check_headers(self, allowed: frozenset[bytes] | None) -> None:
        """Refuse a request whose headers are ambiguous or name a host other than the allowed ones."""
        if self._ambiguous is not None:
            self.response.close_connection()
            raise BadRequest(f"the header {self._ambiguous.decode('latin-1')} was sent more than once; send it once")
        name = _host_name(self.headers.get(b"host", b""))
        if name is None or (allowed is not None and name not in allowed):
            self.response.close_connection()
            raise BadRequest("the Host header does not name this server; `hosts` in its configuration allows names")

    @property
    def peer(self) -> str | None:
        """The address of the other end of the connection; None for a Unix socket."""
        client = self._scope.get("client")
        return client[0] if client else None

    def serializable_scope(self) -> dict[str, Any]:
        """The part of the scope that another process needs to answer the request."""
        return {name: self._scope[name] for name in SERIALIZABLE}

    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1")))

    async def read_body(self, limits: Limits, decode: Callable[[bytes], T]) -> T:
        """Read the body and decode it; a large one is decoded in a thread."""
        _check_media_type(self.headers)
        if int(self.headers.get(b"content-length", b"0")) > limits.body_bytes:
            raise self._too_large(limits)
        body = None if self._direct is None else self._direct.take_body()
        if body is None:
            body = await self._receive_body(limits)
        elif len(body) > limits.body_bytes:
            raise self._too_large(limits)
        self._is_body_read = True
        self.weight = len(body)
        return await decode_body(body, limits.body_elements, decode)

    async def _receive_body(self, limits: Limits) -> bytes:
        body = bytearray()
        self.timer.expect(limits.body_seconds, _slow_body)
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
        request_id = self.record.id
        extra = {"request_id": request_id}
        if not isinstance(error, DragomanError):
            log.error("request %s failed", request_id, exc_info=error, extra=extra)
            error = EngineFailed("internal error; see the server's log")
        elif isinstance(error, ModelFailed):
            cause = error.__cause__ or error
            log.error("request %s: model %s: %s", request_id, self.record.model, cause, extra=extra)
        self.record.error = error.code
        return error

    def close(self) -> None:
        """Called once, when the request has ended."""
        if self._listener is not None:
            self._listener.cancel()
        self.response.close()
        if self.meter is not None:
            self.meter.close()
        if self.quota_lease is not None:
            self.quota_lease.settle(self.record.spent_tokens)
        self.record.duration_us = int((time.monotonic() - self.timer.started) * 1e6)
        if self.is_disconnected:
            self.record.status = CLIENT_DISCONNECTED


def merge_headers(lines: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], bytes | None]:
    """Headers by name: the values of repeated lines are joined in order. The second value is the name of an
    ambiguous header: Host if it is repeated, or another one of `SINGLE_VALUED` with different values."""
    headers: dict[bytes, bytes] = {}
    ambiguous = None
    for name, value in lines:
        if name not in headers:
            headers[name] = value
        elif name not in SINGLE_VALUED:
            headers[name] += b", " + value
        elif name == b"host" or headers[name] != value:
            ambiguous = name
    return headers, ambiguous

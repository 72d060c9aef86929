"""One HTTP connection: requests are read, answered and written one after the other.

Rules
1. Headers that are too large get 431, headers that take too long 408, malformed HTTP 400; then the connection is
   closed. These replies look like all others and are in the event log like all others.
2. The bytes after a request are not parsed before its response is complete. Up to `READ_AHEAD` of them are kept; then
   reading pauses. While it is paused, the socket is polled for a client that disconnects.
3. The time for a head runs while nothing is being answered. Empty lines before a request do not stop it.
4. A client that reads nothing for `write_seconds` while there is something to read is cut off.
5. An `Upgrade` is ignored: the request is served as HTTP (see `http1`).
6. Whole replies and pieces of a stream, the most frequent writes, need only a plain call (see `writing`).
7. If a response is written before the request's body is complete, a small rest of the body is read and dropped, and the
   connection is kept. With a larger rest the connection lingers: up to `LINGER_BYTES` are read and dropped within
   `LINGER_SECONDS`, so that the client can read the response before the connection closes.
"""

import asyncio
import logging
import select
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import msgspec
import uvicorn
from uvicorn.server import ServerState

from dragoman.config.settings import Limits
from dragoman.core.errors import DragomanError, RequestTimeout
from dragoman.core.ids import new_id
from dragoman.protocols.registry import Family, family
from dragoman.server.http.http1 import ChunkedBody, FixedBody, RequestHead, parse_target
from dragoman.server.http.response import Headers, Response
from dragoman.server.http_exchange import DIRECT, Scope
from dragoman.server.telemetry import Recorder, RequestRecord

log = logging.getLogger("dragoman.server")

ASGI = {"version": "3.0", "spec_version": "2.3"}
READ_AHEAD = 64 * 1024
"""Bytes that are kept before reading pauses: of a body that the app has not read, or after a request."""
LINGER_BYTES = 1024 * 1024
LINGER_SECONDS = 2.0
DISCONNECT_CHECK_SECONDS = 0.5
"""Interval at which a paused socket is polled for a disconnect."""
DISCONNECTED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
GOODBYE_SECONDS = 0.5
READ_FIRST_SECONDS = 0.05
"""Before a late head is given up, the event loop reads what arrived while the process was stopped."""
LOOKS = 4
"""Checks within `write_seconds` whether the client reads."""

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def guarded(limits: Limits, telemetry: Recorder) -> type["HttpConnection"]:
    """The connection class for these limits."""
    return type("GuardedConnection", (HttpConnection,), {"limits": limits, "telemetry": telemetry})


class HttpConnection(asyncio.Protocol):
    limits: Limits
    telemetry: Recorder
    transport: asyncio.Transport
    _head: RequestHead | None = None
    """The head that is arriving."""
    _body: FixedBody | ChunkedBody | None = None
    """The body that is arriving."""
    _response: Response | None = None
    """The response to the latest request."""
    _kept = b""
    """Bytes received after the request that is being answered."""
    _is_reading = True
    _is_lingering = False
    _dropped = 0
    """Bytes read and dropped while the connection lingers, or of the body of a request that has been answered."""
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _disconnect_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _heard_at = 0.0
    _unread = 0
    _read_at = 0.0

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = cast("AsgiApp", config.loaded_app)
        self._keep_alive_seconds = config.timeout_keep_alive
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self.writable = asyncio.Event()
        self.writable.set()

    @property
    def default_headers(self) -> Headers:
        return self._state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        timers = self._head_timer, self._idle_timer, self._disconnect_timer, self._linger_timer, self._write_timer
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self._kept = b""
        if self._response is not None:
            self._response.disconnect()
        self.writable.set()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        if self._is_answering:
            assert self._response is not None
            self._response.keep_alive = False
        else:
            self.transport.close()
        if self._scheme == "https":
            self._loop.call_later(GOODBYE_SECONDS, self._leave)

    def _leave(self) -> None:
        """A client that waits for nothing leaves TLS's goodbye unanswered: the server's end does not wait for it."""
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self._loop.call_later(GOODBYE_SECONDS, self._leave)
        else:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self._response is not None and not self._response.response_complete

    # Receiving

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if self._is_lingering:
            self._drop(len(data))
        elif self._kept:
            self._keep(self._kept + data)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                if self._body is not None:
                    data = self._feed_body(self._body, data)
                elif self._is_answering:
                    self._keep(data)
                    return
                else:
                    data = self._feed_head(data)
        except DragomanError as error:
            self._refuse(error)
            return
        if not self._is_answering and self._body is None:
            self._await_head()

    def _feed_head(self, data: bytes) -> bytes:
        if self._head is None:
            self._head = RequestHead(self.limits.header_bytes)
        head = self._head
        rest = head.feed(data)
        if head.is_complete:
            self._begin(head)
        return rest

    def _begin(self, head: RequestHead) -> None:
        scope = self._scope(head)
        self._head = None
        self._cancel_head_timer()
        self._response = response = Response(scope, self, head.expects_continue, head.keep_alive)
        if head.is_chunked:
            self._body = ChunkedBody(self.limits.header_bytes)
        elif head.content_length:
            self._body = FixedBody(head.content_length)
        else:
            response.more_body = False
            response.arrival.set()
        response.task = task = self._loop.create_task(self._answer(response))
        self._state.tasks.add(task)

    def _scope(self, head: RequestHead) -> dict[str, Any]:
        path, raw_path, query = parse_target(head.url)
        return {
            "type": "http",
            "asgi": ASGI,
            "http_version": head.version,
            "server": self._server,
            "client": self._client,
            "scheme": self._scheme,
            "method": head.method,
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": head.headers,
            "extensions": {DIRECT: self},
        }

    def _feed_body(self, body: FixedBody | ChunkedBody, data: bytes) -> bytes:
        response = self._response
        assert response is not None
        piece, rest = body.feed(data)
        if response.response_complete:
            return self._drop_body(data, rest)
        response.body += piece
        if rest is None:
            if len(response.body) > READ_AHEAD:
                self._pause_reading()
        else:
            self._body = None
            response.more_body = False
        response.arrival.set()
        return rest or b""

    def _keep(self, data: bytes) -> None:
        self._kept = data
        if len(data) > READ_AHEAD:
            self._pause_reading()
            if self._disconnect_timer is None:
                self._disconnect_timer = self._loop.call_later(DISCONNECT_CHECK_SECONDS, self._check_disconnect)

    def _check_disconnect(self) -> None:
        """Poll the socket: while reading is paused, asyncio does not report a disconnect."""
        self._disconnect_timer = None
        if self._is_reading or self.transport.is_closing():
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), DISCONNECTED)
        if poll.poll(0):
            self.transport.abort()
        else:
            self._disconnect_timer = self._loop.call_later(DISCONNECT_CHECK_SECONDS, self._check_disconnect)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and len(self._kept) <= READ_AHEAD and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    # Answering

    async def _answer(self, response: Response) -> None:
        """The app tells its errors itself; what it could not tell is told here."""
        try:
            await self._app(response.scope, response.receive, response.send)
        except BaseException:
            log.exception("a request was not answered")
        if not (response.response_complete or response.disconnected):
            response.give_up()
        # Not as a callback of the task: that costs every request one more call from the event loop.
        self._state.tasks.discard(response.task)

    def response(self, scope: Scope) -> Response | None:
        """The response for this scope."""
        answered = self._response
        return answered if answered is not None and answered.scope is scope else None

    def finish(self, response: Response) -> None:
        self._state.total_requests += 1
        if self.transport.is_closing():
            return
        if not response.keep_alive:
            if self._body is None and not self._kept:
                self.transport.close()
            else:
                self._linger()
            return
        if self._body is not None:
            response.body.clear()
            self._dropped = 0
            self._linger_timer = self._loop.call_later(LINGER_SECONDS, self.transport.close)
            self.resume_reading()
            return
        self._await_next()

    def _await_next(self) -> None:
        if self._kept:
            kept, self._kept = self._kept, b""
            self._feed(kept)
        self.resume_reading()
        self._watch_idleness()

    def _watch_idleness(self) -> None:
        self._heard_at = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self._keep_alive_seconds, self._look_for_idleness)

    def _look_for_idleness(self) -> None:
        """One timer for all requests of a connection: most of them come long before it."""
        self._idle_timer = None
        if self._head is not None or self._is_answering:
            return
        left = self._heard_at + self._keep_alive_seconds - self._loop.time()
        if left <= 0:
            self.transport.close()
        else:
            self._idle_timer = self._loop.call_later(left, self._look_for_idleness)

    # Dropping a body and closing

    @property
    def can_drain(self) -> bool:
        """Whether the rest of the request's body is small enough to be read and dropped."""
        left = None if self._body is None else self._body.left
        return left is not None and left <= LINGER_BYTES

    def _drop_body(self, data: bytes, rest: bytes | None) -> bytes:
        """More of the body of a request that has been answered."""
        if rest is None:
            self._drop(len(data))
            return b""
        self._body = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._watch_idleness()
        return rest

    def _linger(self) -> None:
        self._is_lingering = True
        self._kept = b""
        self._dropped = 0
        self._cancel_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.resume_reading()
        self._linger_timer = self._loop.call_later(LINGER_SECONDS, self.transport.close)

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self._pause_reading()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self.limits.body_seconds, self._read_once_more)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _read_once_more(self) -> None:
        self._head_timer = self._loop.call_later(READ_FIRST_SECONDS, self._give_up_on_head)

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        if self._head is None or not self._head.is_started:
            self.transport.close()
            return
        self._refuse(RequestTimeout(f"the headers took longer than {self.limits.body_seconds:g} s to arrive"))

    def _refuse(self, error: DragomanError) -> None:
        """Answer an invalid or late request with an error, and close the connection."""
        if self.transport.is_closing():
            return
        response = self._response
        if self._body is None or (response is not None and not response.response_started):
            record = RequestRecord(id=new_id("req-"), route="", status=error.status, error=error.code)
            self.transport.write(_refusal(error, record.id, self._family()))
            self.telemetry.request(record)
        if response is not None:
            response.disconnect()
        self._linger()

    def _family(self) -> Family:
        """The error format of the request that is arriving."""
        if self._head is not None:
            return family(self._head.path, dict(self._head.headers))
        if self._response is not None:
            scope = self._response.scope
            return family(scope["path"], dict(scope["headers"]))
        return family("", {})

    # Clients that do not read

    def pause_writing(self) -> None:
        self.writable.clear()
        self._unread = self.transport.get_write_buffer_size()
        self._read_at = self._loop.time()
        self._look_again()

    def _look_again(self) -> None:
        self._write_timer = self._loop.call_later(self.limits.write_seconds / LOOKS, self._look_for_reading)

    def _look_for_reading(self) -> None:
        # Nothing is written meanwhile, so what is less has been taken.
        unread, now = self.transport.get_write_buffer_size(), self._loop.time()
        if unread < self._unread:
            self._unread, self._read_at = unread, now
        elif now - self._read_at >= self.limits.write_seconds:
            self.transport.abort()
            return
        self._look_again()

    def resume_writing(self) -> None:
        self.writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _address(name: object) -> tuple[str, int] | None:
    """Host and port; None for a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _refusal(error: DragomanError, request_id: str, spoken: Family) -> bytes:
    body = msgspec.json.encode(spoken.encode_error(error, request_id))
    own = () if spoken.id_header is None else (f"{spoken.id_header.decode()}: {request_id}",)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"x-request-id: {request_id}",
        *own,
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

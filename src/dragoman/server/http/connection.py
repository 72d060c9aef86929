"""One HTTP connection. It reads, answers and writes requests one after the other.

Rules
1. Headers that are too large get 431, headers that take too long 408, malformed HTTP 400; then the connection is
   closed. These replies have the usual error format and are recorded in the event log.
2. The bytes after a request are not parsed before its response is complete. Up to `READ_AHEAD` of them are kept; then
   reading pauses. While it is paused, the socket is polled for a client that disconnects.
3. The time for a head runs while no request is being answered. Empty lines before a request do not stop it.
4. A client that reads nothing for `write_seconds` while output is waiting is disconnected.
5. An `Upgrade` is ignored: the request is served as HTTP (see `http1`).
6. Whole replies and pieces of a stream, the most frequent writes, are plain calls (see `response`).
7. If a response is written before the request's body is complete, a small rest of the body is read and discarded, and
   the connection is kept. With a larger rest the connection lingers: up to `LINGER_BYTES` are read and discarded within
   `LINGER_SECONDS`, so that the client can read the response before the connection closes.
"""

import asyncio
import logging
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
from dragoman.server.asgi import DIRECT, Scope
from dragoman.server.http.flow_control import LINGER_BYTES, READ_AHEAD, HeadTimer, IdleTimer, ReadBuffer, WriteTimer
from dragoman.server.http.http1 import ChunkedBody, FixedBody, RequestHead, parse_target
from dragoman.server.http.response import Headers, Response
from dragoman.server.telemetry import Recorder, RequestRecord

log = logging.getLogger("dragoman.server")

ASGI = {"version": "3.0", "spec_version": "2.3"}
LINGER_SECONDS = 2.0
TLS_CLOSE_SECONDS = 0.5

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]


def connection_class(limits: Limits, telemetry: Recorder) -> type["HttpConnection"]:
    """The connection class for these limits."""
    return type("LimitedHttpConnection", (HttpConnection,), {"limits": limits, "telemetry": telemetry})


class HttpConnection(asyncio.Protocol):
    limits: Limits
    telemetry: Recorder
    transport: asyncio.Transport
    buffer: ReadBuffer
    _head: RequestHead | None = None
    """The head that is arriving."""
    _body: FixedBody | ChunkedBody | None = None
    """The body that is arriving."""
    _response: Response | None = None
    """The response to the latest request."""
    _is_lingering = False
    _linger_timer: asyncio.TimerHandle | None = None

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
        self.transport = transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        loop = self._loop
        self.buffer = ReadBuffer(transport, loop)
        self._head_timer = HeadTimer(loop, self.limits.body_seconds, self._refuse_late_head)
        self._idle_timer = IdleTimer(loop, self._keep_alive_seconds, self._is_idle, transport.close)
        self._write_timer = WriteTimer(transport, loop, self.limits.write_seconds)
        self._addresses = {
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
        }
        self._head_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self.buffer.close()
        for timer in (self._head_timer, self._idle_timer, self._linger_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
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
        if self._addresses["scheme"] == "https":
            self._loop.call_later(TLS_CLOSE_SECONDS, _abort_closed, self.transport, self._loop)

    @property
    def _is_answering(self) -> bool:
        return self._response is not None and not self._response.response_complete

    def _is_idle(self) -> bool:
        return self._head is None and not self._is_answering

    # Receiving

    def data_received(self, data: bytes) -> None:
        self._idle_timer.last_received = self._loop.time()
        if self._is_lingering:
            self.buffer.discard(len(data))
        elif self.buffer.data:
            self.buffer.store(self.buffer.data + data)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                if self._body is not None:
                    data = self._feed_body(self._body, data)
                elif self._is_answering:
                    self.buffer.store(data)
                    return
                else:
                    data = self._feed_head(data)
        except DragomanError as error:
            self._refuse(error)
            return
        if not self._is_answering and self._body is None:
            self._head_timer.start()

    def _feed_head(self, data: bytes) -> bytes:
        if self._head is None:
            self._head = RequestHead(self.limits.header_bytes)
        head = self._head
        rest = head.feed(data)
        if head.is_complete:
            self._begin(head)
        return rest

    def _begin(self, head: RequestHead) -> None:
        path, raw_path, query = parse_target(head.url)
        scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": head.version,
            "method": head.method,
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": head.headers,
            "extensions": {DIRECT: self},
            **self._addresses,
        }
        self._head = None
        self._head_timer.cancel()
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

    def _feed_body(self, body: FixedBody | ChunkedBody, data: bytes) -> bytes:
        response = self._response
        assert response is not None
        piece, rest = body.feed(data)
        if response.response_complete:
            return self._discard_body(data, rest)
        response.body += piece
        if rest is None:
            if len(response.body) > READ_AHEAD:
                self.buffer.pause()
        else:
            self._body = None
            response.more_body = False
        response.arrival.set()
        return rest or b""

    def _discard_body(self, data: bytes, rest: bytes | None) -> bytes:
        """More of the body of a request that has been answered."""
        if rest is None:
            self.buffer.discard(len(data))
            return b""
        self._body = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._idle_timer.start()
        return rest

    # Answering

    async def _answer(self, response: Response) -> None:
        """Run the app. It handles its own errors; a request that it leaves unanswered gets a plain 500."""
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
        response = self._response
        return response if response is not None and response.scope is scope else None

    def finish(self, response: Response) -> None:
        """Called when the response is complete: wait for the next request, or close."""
        self._state.total_requests += 1
        if self.transport.is_closing():
            return
        buffer = self.buffer
        if not response.keep_alive:
            if self._body is None and not buffer.data:
                self.transport.close()
            else:
                self._linger()
            return
        if self._body is not None:
            response.body.clear()
            buffer.discarded = 0
            self._linger_timer = self._loop.call_later(LINGER_SECONDS, self.transport.close)
            buffer.resume()
            return
        if buffer.data:
            data, buffer.data = buffer.data, b""
            self._feed(data)
        buffer.resume()
        self._idle_timer.start()

    @property
    def can_drain(self) -> bool:
        """Whether the rest of the request's body is small enough to be read and discarded."""
        left = None if self._body is None else self._body.left
        return left is not None and left <= LINGER_BYTES

    # Refusing and closing

    def _linger(self) -> None:
        self._is_lingering = True
        self.buffer.data = b""
        self.buffer.discarded = 0
        self._head_timer.cancel()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.buffer.resume()
        self._linger_timer = self._loop.call_later(LINGER_SECONDS, self.transport.close)

    def _refuse_late_head(self) -> None:
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
            self.transport.write(_encode_refusal(error, record.id, _error_family(self._head, response)))
            self.telemetry.request(record)
        if response is not None:
            response.disconnect()
        self._linger()

    def pause_writing(self) -> None:
        self.writable.clear()
        self._write_timer.start()

    def resume_writing(self) -> None:
        self.writable.set()
        self._write_timer.cancel()


def _abort_closed(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
    """Abort once the output is sent: an idle client does not answer TLS's close_notify, and must not delay the stop."""
    if not transport.is_closing() or transport.get_write_buffer_size():
        loop.call_later(TLS_CLOSE_SECONDS, _abort_closed, transport, loop)
    else:
        transport.abort()


def _address(name: object) -> tuple[str, int] | None:
    """Host and port; None for a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _error_family(head: RequestHead | None, response: Response | None) -> Family:
    """The error format of the request that is arriving, or of the one before."""
    if head is not None:
        return family(head.path, dict(head.headers))
    if response is not None:
        return family(response.scope["path"], dict(response.scope["headers"]))
    return family("", {})


def _encode_refusal(error: DragomanError, request_id: str, error_family: Family) -> bytes:
    body = msgspec.json.encode(error_family.encode_error(error, request_id))
    id_header = error_family.id_header
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"x-request-id: {request_id}",
        *(() if id_header is None else (f"{id_header.decode()}: {request_id}",)),
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

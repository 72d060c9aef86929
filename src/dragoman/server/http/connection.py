"""One HTTP connection. It reads requests and writes responses, one after the other.

Rules
1. Headers that are too large get 431, headers that take too long 408, malformed HTTP 400; then the connection is
   closed. These replies have the usual error format and are recorded in the event log.
2. The bytes after a request are not parsed before its response is complete. Up to `READ_AHEAD` of them are kept; then
   reading pauses. If it pauses for `PIPELINE_SECONDS`, these requests are dropped, and the connection closes after the
   response: while reading is paused, a client that disconnects is not always noticed. After `MAX_DROPPED` bytes it is
   aborted.
3. The time for a head runs while no request is being answered. Empty lines before a request do not stop it.
4. A client that reads nothing for `write_seconds` while output is waiting is disconnected.
5. A request that opens a WebSocket goes to the app as one. If the app accepts it, a `WebSocketConnection` gets the
   transport. Any other `Upgrade` is ignored: the request is served as HTTP (see `http1`).
6. Whole replies and pieces of a stream, the most frequent writes, are synchronous calls (see `response`).
7. If a response is written before the request's body is complete, a small rest of the body is read and discarded, and
   the connection is kept. With a larger rest the connection lingers: up to `LINGER_BYTES` are read and discarded within
   `LINGER_SECONDS`, so that the client can read the response before the connection closes.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

import msgspec

from dragoman.config.settings import Limits
from dragoman.core.errors import DragomanError, RequestTimeout, UpgradeRequired
from dragoman.core.ids import new_id
from dragoman.protocols.registry import family
from dragoman.protocols.wire_protocol import Family
from dragoman.server.http.http1 import ChunkedBody, FixedBody, RequestHead, parse_target
from dragoman.server.http.response import (
    DIRECT,
    LINGER_BYTES,
    MAX_DROPPED,
    READ_AHEAD,
    HeaderLines,
    ReadBuffer,
    Receive,
    Response,
    Scope,
    Send,
    UnreadOutput,
)
from dragoman.server.http.websocket import ServerConnection, WebSocketUpgrade
from dragoman.server.http.websocket_handshake import REFUSAL_LINES, opens_websocket, read_key
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.server.telemetry.recorder import Recorder

log = logging.getLogger("dragoman.server")

ASGI = {"version": "3.0", "spec_version": "2.3"}
LINGER_SECONDS = 2.0
TLS_CLOSE_SECONDS = 0.5

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class ServerState:
    """What the connections of a server share."""

    app: AsgiApp
    limits: Limits
    telemetry: Recorder
    keep_alive_seconds: float = 75.0
    default_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: set[ServerConnection] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class HttpConnection(asyncio.Protocol):
    transport: asyncio.Transport
    buffer: ReadBuffer
    output: UnreadOutput
    _head: RequestHead | None = None
    _body: FixedBody | ChunkedBody | None = None
    _response: Response | None = None
    """The response to the latest request."""
    _is_discarding = False
    """Whether everything that arrives from now on is discarded."""
    _head_due = _close_due = _abort_due = math.inf
    """When the head must have arrived, and when the connection is closed or aborted."""
    _is_head_late = False
    _received_at = 0.0

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._limits = state.limits
        self._loop = asyncio.get_running_loop()

    @property
    def default_headers(self) -> HeaderLines:
        return self._state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)
        self.buffer = ReadBuffer(transport)
        self.output = UnreadOutput(transport)
        self._head_due = self._loop.time() + self._limits.body_seconds
        self._addresses = {
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
        }

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self.buffer.data = b""
        if self._response is not None:
            self._response.disconnect()
            # The response refers to this object: without this, it would be a cycle.
            self._response = None
        self.output.resume()

    def shutdown(self) -> None:
        """Close the connection, after its response if one is being sent."""
        if self._is_answering:
            assert self._response is not None
            self._response.keep_alive = False
        else:
            self.transport.close()
        if self._addresses["scheme"] == "https":
            # An idle client does not answer TLS's close_notify, and must not delay the stop.
            self._abort_due = self._loop.time() + TLS_CLOSE_SECONDS

    def check(self, now: float) -> None:
        """Called regularly: enforce the time limits."""
        transport, response = self.transport, self._response
        is_idle = response is not None and response.response_complete and self._head is None
        self.buffer.check_disconnect()
        if not self.output.is_writable.is_set():
            if self.output.is_stuck(now, self._limits.write_seconds):
                transport.abort()
        elif now >= self._abort_due and transport.is_closing() and not transport.get_write_buffer_size():
            transport.abort()
        elif now >= self._close_due:
            transport.close()
        elif now >= self._head_due:
            # The event loop first reads what arrived while the process was suspended or busy.
            if self._is_head_late and not self.buffer.has_unread:
                self._refuse_late_head()
            self._is_head_late = True
        elif is_idle and now - self._received_at >= self._state.keep_alive_seconds:
            transport.close()
        elif self.buffer.has_late_requests(now):
            self._drop_requests()
        elif self._has_dropped_requests and self.buffer.discarded > MAX_DROPPED:
            transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self._response is not None and not self._response.response_complete

    @property
    def _has_dropped_requests(self) -> bool:
        """Whether this is the last response, because the requests after it were dropped."""
        return self._is_discarding and self._is_answering and self._close_due == math.inf

    # Receiving

    def data_received(self, data: bytes) -> None:
        self._received_at = self._loop.time()
        if self._is_discarding:
            self.buffer.discard(len(data))
        elif self.buffer.data:
            self.buffer.store(self.buffer.data + data, self._received_at)
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        try:
            while data:
                if self._body is not None:
                    data = self._feed_body(self._body, data)
                elif self._is_answering:
                    self.buffer.store(data, self._loop.time())
                    return
                else:
                    data = self._feed_head(data)
        except DragomanError as error:
            self._refuse(error)
            return
        if not self._is_answering and self._body is None and self._head_due == math.inf:
            self._head_due = self._loop.time() + self._limits.body_seconds

    def _feed_head(self, data: bytes) -> bytes:
        if self._head is None:
            self._head = RequestHead(self._limits.header_bytes)
        head = self._head
        rest = head.feed(data)
        if head.is_complete:
            self._begin(head)
        return rest

    def _begin(self, head: RequestHead) -> None:
        path, raw_path, query, host = parse_target(head.url)
        if host is not None:
            head.headers = [(name, host if name == b"host" else value) for name, value in head.headers]
        key = read_key(head) if opens_websocket(head) else None
        scope: Scope = {
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
        self._head_due, self._is_head_late = math.inf, False
        self._response = response = Response(scope, self, head.expects_continue, head.keep_alive)
        if head.is_chunked:
            self._body = ChunkedBody(self._limits.header_bytes)
        elif head.content_length:
            self._body = FixedBody(head.content_length)
        else:
            response.more_body = False
            response.arrival.set()
        answer = response if key is None else WebSocketUpgrade(response, key, self, self._limits)
        response.task = task = self._loop.create_task(self._answer(response, answer))
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
        self._close_due = math.inf
        return rest

    # Answering

    async def _answer(self, response: Response, answer: Response | WebSocketUpgrade) -> None:
        """Run the app. It handles its own errors; a request that it leaves unanswered gets a plain 500."""
        try:
            await self._state.app(answer.scope, answer.receive, answer.send)
        except BaseException:
            log.exception("a request was not answered")
        answer.end()
        # Not as a callback of the task: that costs every request one more call from the event loop.
        self._state.tasks.discard(response.task)

    def detach(self) -> bytes:
        """Leave the transport to a WebSocket. Returns what has arrived after the request."""
        self._state.connections.discard(self)
        data, self.buffer.data, self._response = self.buffer.data, b"", None
        self.buffer.resume()
        return data

    @property
    def connections(self) -> set[ServerConnection]:
        return self._state.connections

    def response(self, scope: Scope) -> Response | None:
        response = self._response
        return response if response is not None and response.scope is scope else None

    def finish(self, response: Response) -> None:
        """Called when the response is complete: wait for the next request, or close."""
        if self.transport.is_closing():
            return
        buffer = self.buffer
        if not response.keep_alive:
            if self._body is None and not buffer.data and not self._is_discarding:
                self.transport.close()
            else:
                self._linger()
            return
        if self._body is not None:
            response.body.clear()
            buffer.discarded = 0
            self._close_due = self._loop.time() + LINGER_SECONDS
            buffer.resume()
            return
        if buffer.data:
            data, buffer.data = buffer.data, b""
            self._feed(data)
        buffer.resume()
        self._received_at = self._loop.time()

    @property
    def can_drain(self) -> bool:
        """Whether the rest of the request's body is small enough to be read and discarded."""
        left = None if self._body is None else self._body.left
        return left is not None and left <= LINGER_BYTES

    # Refusing and closing

    def _drop_requests(self) -> None:
        """Answer only the present request, and discard what follows it."""
        assert self._response is not None
        self._response.keep_alive = False
        self._is_discarding = True
        self.buffer.start_discarding(MAX_DROPPED)

    def _linger(self) -> None:
        self._is_discarding = True
        self._head_due = math.inf
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.buffer.start_discarding(LINGER_BYTES)
        self._close_due = self._loop.time() + LINGER_SECONDS

    def _refuse_late_head(self) -> None:
        if self._head is None or not self._head.is_started:
            self.transport.close()
            return
        self._refuse(RequestTimeout(f"the headers took longer than {self._limits.body_seconds:g} s to arrive"))

    def _refuse(self, error: DragomanError) -> None:
        """Answer an invalid or late request with an error, and close the connection."""
        if self.transport.is_closing():
            return
        response = self._response
        if self._body is None or (response is not None and not response.response_started):
            record = RequestRecord(id=new_id("req-"), route="", status=error.status, error=error.code)
            self.transport.write(_encode_refusal(error, record.id, _error_family(self._head, response)))
            self._state.telemetry.request(record)
        if response is not None:
            response.disconnect()
        self._linger()

    def pause_writing(self) -> None:
        self.output.pause(self._loop.time())

    def resume_writing(self) -> None:
        self.output.resume()


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
        *(REFUSAL_LINES if isinstance(error, UpgradeRequired) else ()),
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

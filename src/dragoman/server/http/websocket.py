"""One WebSocket connection, and the ASGI messages between it and the app.

    request     := websocket.connect, then the app accepts it or answers it as HTTP
    accepted    := (websocket.receive | websocket.send)* websocket.close? websocket.disconnect
    answered    := websocket.http.response.start websocket.http.response.body+, or websocket.close, which is a 403

Rules
1. Messages that the app has not read are kept up to `READ_AHEAD` bytes; then reading pauses.
2. A message that takes longer than `body_seconds` ends the connection (1008). A client that reads nothing for
   `write_seconds` while output is waiting is disconnected.
3. After `PING_SECONDS` without a byte from the client it gets a ping. If it sends nothing in `PONG_SECONDS` then, the
   connection ends (1011). While reading is paused, this time does not run.
4. After our close frame the client has `CLOSE_SECONDS` for its own. Its messages are discarded meanwhile.
5. After the end, the app gets `websocket.disconnect`, and what it sends is discarded.
6. At the shutdown of the server, the event `STOPPING` of the scope is set. The app closes the connection.
"""

import asyncio
import math
import select
from collections import deque
from typing import Protocol

from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason

from dragoman.config.settings import Limits
from dragoman.server.http.response import (
    DISCONNECTED,
    READ_AHEAD,
    HeaderLines,
    Message,
    Response,
    UnreadOutput,
    poll_socket,
)
from dragoman.server.http.websocket_frames import WebSocketFrames, WebSocketViolation
from dragoman.server.http.websocket_handshake import encode_acceptance

STOPPING = "dragoman.stopping"
"""Extension of the ASGI scope of a WebSocket: the `asyncio.Event` that is set when the server stops."""
PING_SECONDS = 20.0
PONG_SECONDS = 20.0
CLOSE_SECONDS = 2.0


class ServerConnection(Protocol):
    """A connection as the server sees it."""

    def check(self, now: float) -> None:
        """Called regularly: enforce the time limits."""

    def shutdown(self) -> None:
        """Close the connection as soon as it is idle."""


class WebSocketConnection(asyncio.Protocol):
    """The connection after the handshake. `shutdown` sets `stopping`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        limits: Limits,
        connections: set[ServerConnection],
        stopping: asyncio.Event,
    ) -> None:
        self._transport = transport
        self._limits = limits
        self._connections = connections
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._frames = WebSocketFrames(limits.body_bytes)
        self._messages: deque[TextMessage | BytesMessage] = deque()
        self._unread_bytes = 0
        self._is_paused = False
        self._arrival = asyncio.Event()
        """Set when a message has arrived, or the connection has ended."""
        self._end: Message | None = None
        """What the app gets after the end of the connection."""
        self._output = UnreadOutput(transport)
        self._received_at = self._loop.time()
        self._pinged_at = self._message_due = self._close_due = math.inf
        self._is_late = False
        """Whether a time limit had passed at the last check."""
        self._has_failed = False
        """Whether everything that arrives from now on is discarded."""
        connections.add(self)

    # The interface of the app

    async def receive(self) -> Message:
        while not self._messages and self._end is None:
            self._arrival.clear()
            await self._arrival.wait()
        if self._end is not None:
            return self._end
        message = self._messages.popleft()
        self._unread_bytes -= len(message.data)
        if self._unread_bytes <= READ_AHEAD:
            self._resume_reading()
        key = "text" if isinstance(message, TextMessage) else "bytes"
        return {"type": "websocket.receive", key: message.data}

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.close":
            self.close(message.get("code", CloseReason.NORMAL_CLOSURE), message.get("reason") or "")
            return
        if self._end is None and not self._output.is_writable.is_set():
            await self._output.is_writable.wait()
        if self._end is None:
            text = message.get("text")
            self._write(self._frames.binary(message["bytes"]) if text is None else self._frames.text(text))

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame, and end the connection when the client has answered it. Further calls do nothing."""
        if self._end is None:
            self._write(self._frames.close(code, reason))
            self._finish(code, reason)

    def _finish(self, code: int, reason: str = "") -> None:
        """The app gets no more messages, and can send none."""
        self._end = {"type": "websocket.disconnect", "code": code, "reason": reason}
        self._close_due = self._loop.time() + CLOSE_SECONDS
        self._messages.clear()
        self._arrival.set()
        self._output.resume()
        self._resume_reading()

    def _fail(self, violation: WebSocketViolation) -> None:
        """Close the connection. What arrives until the client closes it too is discarded, so that it can read why."""
        self._has_failed = True
        self.close(violation.code, violation.reason)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()

    def _resume_reading(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._received_at = now = self._loop.time()
            if self._message_due < math.inf:
                self._message_due = now + self._limits.body_seconds
            self._transport.resume_reading()

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    # The interface of the server

    def shutdown(self) -> None:
        self._stopping.set()

    def check(self, now: float) -> None:
        if now >= self._close_due or self._output.is_stuck(now, self._limits.write_seconds):
            self._transport.abort()
        elif self._is_paused:
            if poll_socket(self._transport, DISCONNECTED):
                self._transport.abort()
        elif self._end is None and (violation := self._find_timeout(now)) is not None:
            # The event loop first reads what arrived while the process was suspended or busy.
            if self._is_late and not poll_socket(self._transport, select.POLLIN):
                self._fail(violation)
            self._is_late = True
        elif self._end is None and self._pinged_at == math.inf and now - self._received_at >= PING_SECONDS:
            self._pinged_at = now
            self._write(self._frames.ping())

    def _find_timeout(self, now: float) -> WebSocketViolation | None:
        if now >= self._message_due:
            seconds = self._limits.body_seconds
            return WebSocketViolation(CloseReason.POLICY_VIOLATION, f"a message took longer than {seconds:g} s")
        if now - self._pinged_at >= PONG_SECONDS:
            return WebSocketViolation(CloseReason.INTERNAL_ERROR, f"no answer to a ping in {PONG_SECONDS:g} s")
        return None

    # The interface of the transport

    def data_received(self, data: bytes) -> None:
        self._received_at = now = self._loop.time()
        self._pinged_at, self._is_late = math.inf, False
        if self._has_failed or self._transport.is_closing():
            return
        try:
            for event in self._frames.feed(data, now):
                self._handle(event)
        except WebSocketViolation as violation:
            self._fail(violation)
            return
        if not self._frames.in_message:
            self._message_due = math.inf
        elif self._message_due == math.inf:
            self._message_due = now + self._limits.body_seconds

    def _handle(self, event: Event) -> None:
        if isinstance(event, CloseConnection):
            if self._end is None:
                self._write(self._frames.close(event.code))
                self._finish(event.code, event.reason or "")
            self._transport.close()
        elif self._end is not None:
            return
        elif isinstance(event, Ping):
            self._write(self._frames.pong(bytes(event.payload)))
        elif isinstance(event, TextMessage | BytesMessage):
            self._message_due = math.inf
            self._messages.append(event)
            self._unread_bytes += len(event.data)
            self._arrival.set()
            if self._unread_bytes > READ_AHEAD and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._end is None:
            self._finish(CloseReason.ABNORMAL_CLOSURE)

    def pause_writing(self) -> None:
        self._output.pause(self._loop.time())

    def resume_writing(self) -> None:
        self._output.resume()


class HttpSide(Protocol):
    """The HTTP connection that becomes a WebSocket."""

    transport: asyncio.Transport

    @property
    def default_headers(self) -> HeaderLines: ...

    @property
    def connections(self) -> set[ServerConnection]: ...

    def detach(self) -> bytes:
        """Leave the transport to a WebSocket. Returns what has arrived after the request."""


class WebSocketUpgrade:
    """A request that opens a WebSocket, with a valid key. `response` is used if the app answers it as HTTP."""

    def __init__(self, response: Response, key: bytes, http: HttpSide, limits: Limits) -> None:
        self._response = response
        self._key = key
        self._http = http
        self._limits = limits
        self._stopping = asyncio.Event()
        self._is_announced = False
        self._connection: WebSocketConnection | None = None
        http_scope = response.scope
        self.scope = {
            **http_scope,
            "type": "websocket",
            "scheme": http_scope["scheme"].replace("http", "ws"),
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}, STOPPING: self._stopping},
        }

    async def receive(self) -> Message:
        if not self._is_announced:
            self._is_announced = True
            return {"type": "websocket.connect"}
        if self._connection is not None:
            return await self._connection.receive()
        while not (self._response.disconnected or self._response.response_complete):
            await self._response.receive()
        return {"type": "websocket.disconnect", "code": CloseReason.ABNORMAL_CLOSURE}

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if self._connection is not None:
            await self._connection.send(message)
        elif kind == "websocket.accept":
            self._accept(message.get("headers", ()))
        elif kind == "websocket.close":
            await self._response.send({"type": "http.response.start", "status": 403, "headers": []})
            await self._response.send({"type": "http.response.body"})
        else:
            await self._response.send({**message, "type": kind.removeprefix("websocket.")})

    def _accept(self, headers: HeaderLines) -> None:
        http, response = self._http, self._response
        transport = http.transport
        if response.disconnected or response.response_complete or transport.is_closing():
            return
        response.response_complete = True
        transport.write(encode_acceptance(self._key, (*http.default_headers, *headers)))
        connection = WebSocketConnection(transport, self._limits, http.connections, self._stopping)
        transport.set_protocol(connection)
        connection.data_received(http.detach())
        self._connection = connection

    def end(self) -> None:
        """The app has ended."""
        if self._connection is None:
            self._response.end()
        else:
            self._connection.close(CloseReason.INTERNAL_ERROR)

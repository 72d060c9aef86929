"""One request on an HTTP connection: reads its body and writes its response.

Rules
1. The head and the first part of the body are one write, which saves a system call and a packet.
2. Nothing is written to a connection that is closing: uvloop raises where asyncio drops the bytes.
3. Three frequent operations are synchronous calls that fail instead of waiting: `take_body` for a body that has
   arrived, `reply` for a whole response, `write` for a piece of a stream. `receive` and `send` wait.
4. A body without a length is chunked. HTTP/1.0 has no chunks: there the end of the connection ends the body.
5. 204, 304 and responses to HEAD have no body; 204 and 304 have no Content-Length either.
"""

import asyncio
import select
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
HeaderLines = Iterable[tuple[bytes, bytes]]

DIRECT = "dragoman.direct"
"""ASGI scope extension. Its value is the connection; `connection.response(scope)` returns the `Response`."""
READ_AHEAD = 64 * 1024
"""Bytes kept before reading pauses: of a body that the app has not read, or after a request."""
PIPELINE_SECONDS = 1.0
"""If reading has paused for this time because of further requests, they are dropped."""
MAX_DROPPED = 64 * 1024 * 1024
"""Bytes of dropped requests that are received: more than the buffers of sockets hold."""
LINGER_BYTES = 1024 * 1024
"""Bytes of an unread body that are received and discarded before reading pauses."""
DISCONNECTED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
CHUNK = b"%x\r\n%b\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WITHOUT_BODY = frozenset({204, 304})
PHRASES = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}


class ReadBuffer:
    """Bytes received after the request that is being answered. Reading pauses when there are too many."""

    data = b""
    discarded = 0
    """Bytes discarded since `discarded` was reset."""
    limit = LINGER_BYTES
    """Bytes that are discarded before reading pauses."""
    _is_paused = False
    _stored_at = 0.0

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def store(self, data: bytes, now: float) -> None:
        self.data = data
        self._stored_at = now
        if len(data) > READ_AHEAD:
            self.pause()

    def has_late_requests(self, now: float) -> bool:
        """Whether further requests have paused reading for too long."""
        return len(self.data) > READ_AHEAD and now - self._stored_at >= PIPELINE_SECONDS

    def discard(self, size: int) -> None:
        """Count received bytes that are not needed; too many of them pause reading."""
        self.discarded += size
        if self.discarded > self.limit:
            self.pause()

    def start_discarding(self, limit: int) -> None:
        """Drop what is kept, and discard up to `limit` more bytes."""
        self.data = b""
        self.discarded, self.limit = 0, limit
        self.resume()

    def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and len(self.data) <= READ_AHEAD and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def check_disconnect(self) -> None:
        """Poll the socket: while reading is paused, asyncio does not report a disconnect."""
        if self._is_paused and len(self.data) > READ_AHEAD and poll_socket(self._transport, DISCONNECTED):
            self._transport.abort()

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that the event loop has not read yet, because it is busy."""
        return poll_socket(self._transport, select.POLLIN)


def poll_socket(transport: asyncio.Transport, events: int) -> bool:
    """Whether one of these events of the socket is pending, such as a disconnect while reading is paused."""
    if transport.is_closing():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), events)
    return bool(poll.poll(0))


class UnreadOutput:
    """Output that waits for a client, and when the client has read last."""

    _size = 0
    _read_at = 0.0

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_writable = asyncio.Event()
        """Cleared while the client does not read."""
        self.is_writable.set()

    def pause(self, now: float) -> None:
        self.is_writable.clear()
        self._size, self._read_at = self._transport.get_write_buffer_size(), now

    def resume(self) -> None:
        self.is_writable.set()

    def is_stuck(self, now: float, seconds: float) -> bool:
        """Whether the client has read nothing for this long. Call it regularly."""
        if self.is_writable.is_set():
            return False
        # Nothing is written meanwhile, so a smaller buffer means that the client has read.
        size = self._transport.get_write_buffer_size()
        if size < self._size:
            self._size, self._read_at = size, now
        return now - self._read_at >= seconds


class ResponseConnection(Protocol):
    """The part of a connection that a response uses."""

    transport: asyncio.Transport
    buffer: ReadBuffer
    output: UnreadOutput

    @property
    def default_headers(self) -> HeaderLines: ...

    @property
    def can_drain(self) -> bool:
        """Whether the rest of the request's body is small enough to be read and discarded."""

    def finish(self, response: "Response") -> None:
        """The response is complete."""


class Response:
    task: asyncio.Task[None]
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    _is_chunked = False
    _has_body = True
    _head = b""
    """The response's head, until it is written with the beginning of the body."""

    def __init__(self, scope: Scope, connection: ResponseConnection, expects_continue: bool, keep_alive: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.body = bytearray()
        """The part of the request's body that has arrived and was not read."""
        self.arrival = asyncio.Event()
        """Set when more of the body has arrived, or the connection or the response has ended."""
        self._connection = connection
        self._expects_continue = expects_continue

    def disconnect(self) -> None:
        if not self.response_complete:
            self.disconnected = True
            self.arrival.set()

    def end(self) -> None:
        """The app has ended. Without a complete response the connection is closed."""
        if self.response_complete or self.disconnected:
            return
        if not self.response_started:
            body = b"Internal Server Error"
            self.reply(500, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))], body)
        self._connection.transport.close()

    async def receive(self) -> Message:
        if not (self.disconnected or self.response_complete):
            if self.more_body:
                self._request_body()
            await self.arrival.wait()
            self.arrival.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    def _request_body(self) -> None:
        if self._expects_continue:
            self._expects_continue = False
            if not self._connection.transport.is_closing():
                self._connection.transport.write(CONTINUE)
        self._connection.buffer.resume()

    def take_body(self) -> bytes | None:
        """The request's whole body, if it has arrived."""
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        self._connection.buffer.resume()
        return body

    async def send(self, message: Message) -> None:
        if not self.disconnected and not self._connection.output.is_writable.is_set():
            await self._connection.output.is_writable.wait()
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._continue(message.get("body", b""), message.get("more_body", False))

    def reply(self, status: int, headers: HeaderLines, body: bytes) -> bool:
        """Write a whole response; False if it would have to wait."""
        if self.disconnected or not self._connection.output.is_writable.is_set():
            return False
        self._begin(status, headers)
        self._continue(body, more=False)
        return True

    def write(self, data: bytes) -> bool:
        """Write a piece of a started stream; False if it would have to wait."""
        if self.disconnected or not self._is_chunked or not self._connection.output.is_writable.is_set():
            return False
        self._put(CHUNK % (len(data), data))
        return True

    def _begin(self, status: int, headers: HeaderLines) -> None:
        self.response_started = True
        scope = self.scope
        is_bodiless = status in WITHOUT_BODY
        self._has_body = not is_bodiless and scope["method"] != "HEAD"
        has_length = False
        if self.more_body and (self._expects_continue or not self._connection.can_drain):
            # The rest of the body may be too large, or may never arrive.
            self.keep_alive = False
        self._expects_continue = False
        lines = [STATUS_LINES[status]]
        for name, value in (*self._connection.default_headers, *headers):
            if name == b"connection":
                # The app sends no other value than `close`.
                self.keep_alive = False
                continue
            if name == b"content-length":
                if is_bodiless:
                    continue
                has_length = True
            lines += name, b": ", value, b"\r\n"
        self._is_chunked = self._has_body and not has_length and scope["http_version"] == "1.1"
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def _continue(self, body: bytes, more: bool) -> None:
        if self._is_chunked:
            piece = CHUNK % (len(body), body) if body else b""
            self._put(piece if more else piece + LAST_CHUNK)
        else:
            self._put(body if self._has_body else b"")
        if not more:
            self.response_complete = True
            self.arrival.set()
            self._connection.finish(self)

    def _put(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        transport = self._connection.transport
        if data and not transport.is_closing():
            transport.write(data)

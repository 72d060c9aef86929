"""How the bytes of one response leave: uvicorn's cycle of request and response, with a writing side of its own, and
with less to set up: it is made for every request.

Rules
1. The head leaves in one write with the beginning of the body: one system call and one packet less for each response.
2. Nothing is written to a connection that is closing: uvloop raises where asyncio would drop the bytes.
3. What need not wait for the client needs no coroutine: `take_body` for a body that has arrived, `reply` for a whole
   response, `write` for a piece of a stream. Everything else goes by `receive` and `send`, which wait.
"""

import asyncio
from collections.abc import Callable, Iterable

from uvicorn._types import ASGISendEvent, HTTPScope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Headers = Iterable[tuple[bytes, bytes]]


CHUNK = b"%x\r\n%b\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class News:
    """What asyncio.Event is, for one who waits: few do, as most requests come in one piece."""

    __slots__ = ("_has_come", "_waiter")

    def __init__(self) -> None:
        self._has_come = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._has_come = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._has_come = False

    async def wait(self) -> None:
        if not self._has_come:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class Response(RequestResponseCycle):
    task: asyncio.Task[None]
    """Who answers."""
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding = False
    _head = b""
    """What waits for the beginning of the body."""

    def __init__(
        self,
        scope: HTTPScope,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        expect_100_continue: bool,
        keep_alive: bool,
        on_response: Callable[[], None],
    ) -> None:
        self.scope = scope
        self.transport = transport
        self.flow = flow
        self.default_headers = default_headers
        self.waiting_for_100_continue = expect_100_continue
        self.keep_alive = keep_alive
        self.on_response = on_response
        self.message_event = News()  # type: ignore[assignment]
        self.body = bytearray()

    def give_up(self) -> None:
        """Nothing more will come: nobody is left waiting for it."""
        if not self.response_started:
            words = b"Internal Server Error"
            self.reply(500, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(words))], words)
        self.transport.close()

    async def send(self, message: ASGISendEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected or self.response_complete:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._continue(message.get("body", b""), message.get("more_body", False))

    def take_body(self) -> bytes | None:
        """The request's whole body, if it has arrived."""
        if self.more_body or self.disconnected:
            return None
        self.flow.resume_reading()
        body, self.body = bytes(self.body), bytearray()
        return body

    def reply(self, status: int, headers: Headers, body: bytes) -> bool:
        """A whole response; False where it would have to wait."""
        if self.disconnected or self.flow.write_paused:
            return False
        self._begin(status, headers)
        self._continue(body, more=False)
        return True

    def write(self, data: bytes) -> bool:
        """A piece of a stream that has begun; False where it would have to wait."""
        if self.disconnected or self.flow.write_paused or not self.chunked_encoding:
            return False
        self._put(CHUNK % (len(data), data))
        return True

    def _begin(self, status: int, headers: Headers) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        self.chunked_encoding = self.scope["method"] != "HEAD"
        lines = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if name == b"connection":
                # The only word this server has for it is `close`.
                self.keep_alive = False
                continue
            if name == b"content-length":
                self.chunked_encoding = False
            lines += name, b": ", value, b"\r\n"
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def _continue(self, body: bytes, more: bool) -> None:
        if self.chunked_encoding:
            piece = CHUNK % (len(body), body) if body else b""
            self._put(piece if more else piece + LAST_CHUNK)
        else:
            self._put(b"" if self.scope["method"] == "HEAD" else body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _put(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        if not self.transport.is_closing():
            self.transport.write(data)

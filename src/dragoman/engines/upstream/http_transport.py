"""HTTP/1.1 to a place, as httpx wants it brought: a parser in C on the event loop's own sockets.

httpx's own transport costs much for each piece of a stream, and here each token is one.

Rules
1. A connection carries one exchange at a time, and is used again if its answer was read to the end and both want so.
2. What has come is handed out before the error that came after it.
3. A reader who does not keep up makes the connection pause.
4. Whoever has the body poured is called by the socket itself: no task has to wake up for a token.
"""

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools
import httpx

from dragoman.client.async_transport import POUR
from dragoman.client.http_settings import KEPT_SECONDS

MOST_WAITING = 1024 * 1024
MOST_HEAD = 256 * 1024
Origin = tuple[bool, str, int]
Take = Callable[[bytes], bool]


class Connection(asyncio.Protocol):
    """The callbacks `on_…` are the parser's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Take | None = None
        self._thrown: Exception | None = None
        self._allowed: float | None = None
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._size = 0
        self._is_paused = False
        self.left_at = 0.0
        self.is_lost = False

    # One exchange.

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.has_head = self.is_complete = self.is_kept = False
        self.error: httpx.TransportError | None = None
        self._head_size = 0
        self._stop_timer()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)

    async def wait(self, seconds: float | None, request: httpx.Request) -> None:
        """Until something has happened."""
        self._waiter = waiter = self._loop.create_future()
        self._allowed = seconds
        self._due = None if seconds is None else self._loop.time() + seconds
        if self._timer is None and self._due is not None:
            self._timer = self._loop.call_at(self._due, self._look, request)
        try:
            await waiter
        finally:
            self._waiter = None

    async def pour(self, take: Take, seconds: float | None, request: httpx.Request) -> bool:
        """Pieces as they come, until one is not wanted or no more come; whether the latter."""
        self._take, self._thrown = take, None
        try:
            await self.wait(seconds, request)
            wants_more = self._take is not None
        finally:
            self._take = None
        if self._thrown is not None:
            raise self._thrown
        return wants_more

    def _hand_over(self, take: Take) -> None:
        if self._allowed is not None:
            self._due = self._loop.time() + self._allowed
        try:
            if take(self.take()):
                return
        except Exception as error:  # noqa: BLE001 (whoever waits raises it)
            self._thrown = error
        self._take = None
        self._wake()

    def take(self) -> bytes:
        taken = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._size = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return taken

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, request: httpx.Request) -> None:
        """One timer for a whole stream: it is set again for as long as something comes in time."""
        self._timer = None
        if self._waiter is None or self._due is None:
            return
        if self._loop.time() >= self._due:
            self._fail(httpx.ReadTimeout("", request=request))
        else:
            self._timer = self._loop.call_at(self._due, self._look, request)

    def _fail(self, error: httpx.TransportError) -> None:
        if not self.is_complete and self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The event loop's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.is_complete:
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"what came is no HTTP: {error}"))
        if self._take is not None and self.pieces:
            self._hand_over(self._take)
            if not self.is_complete and self.error is None:
                return
        if self.has_head or self.error is not None:
            self._wake()
            return
        self._head_size += len(data)
        if self._head_size > MOST_HEAD:
            self._fail(httpx.RemoteProtocolError("the head of the answer does not end"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._stop_timer()
        if self._parser is None or self.is_complete:
            return
        if self.has_head and error is None and self._ends_with_the_connection():
            self.is_complete = True
            self._wake()
        elif error is not None:
            self._fail(httpx.ReadError(str(error) or type(error).__name__))
        else:
            self._fail(httpx.RemoteProtocolError("the connection was closed before the answer was complete"))

    def _ends_with_the_connection(self) -> bool:
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # The parser's.

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        # A hint is followed by the answer proper.
        self.has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self._size += len(body)
        if self._size > MOST_WAITING and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.has_head and self._parser is not None:
            self.is_complete = True
            self.is_kept = self._parser.should_keep_alive()


class Body(httpx.AsyncByteStream):
    def __init__(self, connection: Connection, wire: "Wire", origin: Origin, request: httpx.Request) -> None:
        self._connection = connection
        self._wire = wire
        self._origin = origin
        self._request = request
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection, seconds = self._connection, _limit(self._request, "read")
        while True:
            if connection.pieces:
                yield connection.take()
            elif connection.error is not None:
                raise connection.error
            elif connection.is_complete:
                return
            else:
                await connection.wait(seconds, self._request)

    async def pour(self, take: Take) -> bool:
        connection, seconds = self._connection, _limit(self._request, "read")
        while True:
            if connection.pieces:
                if not take(connection.take()):
                    return True
            elif connection.error is not None:
                raise connection.error
            elif connection.is_complete:
                return False
            elif not await connection.pour(take, seconds, self._request):
                return True

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wire.give_back(self._origin, self._connection)


class Wire(httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self._idle: defaultdict[Origin, list[Connection]] = defaultdict(list)
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        is_tls = url.scheme == "https"
        origin = (is_tls, url.host, url.port or (443 if is_tls else 80))
        connection = self._kept(origin) or await self._connected(origin, request)
        try:
            connection.send(_head(request) + await request.aread())
            while not connection.has_head and connection.error is None:
                await connection.wait(_limit(request, "read"), request)
        except BaseException:
            connection.close()
            raise
        if not connection.has_head and connection.error is not None:
            connection.close()
            raise connection.error
        body = Body(connection, self, origin, request)
        return httpx.Response(connection.status, headers=connection.headers, stream=body, extensions={POUR: body.pour})

    def _kept(self, origin: Origin) -> Connection | None:
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if not connection.is_lost and time.monotonic() - connection.left_at < KEPT_SECONDS:
                return connection
            connection.close()
        return None

    async def _connected(self, origin: Origin, request: httpx.Request) -> Connection:
        is_tls, host, port = origin
        if is_tls and self._tls is None:
            self._tls = httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_limit(request, "connect")):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), host, port, ssl=self._tls if is_tls else None
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("", request=request) from error
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return connection

    def give_back(self, origin: Origin, connection: Connection) -> None:
        if connection.is_complete and connection.is_kept and not connection.is_lost and not connection.pieces:
            connection.left_at = time.monotonic()
            self._idle[origin].append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()


def _head(request: httpx.Request) -> bytes:
    lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _limit(request: httpx.Request, name: str) -> float | None:
    limit: float | None = request.extensions.get("timeout", {}).get(name)
    return limit

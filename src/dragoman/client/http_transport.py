"""An httpx transport for HTTP/1.1 that uses httptools on asyncio sockets.

httpx's own transport is slow for streams of many small chunks, such as one per token. The upstream engine and the load
test use this one. It does not support proxies.

Rules
1. A connection carries one request at a time. It is reused if the response was read to the end and both sides allow it.
2. An idle connection is closed after KEEPALIVE_SECONDS.
3. Received data is delivered before an error that follows it.
4. Reading from the socket pauses while the reader is too slow.
5. `ResponseBody.push` calls its consumer directly from the socket callback, so that no task wakes up for a token.
"""

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools
import httpx

from dragoman.client.async_transport import PUSH_BODY
from dragoman.client.http_settings import KEEPALIVE_SECONDS

MAX_BUFFERED_BYTES = 1024 * 1024
MAX_HEAD_BYTES = 256 * 1024
Origin = tuple[bool, str, int]
Consumer = Callable[[bytes], bool]


class StaleConnection(httpx.RemoteProtocolError):
    """The server closed a reused connection without a response."""


class ClientConnection(asyncio.Protocol):
    """A connection to a server. The parser calls the `on_…` methods."""

    _transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._request: httpx.Request | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._consumer: Consumer | None = None
        self._consumer_error: Exception | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._size = 0
        self._is_paused = False
        self._is_reused = False
        self.is_complete = False
        self.is_lost = False
        self.received_at = 0.0
        """When data last arrived, as `time.perf_counter`."""

    def send(self, request: httpx.Request, body: bytes) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self._is_reused = self.is_complete
        self.has_head = self.is_complete = self.is_reusable = False
        self.error: httpx.TransportError | None = None
        self._head_size = 0
        self._request = request
        self._timeout = _timeout(request, "read")
        self._stop_timer()
        self._parser = httptools.HttpResponseParser(self)
        lines = [request.method.encode() + b" " + request.url.raw_path + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in request.headers.raw]
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def wait(self) -> None:
        """Wait until the state of the connection changes."""
        self._waiter = self._loop.create_future()
        if self._timeout is not None:
            self._deadline = self._loop.time() + self._timeout
            if self._timer is None:
                self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def push(self, consumer: Consumer) -> bool:
        """Pass data to the consumer until it returns false or the response ends; return whether the response ended."""
        self._consumer, self._consumer_error = consumer, None
        try:
            await self.wait()
            has_ended = self._consumer is not None
        finally:
            self._consumer = None
        if self._consumer_error is not None:
            raise self._consumer_error
        return has_ended

    def _deliver(self, consumer: Consumer) -> None:
        if self._timeout is not None:
            self._deadline = self._loop.time() + self._timeout
        try:
            if consumer(self.take()):
                return
        except Exception as error:  # noqa: BLE001 (`push` raises it)
            self._consumer_error = error
        self._consumer = None
        self._wake()

    def take(self) -> bytes:
        data = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._size = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def keep(self, expire: Callable[[], None]) -> None:
        """Call `expire` after KEEPALIVE_SECONDS, unless the connection is used before."""
        self._stop_timer()
        self._timer = self._loop.call_later(KEEPALIVE_SECONDS, expire)

    def close(self) -> None:
        self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        """Fail if the deadline has passed, else restart the timer. One timer serves a whole response."""
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() >= self._deadline:
            self._fail(httpx.ReadTimeout("", request=self._request))
        else:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _fail(self, error: httpx.TransportError) -> None:
        if not self.is_complete and self.error is None:
            self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self.is_complete:
            self.close()  # unexpected data
            return
        self.received_at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(httpx.RemoteProtocolError(f"malformed HTTP response: {error}"))
        if self._consumer is not None and self.pieces:
            self._deliver(self._consumer)
            if not self.is_complete and self.error is None:
                return
        if self.has_head or self.error is not None:
            self._wake()
            return
        self._head_size += len(data)
        if self._head_size > MAX_HEAD_BYTES:
            self._fail(httpx.RemoteProtocolError(f"the response head exceeds {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if self._parser is None or self.is_complete:
            return
        self._stop_timer()
        if self.has_head and error is None and self._is_delimited_by_close():
            self.is_complete = True
            self._wake()
        elif self._is_reused and not self._head_size and not self.has_head:
            self._fail(StaleConnection("the server closed the connection"))
        elif error is not None:
            self._fail(httpx.ReadError(str(error) or type(error).__name__))
        else:
            self._fail(httpx.RemoteProtocolError("the connection was closed before the response was complete"))

    def _is_delimited_by_close(self) -> bool:
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools callbacks

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        # An informational response is followed by the final one.
        self.has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self._size += len(body)
        if self._size > MAX_BUFFERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.has_head and self._parser is not None:
            self.is_complete = True
            self.is_reusable = self._parser.should_keep_alive()


class ResponseBody(httpx.AsyncByteStream):
    def __init__(self, connection: ClientConnection, release: Callable[[], None]) -> None:
        self.connection = connection
        self._release = release

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self.connection
        while True:
            if connection.pieces:
                yield connection.take()
            elif connection.error is not None:
                raise connection.error
            elif connection.is_complete:
                return
            else:
                await connection.wait()

    async def push(self, consumer: Consumer) -> bool:
        """Pass the body to the consumer until it returns false; return whether there may be more data."""
        connection = self.connection
        while True:
            if connection.pieces:
                if not consumer(connection.take()):
                    return True
            elif connection.error is not None:
                raise connection.error
            elif connection.is_complete:
                return False
            elif not await connection.push(consumer):
                return True

    async def aclose(self) -> None:
        self._release()


class HttpTransport(httpx.AsyncBaseTransport):
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls` replaces httpx's default certificates."""
        self._idle: defaultdict[Origin, list[ClientConnection]] = defaultdict(list)
        self._tls = tls

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        is_tls = url.scheme == "https"
        origin = (is_tls, url.host, url.port or (443 if is_tls else 80))
        content = await request.aread()
        connection = self._reuse_idle(origin) or await self._connect(origin, request)
        try:
            connection.send(request, content)
            while not connection.has_head:
                if connection.error is not None:
                    raise connection.error
                await connection.wait()
        except BaseException:
            connection.close()
            raise
        body = ResponseBody(connection, lambda: self._release(origin, connection))
        return httpx.Response(
            connection.status, headers=connection.headers, stream=body, extensions={PUSH_BODY: body.push}
        )

    def _reuse_idle(self, origin: Origin) -> ClientConnection | None:
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if not connection.is_lost:
                return connection
        return None

    async def _connect(self, origin: Origin, request: httpx.Request) -> ClientConnection:
        is_tls, host, port = origin
        if is_tls and self._tls is None:
            self._tls = httpx.create_ssl_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_timeout(request, "connect")):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(loop), host, port, ssl=self._tls if is_tls else None
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout("", request=request) from error
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        return connection

    def _release(self, origin: Origin, connection: ClientConnection) -> None:
        if not (connection.is_complete and connection.is_reusable and not connection.is_lost and not connection.pieces):
            connection.close()
            return
        idle = self._idle[origin]
        idle.append(connection)

        def expire() -> None:
            if connection in idle:
                idle.remove(connection)
            connection.close()

        connection.keep(expire)

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
            connections.clear()


def _timeout(request: httpx.Request, name: str) -> float | None:
    seconds: float | None = request.extensions.get("timeout", {}).get(name)
    return seconds

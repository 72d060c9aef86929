"""A fast HTTP/1.1 client for load tests: persistent connections, one request at a time, body bytes passed on at once.

A general-purpose client needs about 100 µs per stream piece and would distort the results. This one needs about 20 µs.
It does not support redirects or proxies.
"""

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import cast

import httptools

from dragoman.core.urls import parse_address

CONNECT_SECONDS = 10

Feed = Callable[[bytes, float], None]
"""Called with received bytes and their time of arrival from `time.perf_counter`."""


class ConnectionFailed(Exception):
    """The request got no reply."""


class ConnectionStale(ConnectionFailed):
    """The server closed an idle connection."""


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.status = 0
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    async def ask(self, request: bytes, feed: Feed, silence_seconds: float) -> int:
        """Send a request, feed the body to `feed`, and return the status."""
        self.feed, self.silence_seconds = feed, silence_seconds
        self.status = 0
        self.heard = time.perf_counter()
        self.parser = httptools.HttpResponseParser(self)
        self.done = self.loop.create_future()
        self.timer = self.loop.call_later(silence_seconds, self._watch)
        try:
            if self.transport.is_closing():
                raise self._closed()
            self.transport.write(request)
            status = await self.done
        except BaseException:
            self.transport.abort()
            raise
        finally:
            self.timer.cancel()
        self.used = True
        return status

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self.heard = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._settle(ConnectionFailed(f"malformed HTTP response: {error}"))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.feed(data, self.heard)

    def on_message_complete(self) -> None:
        if not self.parser.should_keep_alive():
            self.transport.close()
        self._settle(None)

    def connection_lost(self, error: Exception | None) -> None:
        # Without a content length, the end of the connection is the end of the reply.
        self._settle(None if self.status else self._closed())

    def _closed(self) -> ConnectionFailed:
        message = "the server closed the connection without a reply"
        return ConnectionStale(message) if self.used else ConnectionFailed(message)

    def _settle(self, failure: ConnectionFailed | None) -> None:
        if self.done.done():
            return
        if failure is None:
            self.done.set_result(self.status)
        else:
            self.done.set_exception(failure)

    def _watch(self) -> None:
        left = self.heard + self.silence_seconds - time.perf_counter()
        if left > 0:
            self.timer = self.loop.call_later(left, self._watch)
        else:
            self._settle(ConnectionFailed(f"no data for {self.silence_seconds:g} seconds"))


class Connections:
    """A pool of connections to one server."""

    def __init__(self, url: str, key: str | None, silence_seconds: float) -> None:
        where = parse_address(url)
        parts = urllib.parse.urlsplit(where.api)
        self.host = where.host
        self.tls = ssl.create_default_context() if where.is_tls else None
        self.port = parts.port or (443 if self.tls else 80)
        self.path = parts.path
        lines = [f"host: {parts.netloc}", "accept-encoding: identity", "user-agent: dragoman-bench"]
        login = where.login or (f"Bearer {key}" if key else None)
        self.headers = "\r\n".join([*lines, *([f"authorization: {login}"] if login else [])])
        self.silence_seconds = silence_seconds
        self.idle: list[Connection] = []

    def request(self, method: str, route: str, body: bytes = b"") -> bytes:
        size = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        return f"{method} {self.path}/{route} HTTP/1.1\r\n{self.headers}\r\n{size}\r\n".encode() + body

    async def ask(self, request: bytes, feed: Feed) -> int:
        while True:
            connection = self._take_idle() or await self.opened()
            try:
                status = await connection.ask(request, feed, self.silence_seconds)
            except ConnectionStale:
                continue
            if connection.is_open:
                self.idle.append(connection)
            return status

    def close(self) -> None:
        for connection in self.idle:
            connection.transport.abort()

    def _take_idle(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                return connection
        return None

    async def opened(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                opened = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        except TimeoutError as error:
            raise ConnectionFailed(f"no connection within {CONNECT_SECONDS} seconds") from error
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(str(error)) from error
        return opened[1]

"""A connection that sends any bytes and reads HTTP/1.1 responses strictly.

    response := "HTTP/1.1" status reason CRLF (name ":" value CRLF)* CRLF body
    body     := Content-Length bytes | chunks | nothing (HEAD, 204, 304)

A response that is not exactly that raises Malformed.
"""

import asyncio
import re
from collections.abc import Callable
from typing import NamedTuple, cast

STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) [ -~]*")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([\t -~]*)")
CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})\r\n")
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
MOST_HEAD = 64 * 1024


class Malformed(ValueError):
    pass


class Reply(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    size: int
    """Bytes of the whole response."""

    @property
    def closes(self) -> bool:
        return self.headers.get(b"connection", b"").lower() == b"close"


def read_reply(data: bytes | bytearray, method: str) -> Reply | None:
    """The response at the beginning of the data; None where it is not complete."""
    start = len(INTERIM) if data.startswith(INTERIM) else 0
    end = data.find(b"\r\n\r\n", start)
    if end < 0:
        if len(data) > MOST_HEAD:
            raise Malformed(f"no end of the headers: {bytes(data[:100])!r}")
        return None
    status, headers = _read_head(bytes(data[start:end]))
    end += 4
    if method == "HEAD" or status in (204, 304):
        return Reply(status, headers, b"", end)
    if headers.get(b"transfer-encoding") == b"chunked":
        if b"content-length" in headers:
            raise Malformed("Content-Length and Transfer-Encoding in one response")
        return _read_chunks(data, end, status, headers)
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        raise Malformed(f"the response has no length: {sorted(headers)}")
    size = end + int(length)
    return None if len(data) < size else Reply(status, headers, bytes(data[end:size]), size)


def _read_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    status = STATUS.fullmatch(first)
    if status is None:
        raise Malformed(f"not a status line: {first[:100]!r}")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        header = HEADER.fullmatch(line)
        if header is None:
            raise Malformed(f"not a header: {line[:100]!r}")
        name = header[1].lower()
        if name in headers and name != b"vary":
            raise Malformed(f"two headers {name.decode()}")
        headers[name] = header[2]
    return int(status[1]), headers


def _read_chunks(data: bytes | bytearray, at: int, status: int, headers: dict[bytes, bytes]) -> Reply | None:
    pieces: list[bytes] = []
    while True:
        size = CHUNK.match(data, at)
        if size is None:
            if data.find(b"\r\n", at, at + 12) >= 0 or len(data) - at > 12:
                raise Malformed(f"not a chunk: {bytes(data[at : at + 40])!r}")
            return None
        begin, length = size.end(), int(size[1], 16)
        end = begin + length
        if len(data) < end + 2:
            return None
        if data[end : end + 2] != b"\r\n":
            raise Malformed(f"a chunk does not end: {bytes(data[end : end + 20])!r}")
        if not length:
            return Reply(status, headers, b"".join(pieces), end + 2)
        pieces.append(bytes(data[begin:end]))
        at = end + 2


def read_replies(data: bytes) -> tuple[list[Reply], bytes]:
    """All responses in the data, and what remains of an incomplete one."""
    replies: list[Reply] = []
    while data:
        reply = read_reply(data, "GET")
        if reply is None:
            break
        replies.append(reply)
        data = data[reply.size :]
    return replies, data


IsOver = Callable[[bytes], bool]
"""Whether what the server has sent is enough."""


class Connection(asyncio.Protocol):
    """One request at a time. `lost` is set when the server closes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._method = "GET"
        self._most: int | None = None
        self._waiting: asyncio.Future[Reply | None] | None = None
        self._over: asyncio.Future[bool] | None = None
        self._is_over: IsOver | None = None
        self._requests = 0
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._settle(None)
        if self._over is not None and not self._over.done():
            self._over.set_result(True)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._over is not None:
            self._look_for_end(self._over)
        if self._waiting is None or self._waiting.done():
            return
        try:
            reply = read_reply(self._buffer, self._method)
        except Malformed as error:
            self._waiting.set_exception(error)
            return
        if reply is not None:
            del self._buffer[: reply.size]
            self._settle(reply)
        elif self._most is not None and len(self._buffer) >= self._most:
            self._settle(None)

    def _settle(self, reply: Reply | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)

    @property
    def received(self) -> bytes:
        """Bytes that belong to no complete response."""
        return bytes(self._buffer)

    async def ask(self, data: bytes, method: str, seconds: float, most: int | None = None) -> Reply | None:
        """The response; None where the server closes before its end, or `most` bytes have come."""
        assert self._transport is not None
        self._requests += 1
        self._method, self._most = method, most
        waiting: asyncio.Future[Reply | None] = self._loop.create_future()
        self._waiting = waiting
        if self.is_lost:
            return None
        self._transport.write(data)
        if most == 0:
            return None
        timer = self._loop.call_later(seconds, _time_out, waiting)
        try:
            return await waiting
        finally:
            timer.cancel()
            self._waiting = None

    @property
    def is_reused(self) -> bool:
        return self._requests > 1

    async def read_until_over(self, seconds: float, is_over: "IsOver | None") -> bool:
        """Until the server closes, or what it has sent is enough. False: neither happens in time."""
        self._over, self._is_over = self._loop.create_future(), is_over
        if self.is_lost:
            return True
        self._look_for_end(self._over)
        timer = self._loop.call_later(seconds, _give_up, self._over)
        try:
            return await self._over
        finally:
            timer.cancel()

    def _look_for_end(self, over: "asyncio.Future[bool]") -> None:
        if self._is_over is None or over.done():
            return
        try:
            is_over = self._is_over(self.received)
        except Malformed:
            is_over = True
        if is_over:
            over.set_result(True)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self.is_lost:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.is_lost = True


def _give_up(over: "asyncio.Future[bool]") -> None:
    if not over.done():
        over.set_result(False)


def _time_out(waiting: "asyncio.Future[Reply | None]") -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection

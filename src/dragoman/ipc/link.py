"""Messages on one end of a socket pair.

Rules
1. What is sent in one turn of the event loop leaves in one write.
2. Messages are handed over in the order in which they came, by plain calls.
3. The end of the other side is told once.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from dragoman.ipc.worker_messages import HEADER

DRAIN_SECONDS = 0.01
Take = Callable[[memoryview], None]


class Link(asyncio.Protocol):
    """`take` is given the body of every message, `lost` is called when there will be no more."""

    def __init__(self, take: Take, lost: Callable[[], None]) -> None:
        self._take = take
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._needed = HEADER.size
        self._pieces: list[bytes] = []
        self._size = 0
        self._outbox: list[bytes] = []

    async def connect(self, end: socket.socket) -> None:
        end.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        # A large message comes in many pieces, which are put together once.
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        whole = data if len(self._pieces) == 1 else b"".join(self._pieces)
        at = self._handed_out(memoryview(whole))
        self._pieces = [whole[at:]] if at < len(whole) else []
        self._size = len(whole) - at

    def _handed_out(self, data: memoryview) -> int:
        """How much of it was messages."""
        at, end, header = 0, len(data), HEADER.size
        while True:
            self._needed = header
            if end - at < header:
                return at
            (length,) = HEADER.unpack_from(data, at)
            self._needed = header + length
            if end - at < self._needed:
                return at
            body = data[at + header : at + self._needed]
            at += self._needed
            self._take(body)

    def send(self, encoded: bytes) -> None:
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(encoded)

    def flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outbox))

    def close(self) -> None:
        """At once: the other side has gone, or is to go."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Until the other side has everything."""
        self.flush()
        while self.unsent:  # noqa: ASYNC110 (once, at the end)
            await asyncio.sleep(DRAIN_SECONDS)

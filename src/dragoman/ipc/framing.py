"""Sends and receives length-prefixed messages on a connection.

    frame = length (4 bytes, little endian), body (one message in MessagePack)

Rules
1. Messages sent in one turn of the event loop leave in one write.
2. Messages are delivered in order, by direct calls.
3. The end of the connection is reported once. After `close`, nothing is delivered.
4. `writable` is cleared while the other side reads too slowly. Then senders of large amounts should wait.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import BinaryIO, cast

import msgspec

HEADER = struct.Struct("<I")
DRAIN_SECONDS = 0.01

encode_body = msgspec.msgpack.Encoder().encode


def encode(message: msgspec.Struct) -> bytes:
    body = encode_body(message)
    return HEADER.pack(len(body)) + body


def read_body(source: BinaryIO) -> bytes | None:
    """Wait for the next message and return its body; None at the end of the connection."""
    try:
        header = source.read(HEADER.size)
        if len(header) == HEADER.size:
            (length,) = HEADER.unpack(header)
            body = source.read(length)
            return body if len(body) == length else None
    except ConnectionResetError:
        # The other process died with unread messages.
        pass
    return None


class MessageConnection(asyncio.Protocol):
    """Calls `on_message` with the body of each message and `on_lost` when the connection ends."""

    def __init__(self, on_message: Callable[[memoryview], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self._needed = HEADER.size
        self._chunks: list[bytes] = []
        self._size = 0
        self._outbox: list[bytes] = []
        self.writable = asyncio.Event()
        self.writable.set()

    async def connect(self, end: socket.socket) -> None:
        end.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.writable.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        # The chunks of a large message are joined once.
        self._chunks.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        whole = data if len(self._chunks) == 1 else b"".join(self._chunks)
        consumed = self._deliver(memoryview(whole))
        self._chunks = [whole[consumed:]] if consumed < len(whole) else []
        self._size = len(whole) - consumed

    def _deliver(self, data: memoryview) -> int:
        """Deliver the complete messages and return their length in bytes."""
        at, end, header = 0, len(data), HEADER.size
        while not self._is_closed:
            self._needed = header
            if end - at < header:
                return at
            (length,) = HEADER.unpack_from(data, at)
            self._needed = header + length
            if end - at < self._needed:
                return at
            body = data[at + header : at + self._needed]
            at += self._needed
            self._on_message(body)
        return end

    def send(self, encoded: bytes) -> None:
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(encoded)

    def flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outbox))

    def close(self) -> None:
        """Close at once and discard unsent messages."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Wait until the other side has read everything."""
        self.flush()
        while self.unsent:  # noqa: ASYNC110 (called once, at the end)
            await asyncio.sleep(DRAIN_SECONDS)

"""Frames of WebSockets as bytes, also invalid ones."""

import struct

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
"""Opcodes."""
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
HANDSHAKE = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY
"""The headers of a request that opens a WebSocket."""


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, mask: bytes | None = b"mask", rsv: int = 0) -> bytes:
    """A frame of a client. `mask` has four bytes; a client must send one."""
    first, length = fin << 7 | rsv << 4 | opcode, len(payload)
    is_masked = (mask is not None) << 7
    if length < 126:
        head = struct.pack("!BB", first, is_masked | length)
    elif length < 65536:
        head = struct.pack("!BBH", first, is_masked | 126, length)
    else:
        head = struct.pack("!BBQ", first, is_masked | 127, length)
    if mask is None:
        return head + payload
    key = (mask * (length // 4 + 1))[:length]
    return head + mask + (int.from_bytes(payload) ^ int.from_bytes(key)).to_bytes(length)


def fragmented(payload: bytes, size: int, opcode: int = TEXT) -> list[bytes]:
    """The frames of a message in fragments of this size."""
    pieces = [payload[at : at + size] for at in range(0, len(payload), size)] or [b""]
    last = len(pieces) - 1
    return [frame(CONTINUATION if at else opcode, piece, fin=at == last) for at, piece in enumerate(pieces)]


def read_frame(data: bytes | bytearray, at: int = 0) -> tuple[int, bytes, int] | None:
    """The opcode and the payload of a server's frame, and where it ends; None if it is incomplete. Raises a ValueError:
    a server sends whole, unmasked frames."""
    if len(data) < at + 2:
        return None
    first, size = data[at], data[at + 1]
    if first & 0xF0 != 0x80 or size > 127:
        raise ValueError(f"not a frame of a server: {bytes(data[at : at + 20])!r}")
    begin = at + 2
    if size > 125:
        count = 2 if size == 126 else 8
        size, begin = int.from_bytes(data[begin : begin + count]), begin + count
    end = begin + size
    return None if len(data) < end else (first & 15, bytes(data[begin:end]), end)

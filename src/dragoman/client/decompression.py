"""Decompresses response bodies in pieces of bounded size.

httpx decompresses each received chunk as a whole, a thousandfold for gzip, and a chunk may have a megabyte.

Rules
1. No piece has more than MAX_PIECE_BYTES, so the reader can stop at its own limit.
2. Only what was requested (ACCEPT_ENCODING) is decompressed. An unknown encoding is passed on unchanged: some servers
   name what is not a compression.
3. A body that is compressed twice is an error.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping

import httpx

ACCEPT_ENCODING = "gzip, deflate"
ENCODINGS = ("gzip", "x-gzip", "deflate")
MAX_PIECE_BYTES = 16 * 1024
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32

Decompress = Callable[[bytes], Iterator[bytes]]


def decompressor(headers: Mapping[str, str]) -> Decompress | None:
    """Return a function for the chunks of a body, or None if the body is not compressed."""
    encodings = headers.get("content-encoding", "").lower().split(",")
    layers = sum(name.strip() in ENCODINGS for name in encodings)
    return _Decompressor(layers).feed if layers else None


class _Decompressor:
    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)
        self._is_at_start = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._layers > 1:
            raise httpx.DecodingError("the body is compressed more than once")
        while data and not self._zlib.eof:
            try:
                piece = self._zlib.decompress(data, MAX_PIECE_BYTES)
            except zlib.error as error:
                if not self._is_at_start:
                    raise httpx.DecodingError(str(error)) from error
                # Some servers send deflate without the header of zlib.
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
                piece = b""
            else:
                data = self._zlib.unconsumed_tail
            self._is_at_start = False
            if piece:
                yield piece

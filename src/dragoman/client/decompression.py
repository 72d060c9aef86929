"""Answers that were compressed on the way: a little at a time, so that a small answer cannot become a huge one at once.

Rules
1. No piece that comes out has more than MOST_PIECE bytes, whatever went in; whoever has enough asks for no more.
2. Only what was asked for (ASKED) is unpacked. Other words are taken as they come: some servers name things that are no
   compression.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce

import httpx

ASKED = "gzip, deflate"
MOST_PIECE = 16 * 1024

Unpack = Callable[[bytes], Iterator[bytes]]


def unpacker(headers: Mapping[str, str]) -> Unpack | None:
    """What makes pieces of an answer of what came of it; None where that is the same. Names are in lower case."""
    words = [word.strip().lower() for word in headers.get("content-encoding", "").split(",")]
    layers = [_LAYERS[word]() for word in reversed(words) if word in _LAYERS]
    if not layers:
        return None
    return lambda data: reduce(lambda pieces, layer: _through(layer, pieces), layers, iter((data,)))


class _Layer:
    """`bits` is what zlib knows a format by."""

    def __init__(self, bits: int) -> None:
        self._zlib = zlib.decompressobj(bits)

    def __call__(self, data: bytes) -> Iterator[bytes]:
        while data and not self._zlib.eof:
            piece = self._piece(data)
            data = self._zlib.unconsumed_tail
            if piece:
                yield piece

    def _piece(self, data: bytes) -> bytes:
        try:
            return self._zlib.decompress(data, MOST_PIECE)
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from error


class _Deflate(_Layer):
    """With zlib's head, as the standard says, or without, as some understood it."""

    def __init__(self) -> None:
        super().__init__(zlib.MAX_WBITS)
        self._begun = False

    def _piece(self, data: bytes) -> bytes:
        begun, self._begun = self._begun, True
        try:
            return super()._piece(data)
        except httpx.DecodingError:
            if begun:
                raise
            self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
            return super()._piece(data)


def _through(layer: _Layer, pieces: Iterable[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        yield from layer(piece)


_LAYERS: dict[str, Callable[[], _Layer]] = {
    "gzip": lambda: _Layer(zlib.MAX_WBITS | 16),
    "x-gzip": lambda: _Layer(zlib.MAX_WBITS | 16),
    "deflate": _Deflate,
}

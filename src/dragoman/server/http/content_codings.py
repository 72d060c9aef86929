"""Decompresses request bodies.

    Content-Encoding := coding ("," coding)*      in the order in which they were applied
    coding           := "zstd" | "br" | "gzip" | "x-gzip" | "deflate" | "identity"

Rules
1. At most `MAX_CODINGS` codings; `identity` does not count. An unknown one is refused with the list of the known ones.
2. Every coding is decoded in small steps, up to the size limit and up to `MAX_RATIO` times the compressed size.
3. One coding is one stream, and nothing follows it: gzip has one member, zstd one frame.
4. The memory of a decoder is bounded: windows of at most 8 MiB for zstd (RFC 9659) and 16 MiB for brotli.
5. deflate is accepted with and without the header of zlib: some clients omit it.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial

import brotli
import zstandard

from dragoman.core.choices import list_choices
from dragoman.core.errors import BadRequest, TooLarge, UnsupportedMedia, quote
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.server.http.bodies import run_in_body_thread

MAX_CODINGS = 2
MAX_RATIO = 200
FREE_BYTES = 1024 * 1024
"""Up to this size, any ratio is accepted."""
SMALL_BODY = 64 * 1024
"""Compressed bodies of this size are first decoded on the event loop, up to `LARGE_BODY`."""
STEP_BYTES = 64 * 1024
MAX_ZSTD_WINDOW = 8 * 1024 * 1024
ZSTD_EXPANSION = 32 * 1024
"""Bytes that one byte of zstd can expand to: a block of 128 KiB takes at least four bytes."""
GZIP_FORMAT, ZLIB_FORMAT, RAW_FORMAT = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS

Decoder = Callable[[bytes, int], Iterator[bytes]]
"""Yields the decoded pieces of a body that may have about so many bytes."""


class _InvalidStreamError(Exception):
    """A stream is damaged, too short, or followed by other data."""


@lru_cache(maxsize=64)
def parse_codings(header: bytes) -> tuple[str, ...]:
    """The codings of a Content-Encoding header, in the order in which they must be decoded."""
    names = [name.strip().lower() for name in header.decode("latin-1").split(",")]
    codings = [name for name in names if name not in ("", "identity")]
    for name in codings:
        if name not in ALL_DECODERS:
            known = list_choices([*STANDARD_DECODERS])
            raise UnsupportedMedia(f"content-encoding: unknown coding {quote(name)}; expected {known}")
    if len(codings) > MAX_CODINGS:
        raise UnsupportedMedia(f"content-encoding: at most {MAX_CODINGS} codings can be combined")
    return tuple(reversed(codings))


async def decompress_body(body: bytes, codings: tuple[str, ...], limit: int) -> bytes:
    """Decode a body of at most `limit` bytes; a large one in a thread."""
    if len(body) <= SMALL_BODY:
        with suppress(TooLarge):
            return decompress(body, codings, min(limit, LARGE_BODY))
    return await run_in_body_thread(partial(decompress, body, codings, limit))


def decompress(body: bytes, codings: tuple[str, ...], limit: int) -> bytes:
    for coding in codings:
        try:
            body = _decode(coding, body, limit)
        except (_InvalidStreamError, zlib.error, brotli.error, zstandard.ZstdError) as error:
            reason = f": {error}" if isinstance(error, _InvalidStreamError) else ""
            raise BadRequest(f"content-encoding: the body is not valid {coding}{reason}") from error
    return body


def _decode(coding: str, body: bytes, limit: int) -> bytes:
    most = min(limit, max(FREE_BYTES, MAX_RATIO * len(body)))
    decoded = bytearray()
    for piece in ALL_DECODERS[coding](body, most):
        decoded += piece
        if len(decoded) > limit:
            raise TooLarge(f"the decompressed body is larger than {limit} bytes")
        if len(decoded) > most:
            raise TooLarge(
                f"the decompressed body is more than {MAX_RATIO} times larger than the compressed one; "
                "send it uncompressed"
            )
    return bytes(decoded)


def _decode_zlib(body: bytes, most: int, window_bits: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(window_bits)
    for start in range(0, len(body), STEP_BYTES):
        data = body[start : start + STEP_BYTES]
        is_pending = True
        while is_pending and not decoder.eof:
            piece = decoder.decompress(data, STEP_BYTES)
            yield piece
            data = decoder.unconsumed_tail
            is_pending = bool(data) or len(piece) == STEP_BYTES
        if decoder.eof:
            _check_end(not decoder.unused_data and start + STEP_BYTES >= len(body))
            return
    raise _InvalidStreamError("it is incomplete")


def _decode_deflate(body: bytes, most: int) -> Iterator[bytes]:
    has_header = len(body) > 1 and body[0] & 0x0F == zlib.DEFLATED and int.from_bytes(body[:2], "big") % 31 == 0
    return _decode_zlib(body, most, ZLIB_FORMAT if has_header else RAW_FORMAT)


def _decode_brotli(body: bytes, most: int) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    for start in range(0, len(body), STEP_BYTES):
        _check_end(not decoder.is_finished())
        piece = decoder.process(body[start : start + STEP_BYTES], output_buffer_limit=STEP_BYTES)
        while piece or not decoder.can_accept_more_data():
            yield piece
            piece = decoder.process(b"", output_buffer_limit=STEP_BYTES)
    if not decoder.is_finished():
        raise _InvalidStreamError("it is incomplete")


def _decode_zstd(body: bytes, most: int) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).decompressobj()
    at = produced = 0
    while at < len(body) and not decoder.eof:
        # The decoder returns all that its input expands to, so the input is limited.
        end = at + max(1, (most - produced) // ZSTD_EXPANSION)
        piece = decoder.decompress(body[at:end])
        yield piece
        at, produced = end, produced + len(piece)
    if not decoder.eof:
        raise _InvalidStreamError("it is incomplete")
    _check_end(not decoder.unused_data and at >= len(body))


def _check_end(is_end: bool) -> None:
    if not is_end:
        raise _InvalidStreamError("other data follows its end")


STANDARD_DECODERS: dict[str, Decoder] = {
    "zstd": _decode_zstd,
    "br": _decode_brotli,
    "gzip": partial(_decode_zlib, window_bits=GZIP_FORMAT),
    "deflate": _decode_deflate,
}
ALL_DECODERS = STANDARD_DECODERS | {"x-gzip": STANDARD_DECODERS["gzip"]}
ACCEPT_ENCODING = ", ".join(STANDARD_DECODERS).encode()
"""The value of the Accept-Encoding header of a refusal."""

"""Compresses the body of a request: as it should be, damaged, or so that it expands beyond every limit."""

import functools
import gzip
import zlib
from collections.abc import Callable
from random import Random

import brotli
import msgspec
import zstandard

from tools.fuzz import values
from tools.fuzz.cases import ANY, Request
from tools.fuzz.servers import BODY_BYTES

CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.compress,
    "br": functools.partial(brotli.compress, quality=4),
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}
UNKNOWN = ("x", "gzip, x", "compress", "gzip;q=0", "br, br, br", "*")


def compressed(random: Random, request: Request) -> Request:
    names = random.choices([*CODINGS], k=random.choice((1, 1, 1, 2)))
    kind = random.random()
    if kind < 0.1:
        return _with_coding(request, random.choice(UNKNOWN), request.body, frozenset({415}))
    if kind < 0.2:
        return _with_coding(request, ", ".join(names), _bomb(tuple(names)), frozenset({413}))
    body = _compress(request.body, names)
    if kind < 0.3:
        return _with_coding(request, ", ".join(names), body[: random.randrange(len(body))], frozenset({400}))
    if kind < 0.4:
        # Not every byte matters, and zstd and brotli have no checksum here.
        return _with_coding(request, ", ".join(names), values.damage(random, body), ANY | request.expect)
    header = random.choice((", ".join, ",".join, " , ".join))(names)
    return _with_coding(request, random.choice((header, header.upper(), f"identity, {header}")), body, request.expect)


def _with_coding(request: Request, coding: str, body: bytes, expect: frozenset[int]) -> Request:
    stream = request.stream and expect == request.expect
    headers = (*request.headers, ("content-encoding", coding))
    return msgspec.structs.replace(request, headers=headers, body=body, expect=expect, stream=stream)


def _compress(body: bytes, names: list[str]) -> bytes:
    for name in names:
        body = CODINGS[name](body)
    return body


@functools.cache
def _bomb(names: tuple[str, ...]) -> bytes:
    return _compress(b" " * (BODY_BYTES * 64), list(names))

"""Parsing of requests without a socket: every case also arrives byte by byte."""

import pytest

from dragoman.core.errors import BadRequest, DragomanError, HeadersTooLarge, NotSupported
from dragoman.server.http.http1 import MAX_EMPTY_LINES, MAX_SMALL_CHUNKS, ChunkedBody, FixedBody, RequestHead

LIMIT = 200
REST = b"GET /next HTTP/1.1\r\n\r\n"


def feed(reader: RequestHead, data: bytes, step: int) -> bytes:
    """Feed the data in pieces of `step` bytes; returns what follows the head."""
    for at in range(0, len(data), step):
        rest = reader.feed(data[at : at + step])
        if reader.is_complete:
            return rest + data[at + step :]
    return b""


STEPS = pytest.mark.parametrize("step", [1, 2, 3, 7, 10_000])


@STEPS
@pytest.mark.parametrize("rest", [b"", REST, b"\x00anything"])
@pytest.mark.parametrize("before", [b"", b"\r\n", b"\r\n\r\n\n"])
def test_head_ends_at_its_empty_line(before: bytes, rest: bytes, step: int) -> None:
    head = RequestHead(LIMIT)
    data = b"POST /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\nExpect: 100-Continue\r\n\r\n"
    assert feed(head, before + data + rest, step) == rest
    assert head.is_complete
    assert (head.method, head.url, head.version) == ("POST", b"/a?b", "1.1")
    assert head.headers == [(b"host", b"x"), (b"content-length", b"7"), (b"expect", b"100-Continue")]
    assert (head.content_length, head.is_chunked, head.expects_continue, head.keep_alive) == (7, False, True, True)


UPGRADES = {
    "Connection": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n",
    "Proxy-Connection": b"GET / HTTP/1.1\r\nProxy-Connection: upgrade\r\nUpgrade: x\r\n",
    "several lines": b"GET / HTTP/1.1\r\nConnection: keep-alive\r\nConnection: a, Upgrade\r\nUpgrade: x\r\n",
    "with a length": b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nContent-Length: 3\r\n",
    "with chunks": b"POST / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: chunked\r\n",
    "HTTP/1.0": b"GET / HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: x\r\n",
}


@STEPS
@pytest.mark.parametrize("data", UPGRADES.values(), ids=UPGRADES.keys())
def test_upgrade_is_an_ordinary_head(data: bytes, step: int) -> None:
    head = RequestHead(LIMIT)
    assert feed(head, data + b"\r\n" + REST, step) == REST
    assert head.is_complete


REFUSED: dict[str, tuple[bytes, type[DragomanError]]] = {
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", BadRequest),
    "endless empty lines": (b"\r\n" * MAX_EMPTY_LINES, BadRequest),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\n", BadRequest),
    "HTTP/0.9": (b"GET /\r\n\r\n", BadRequest),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\n\r\n", BadRequest),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: x\n\n", BadRequest),
    "bare line feed at the end": (b"GET / HTTP/1.1\r\nHost: x\r\n\n", BadRequest),
    "folded line": (b"GET / HTTP/1.1\r\nConnection:\r\n upgrade\r\nUpgrade: x\r\n\r\n", BadRequest),
    "too long": (b"GET / HTTP/1.1\r\nX: " + b"a" * LIMIT + b"\r\n\r\n", HeadersTooLarge),
    "too long, without an end": (b"GET / HTTP/1.1\r\nX: " + b"a" * LIMIT, HeadersTooLarge),
    "gzip": (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", NotSupported),
    "gzip in a line of its own": (
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        NotSupported,
    ),
    "chunked twice": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", BadRequest),
    "chunked not last": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", BadRequest),
    "identity": (b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", BadRequest),
    "chunked with a parameter": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked;a=b\r\n\r\n", BadRequest),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", BadRequest),
    "chunked and a length": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", BadRequest),
}


@STEPS
@pytest.mark.parametrize(("data", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_head(data: bytes, error: type[DragomanError], step: int) -> None:
    with pytest.raises(error):
        feed(RequestHead(LIMIT), data, step)


def read(body: FixedBody | ChunkedBody, data: bytes, step: int) -> tuple[bytes, bytes | None]:
    content = b""
    for at in range(0, len(data), step):
        piece, rest = body.feed(data[at : at + step])
        content += piece
        if rest is not None:
            return content, rest + data[at + step :]
    return content, None


@STEPS
def test_body_of_known_length(step: int) -> None:
    assert read(FixedBody(5), b"hello" + REST, step) == (b"hello", REST)
    assert read(FixedBody(5), b"hello", step) == (b"hello", b"")
    assert read(FixedBody(5), b"hell", step) == (b"hell", None)


CHUNKED = {
    "plain": b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n",
    "extensions": b"5;a=b\r\nhello\r\n006 ; c\r\n world\r\n0;last\r\n\r\n",
    "trailers": b"b\r\nhello world\r\n0\r\nAuthorization: Bearer x\r\nContent-Length: 5\r\n\r\n",
    "single bytes": b"".join(b"1\r\n%c\r\n" % byte for byte in b"hello world") + b"00\r\n\r\n",
}


@STEPS
@pytest.mark.parametrize("data", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunks(data: bytes, step: int) -> None:
    assert read(ChunkedBody(LIMIT), data + REST, step) == (b"hello world", REST)
    assert read(ChunkedBody(LIMIT), data[:-1], step) == (b"hello world", None)


BAD_CHUNKS: dict[str, tuple[bytes, type[DragomanError]]] = {
    "size in words": (b"zz\r\nhello\r\n", BadRequest),
    "no size": (b"\r\nhello\r\n", BadRequest),
    "negative size": (b"-5\r\nhello\r\n", BadRequest),
    "hexadecimal prefix": (b"0x5\r\nhello\r\n", BadRequest),
    "size of 17 digits": (b"0" * 16 + b"5\r\nhello\r\n", BadRequest),
    "size with a bare line feed": (b"5\nhello\r\n", BadRequest),
    "carriage return in an extension": (b"5;a\rb\r\nhello\r\n", BadRequest),
    "space before the size": (b" 5\r\nhello\r\n", BadRequest),
    "longer than its size": (b"2\r\nhello\r\n0\r\n\r\n", BadRequest),
    "trailer without a colon": (b"0\r\nhello\r\n\r\n", BadRequest),
    "trailer with a bare line feed": (b"0\r\na: b\n\r\n", BadRequest),
    "endless size line": (b"5" * (LIMIT + 100), HeadersTooLarge),
    "endless extension": (b"5;" + b"a" * (LIMIT + 100), HeadersTooLarge),
    "endless extensions": ((b"1;" + b"a" * 50 + b"\r\nx\r\n") * 20, HeadersTooLarge),
    "endless trailer": (b"0\r\na: " + b"b" * (LIMIT + 100), HeadersTooLarge),
    "endless trailers": (b"0\r\n" + b"x: y\r\n" * LIMIT, HeadersTooLarge),
}


def test_too_many_small_chunks() -> None:
    body = ChunkedBody(LIMIT)
    assert body.feed(b"1\r\nx\r\n" * MAX_SMALL_CHUNKS)[1] is None
    assert body.feed(b"41\r\n" + b"x" * 0x41 + b"\r\n")[1] is None
    with pytest.raises(BadRequest, match="too many small chunks"):
        body.feed(b"1\r\nx\r\n")


@STEPS
@pytest.mark.parametrize(("data", "error"), BAD_CHUNKS.values(), ids=BAD_CHUNKS.keys())
def test_refused_chunks(data: bytes, error: type[DragomanError], step: int) -> None:
    with pytest.raises(error):
        read(ChunkedBody(LIMIT), data, step)

"""Target `http`: raw bytes on a connection.

    known    requests in a form whose answer is known: chunked, in pieces, pipelined, with Expect, with an upgrade
    wrong    requests that must be refused, and the connection closed
    damaged  any of them with bytes changed; whatever comes back must be whole responses with documented statuses

Most cases end with a request that asks for the connection to be closed, so that the end of the answers is known.
"""

from random import Random

from tools.fuzz import bodies, values
from tools.fuzz.cases import OK, RawCase, random_for
from tools.fuzz.servers import HEADER_BYTES, KEYS
from tools.websocket import HANDSHAKE

LAST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
KEY = b"authorization: Bearer " + KEYS[0].encode()
BAD = frozenset({400})

WRONG: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nbad name: x\r\n\r\n",
    b"GET /\x01 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    b"\x00" * 50,
    b"hello there\r\n\r\n",
)
SPLITTERS = (b"\r\n", b"\n", b"\r", b"\r\n ", b"\r\n\t", b"\x00", b"\x0b")
ODD_LINES = (
    *(
        b"connection: upgrade\r\nupgrade: h2c",
        b"proxy-connection: upgrade\r\nupgrade: x",
        b"connection: keep-alive, upgrade",
    ),
    *(b"connection: close, upgrade\r\nupgrade: websocket", b"upgrade: websocket", b"te: trailers", b"trailer: x"),
    *(b"expect: 100-continue", b"expect: x", b"transfer-encoding: gzip", b"transfer-encoding: chunked, chunked"),
    *(b"transfer-encoding: identity", b"transfer-encoding: \x0bchunked", b"content-length: 0", b"content-length: +1"),
    *(b"content-length: 99999999999999999999999", b"content-length: 0x10", b"host: 127.0.0.1", b"host: evil.example"),
    *(
        b"x-forwarded-for: 1.2.3.4\r\nx-forwarded-for: 5.6.7.8",
        b"keep-alive: timeout=-1",
        b"range: bytes=0-",
        b"cookie: a",
    ),
    *(
        b"connection: close",
        b"connection: ,,,",
        b"connection:",
        b"http2-settings: AAMAAABk",
        b"origin: null",
        b": x",
        b"a",
    ),
)


def _head(method: bytes, path: bytes, *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"\r\n".join((b"%b %b %b" % (method, path, version), b"host: 127.0.0.1", KEY, *lines)) + b"\r\n\r\n"


def _chat(random: Random) -> bytes:
    body = {"model": "poet", "messages": [{"role": "user", "content": bodies.words(random)}], "max_tokens": 2}
    if random.random() < 0.3:
        body["stream"] = True
    return values.encoded(body)


def _chunks(random: Random, body: bytes) -> bytes:
    made, at = b"", 0
    while at < len(body):
        piece = body[at : at + random.choice((1, 7, 40, 1000))]
        extension = random.choice((b"", b"", b";a=b", b";x"))
        made += b"%x%b\r\n%b\r\n" % (len(piece), extension, piece)
        at += len(piece)
    trailers = random.choice((b"", b"", b"x: y\r\n", b"x: y\r\n" * 20))
    return made + b"0\r\n" + trailers + b"\r\n"


def _post(random: Random, *lines: bytes) -> bytes:
    """A valid request, with a length or in chunks."""
    body = _chat(random)
    content = b"content-type: application/json"
    if random.random() < 0.5:
        return _head(b"POST", b"/v1/chat/completions", content, b"content-length: %d" % len(body), *lines) + body
    chunked = _chunks(random, body)
    return _head(b"POST", b"/v1/chat/completions", content, b"transfer-encoding: chunked", *lines) + chunked


def _request(random: Random) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return _head(b"GET", random.choice((b"/health", b"/v1/models", b"/", b"/v1/models?limit=1")))
    if kind == 1:
        return _post(random, random.choice((b"x: y", b"expect: 100-continue", b"accept: */*")))
    return _post(random)


def _pieces(random: Random, data: bytes) -> tuple[bytes, ...]:
    if random.random() < 0.6 or len(data) < 2:
        return (data,)
    cuts = sorted(random.randrange(1, len(data)) for _ in range(random.choice((1, 2, 5))))
    return tuple(data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True))


def case(engine: str, seed: str, number: int) -> RawCase:
    random = random_for("http", seed, number)
    kind = random.random()
    pause = 0.001 if random.random() < 0.5 else 0.0
    if kind < 0.35:
        count = random.choice((1, 1, 2, 3))
        data = b"".join(_request(random) for _ in range(count)) + LAST
        return RawCase(_pieces(random, data), (OK,) * (count + 1), pause)
    if kind < 0.45:
        path = random.choice((b"/health", b"/v1/models", b"/v1/chat/completions", b"/v1/responses/resp_x"))
        socket = _head(b"GET", path, HANDSHAKE)
        return RawCase(_pieces(random, socket + LAST), (frozenset({426}), OK), pause)
    if kind < 0.6:
        return RawCase((random.choice(WRONG),), (BAD,), pause)
    if kind < 0.63:
        large = _head(b"GET", b"/health", b"x: " + b"a" * random.choice((HEADER_BYTES, HEADER_BYTES * 4)))
        return RawCase((large,), (frozenset({431}),) if len(large) < 2 * HEADER_BYTES else None)
    return _damaged(random, pause)


def _damaged(random: Random, pause: float) -> RawCase:
    kind = random.randrange(5)
    data = b"".join(_request(random) for _ in range(random.choice((1, 1, 2))))
    if kind == 0:
        data = values.damage(random, data)
    elif kind == 1:
        # Only the head: a body that is damaged is mostly a 400 of its JSON.
        head, _, body = data.partition(b"\r\n\r\n")
        data = values.damage(random, head) + b"\r\n\r\n" + body
    elif kind == 2:
        head, _, body = data.partition(b"\r\n\r\n")
        odd = random.sample(ODD_LINES, k=random.randint(1, 3))
        data = b"\r\n".join((head, *odd)) + b"\r\n\r\n" + body
    elif kind == 3:
        splitter = random.choice(SPLITTERS)
        data = data.replace(b"\r\n", splitter, random.choice((1, 3, -1)))
    else:
        data = _post(random) + random.randbytes(random.choice((1, 10, 100)))
    ends = random.random()
    if ends < 0.25:
        return RawCase(_pieces(random, data[: random.randrange(len(data) + 1)]), None, pause, leave=True)
    if ends < 0.3:
        data = data[: random.randrange(len(data) + 1)]
    return RawCase(_pieces(random, data + LAST), None, pause)

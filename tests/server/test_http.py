"""HTTP as no library sends it, and clients that leave, dawdle or do not read."""

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.talking import (
    CHAT,
    COMPLETIONS,
    JSON_BODY,
    SMALLEST,
    ask,
    connect,
    eventually,
    raw,
    read,
    recorded,
    refused,
    request_bytes,
    sent,
    talking,
    text_of,
)
from tests.serving import Running, serving

ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
HOST = b"Host: localhost\r\n"
HEADER_BYTES = 4096
BODY_BYTES = 4 * 1024 * 1024


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose limits are near. Every model has one slot, and one more request may wait."""
    config = {
        "models": {
            "echo": {"engine": "scripted", "slots": 1, "chunk": 1000},
            "slow": {"engine": "scripted", "slots": 1, "tokens_per_second": 20, "replies": [{"output": "tick" * 400}]},
            "slow-to-start": {"engine": "scripted", "slots": 1, "prefill_seconds": 1.5},
            "in-worker": {
                "engine": "scripted",
                "slots": 1,
                "tokens_per_second": 20,
                "crash_after": 100_000,
                "replies": [{"output": "tick" * 400}],
            },
        },
        "limits": {
            "header_bytes": HEADER_BYTES,
            "body_bytes": BODY_BYTES,
            "body_seconds": 1,
            "write_seconds": 1,
            "queue": 1,
        },
    }
    with serving(tmp_path_factory.mktemp("tight"), config) as running:
        yield running


@pytest.fixture(autouse=True)
def served_afterwards(tight: Running) -> Iterator[None]:
    yield
    with talking(tight) as client:
        assert text_of(ask(client, CHAT)) == "hello"


def head(path: str, *lines: bytes) -> bytes:
    """The head of a JSON request, without what says where its body ends."""
    given = b"".join(line + b"\r\n" for line in lines)
    return b"POST " + path.encode() + b" HTTP/1.1\r\nContent-Type: application/json\r\n" + given + b"\r\n"


SMALL = json.dumps(SMALLEST[CHAT]).encode()

MALFORMED = {
    "not HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"WISH / HTTP/1.1\r\n" + HOST + b"\r\n",
    "path that is not ASCII": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "header without a colon": b"GET / HTTP/1.1\r\n" + HOST + b"broken\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length : 0\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "Host of somebody else": b"GET /v1/models HTTP/1.1\r\nHost: attacker.example\r\n\r\n",
    "Host with a path": b"GET / HTTP/1.1\r\nHost: localhost/evil\r\n\r\n",
    "Host with a user": b"GET / HTTP/1.1\r\nHost: localhost@evil\r\n\r\n",
    "Host with spaces": b"GET / HTTP/1.1\r\nHost: local host\r\n\r\n",
    "second Host": b"GET / HTTP/1.1\r\n" + HOST + b"Host: attacker.example\r\n\r\n",
    "two lengths": head(CHAT, b"Host: localhost", b"Content-Length: 5", b"Content-Length: 6") + b"hello!",
    "negative length": head(CHAT, b"Host: localhost", b"Content-Length: -1"),
    "length in words": head(CHAT, b"Host: localhost", b"Content-Length: five") + b"hello",
    "huge length": head(CHAT, b"Host: localhost", b"Content-Length: " + b"9" * 30) + b"hello",
    "length and chunks": head(CHAT, b"Host: localhost", b"Content-Length: 4", b"Transfer-Encoding: chunked")
    + b"0\r\n\r\n",
    "chunks and length": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked", b"Content-Length: 4")
    + b"0\r\n\r\n",
    "unknown transfer": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked, magic") + b"0\r\n\r\n",
    "chunk size in words": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked") + b"zz\r\nhello\r\n0\r\n\r\n",
    "negative chunk size": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked") + b"-5\r\nhello\r\n0\r\n\r\n",
    "huge chunk size": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked") + b"f" * 20 + b"\r\nhello\r\n",
    "chunk longer than said": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked")
    + b"2\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_request_is_a_400_and_the_connection_is_closed(tight: Running, data: bytes) -> None:
    answer = raw(tight, data)
    refused(answer.response, 400)
    assert answer.closed
    [record] = recorded(tight, id=answer.response.headers["x-request-id"])
    assert record["status"] == 400


def test_pipelined_requests_are_answered_in_order(tight: Running) -> None:
    one = request_bytes(COMPLETIONS, {"prompt": "one"})
    two = request_bytes(COMPLETIONS, {"prompt": "two"}, "Connection: close")
    answer = raw(tight, one + two)
    assert answer.closed
    assert answer.body.count(b"HTTP/1.1 200 OK") == 1
    assert answer.body.index(b'"one"') < answer.body.index(b'"two"')


def test_garbage_behind_a_running_stream_ends_the_connection_without_a_word(tight: Running) -> None:
    with sent(tight, CHAT, model="slow", stream=True) as sock:
        sock.recv(1)
        sock.sendall(b"\x00garbage\r\n\r\n")
        answer = read(sock)
    assert answer.closed
    assert b"400" not in answer.body
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["ended", "never ended"])
@pytest.mark.parametrize("size", [HEADER_BYTES + 1, 64 * 1024, 1024 * 1024])
def test_headers_too_large(tight: Running, size: int, end: bytes) -> None:
    answer = raw(tight, b"GET / HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * size + end)
    refused(answer.response, 431, code="headers_too_large")
    assert answer.closed


def test_many_small_headers_and_a_long_path_are_too_large_as_well(tight: Running) -> None:
    many = b"".join(b"X-%d: a\r\n" % at for at in range(1000))
    refused(raw(tight, b"GET / HTTP/1.1\r\n" + HOST + many + b"\r\n").response, 431)
    refused(raw(tight, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n").response, 431)
    with connect(tight) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + HOST)
        for at in range(HEADER_BYTES // 110 + 1):
            sock.sendall(b"X-%03d: " % at + b"a" * 100 + b"\r\n")
            time.sleep(0.001)
        refused(read(sock).response, 431)


def test_headers_of_each_request_of_a_connection_are_counted_anew(tight: Running) -> None:
    with talking(tight, {"x-long": "a" * (HEADER_BYTES - 1000)}) as client:
        for _ in range(5):
            assert text_of(ask(client, COMPLETIONS, prompt="word " * 2000)) == "word " * 2000
        refused(client.get("/health", headers={"x-long": "a" * HEADER_BYTES}), 431)


@ROUTES
def test_body_too_large_by_its_length(tight: Running, path: str) -> None:
    with talking(tight) as client:
        response = client.post(path, content=b" " * (BODY_BYTES + 1), headers=JSON_BODY)
        refused(response, 413, code="request_too_large")
        assert response.headers["connection"] == "close"
    answer = raw(tight, head(path, b"Host: localhost", b"Content-Length: %d" % (BODY_BYTES + 1)))
    refused(answer.response, 413)
    assert answer.closed


@ROUTES
def test_body_too_large_in_chunks(tight: Running, path: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(BODY_BYTES // 65536 + 2):
            yield b" " * 65536

    with talking(tight) as client:
        refused(client.post(path, content=chunks(), headers=JSON_BODY), 413, code="request_too_large")


def test_the_largest_body_is_taken(tight: Running) -> None:
    content = SMALL + b" " * (BODY_BYTES - len(SMALL))
    with talking(tight) as client:
        assert text_of(client.post(CHAT, content=content, headers=JSON_BODY)) == "hello"
        assert text_of(client.post(CHAT, content=iter([content[:9], content[9:]]), headers=JSON_BODY)) == "hello"


def test_thirty_three_megabytes(scripted: Running) -> None:
    with talking(scripted) as client:
        refused(client.post(CHAT, content=b" " * (33 * 1024 * 1024), headers=JSON_BODY), 413)


@ROUTES
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x"])
def test_compressed_body(tight: Running, path: str, coding: str) -> None:
    with talking(tight) as client:
        response = client.post(
            path, content=b"\x1f\x8b" + b"\x00" * 1000, headers=JSON_BODY | {"content-encoding": coding}
        )
        refused(response, 415)


def dribble(running: Running, first: bytes, rest: bytes) -> tuple[httpx.Response, float]:
    """What is answered to a request whose end comes byte by byte, and after how long."""
    begun = time.monotonic()
    with connect(running) as sock:
        sock.sendall(first)
        sock.settimeout(0.1)
        for at in range(60):
            sock.sendall(rest[at % len(rest) :][:1])
            try:
                if sock.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        answer = read(sock)
    assert answer.closed
    return answer.response, time.monotonic() - begun


@ROUTES
def test_slow_body(tight: Running, path: str) -> None:
    response, seconds = dribble(tight, head(path, b"Host: localhost", b"Content-Length: 1000"), b" ")
    refused(response, 408, code="request_timeout")
    assert 0.9 < seconds < 3


def test_slow_headers(tight: Running) -> None:
    response, seconds = dribble(tight, b"GET / HTTP/1.1\r\n" + HOST + b"X-Slow: ", b"a")
    refused(response, 408, code="request_timeout")
    assert 0.9 < seconds < 3


def test_connection_without_a_request_is_closed_silently(tight: Running) -> None:
    answer = raw(tight, b"")
    assert answer.closed
    assert answer.head == b""


def test_quiet_connection_is_kept_for_the_next_request(tight: Running) -> None:
    with connect(tight) as sock:
        for _ in range(2):
            sock.sendall(b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n")
            answer = read(sock, 1.2)
            assert answer.status == 200
            assert not answer.closed


def test_full_queue(tight: Running) -> None:
    with sent(tight, CHAT, model="slow", stream=True) as running:
        running.recv(1)
        with sent(tight, CHAT, model="slow", max_tokens=1) as waiting, talking(tight) as client:
            time.sleep(0.2)
            response = ask(client, COMPLETIONS, model="slow")
            refused(response, 503, code="overloaded")
            assert int(response.headers["retry-after"]) >= 1
            assert text_of(ask(client, COMPLETIONS)) == "hello"
            running.close()
            assert read(waiting).status == 200


class TestLeaving:
    """A client that leaves stops the work done for it within a second, and the event log says that it left."""

    @pytest.mark.parametrize("model", ["slow", "in-worker"])
    @pytest.mark.parametrize("stream", [True, False])
    @ROUTES
    def test_while_it_is_answered(self, tight: Running, path: str, stream: bool, model: str) -> None:
        left = len(recorded(tight, 0, status=499, model=model))
        with sent(tight, path, model=model, stream=stream) as sock:
            if stream:
                sock.recv(1)
            else:
                time.sleep(0.5)
        begun = time.monotonic()
        with talking(tight) as client:
            assert text_of(ask(client, path, model=model, max_tokens=1)) == "tick"
        assert time.monotonic() - begun < 1
        assert eventually(lambda: len(recorded(tight, 0, status=499, model=model)) == left + 1, 2)

    @pytest.mark.parametrize("stream", [True, False])
    def test_before_the_first_token(self, tight: Running, stream: bool) -> None:
        left = len(recorded(tight, 0, status=499, model="slow-to-start"))
        begun = time.monotonic()
        with sent(tight, CHAT, model="slow-to-start", stream=stream):
            time.sleep(0.3)
        with talking(tight) as client:
            assert text_of(ask(client, CHAT, model="slow-to-start")) == "hello"
        # Twice its time to start would have passed if the first request had been served to its end.
        assert time.monotonic() - begun < 2.8
        assert eventually(lambda: len(recorded(tight, 0, status=499, model="slow-to-start")) == left + 1, 2)

    def test_while_it_waits(self, tight: Running) -> None:
        left = len(recorded(tight, 0, status=499, model="slow"))
        with sent(tight, CHAT, model="slow", stream=True) as running:
            running.recv(1)
            with sent(tight, CHAT, model="slow"):
                time.sleep(0.3)
            assert eventually(lambda: len(recorded(tight, 0, status=499, model="slow")) == left + 1, 1)
            with sent(tight, CHAT, model="slow", max_tokens=1) as waiting:
                time.sleep(0.2)
                running.close()
                assert read(waiting).status == 200

    def test_while_it_still_sends(self, tight: Running) -> None:
        left = len(recorded(tight, 0, status=499))
        with connect(tight) as sock:
            sock.sendall(head(CHAT, b"Host: localhost", b"Content-Length: 100") + b'{"mess')
        assert eventually(lambda: len(recorded(tight, 0, status=499)) == left + 1, 1)


LARGE = {"prompt": "x" * 1_000_000, "n": 16}
"""Asks for far more than the buffers of two sockets hold."""


class TestNotReading:
    """What is sent to a client that does not read is bounded, and so is the time it is waited for."""

    def connection(self, running: Running) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", running.port))
        return sock

    def test_stream(self, tight: Running) -> None:
        left = len(recorded(tight, 0, status=499, model="echo"))
        with self.connection(tight) as sock:
            begun = time.monotonic()
            sock.sendall(request_bytes(COMPLETIONS, LARGE | {"stream": True}))
            with talking(tight) as client:
                assert text_of(ask(client, CHAT)) == "hello"
            assert time.monotonic() - begun < 3
            assert eventually(lambda: len(recorded(tight, 0, status=499, model="echo")) == left + 1, 1)
            assert b"[DONE]" not in read(sock).body

    def test_whole_reply(self, tight: Running) -> None:
        with self.connection(tight) as sock:
            sock.settimeout(30)
            sock.sendall(request_bytes(COMPLETIONS, LARGE))
            sock.recv(1, socket.MSG_PEEK)
            time.sleep(2)
            answer = read(sock)
        assert answer.status == 200
        assert answer.closed
        assert len(answer.body) < int(answer.response.headers["content-length"])

    def test_slow_reader_is_not_cut_off(self, tight: Running) -> None:
        with self.connection(tight) as sock:
            sock.sendall(request_bytes(COMPLETIONS, {"prompt": "x" * 500_000, "stream": True}))
            received = b""
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                piece = sock.recv(32768)
                assert piece
                received = received[-100:] + piece
                time.sleep(0.02)

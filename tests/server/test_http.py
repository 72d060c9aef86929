"""HTTP that no library sends: malformed, too large, too slow, pipelined."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import BODY_BYTES, BODY_SECONDS, HEADER_BYTES
from tests.support.raw_http import HEALTH, HOST, STREAM_END, connect, head, raw, read, request_bytes
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    JSON_BODY,
    SMALLEST,
    ask,
    recorded,
    refused,
    talking,
    text_of,
    under_way,
)
from tests.support.server_process import Running

pytestmark = pytest.mark.usefixtures("served_afterwards")
ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
SMALL = json.dumps(SMALLEST[CHAT]).encode()

MALFORMED = {
    "not HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "unknown method": b"WISH / HTTP/1.1\r\n" + HOST + b"\r\n",
    "path that is not ASCII": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "header without a colon": b"GET / HTTP/1.1\r\n" + HOST + b"broken\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\n" + HOST + b"Content-Length : 0\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "Host of another server": b"GET /v1/models HTTP/1.1\r\nHost: attacker.example\r\n\r\n",
    "target on another server": b"GET http://attacker.example/v1/models HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty lines only": b"\r\n" * 5000,
    "Host with a path": b"GET / HTTP/1.1\r\nHost: localhost/evil\r\n\r\n",
    "Host with a user": b"GET / HTTP/1.1\r\nHost: localhost@evil\r\n\r\n",
    "Host with spaces": b"GET / HTTP/1.1\r\nHost: local host\r\n\r\n",
    "second Host": b"GET / HTTP/1.1\r\n" + HOST + b"Host: attacker.example\r\n\r\n",
    "two lengths": head(CHAT, b"Host: localhost", b"Content-Length: 5", b"Content-Length: 6") + b"hello!",
    "negative length": head(CHAT, b"Host: localhost", b"Content-Length: -1"),
    "length in words": head(CHAT, b"Host: localhost", b"Content-Length: five") + b"hello",
    "huge length": head(CHAT, b"Host: localhost", b"Content-Length: " + b"9" * 30) + b"hello",
    "huge chunk size": head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked") + b"f" * 20 + b"\r\nhello\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_request_is_a_400_and_the_connection_is_closed(tight: Running, data: bytes) -> None:
    answer = raw(tight, data)
    refused(answer.response, 400)
    assert answer.closed
    [record] = recorded(tight, id=answer.response.headers["x-request-id"])
    assert record["status"] == 400


TICKS = SMALLEST[CHAT] | {"model": "slow", "stream": True, "max_tokens": 40}
"""A stream that takes two seconds, longer than a head may."""


def test_pipelined_requests_are_answered_in_order(tight: Running) -> None:
    one = request_bytes(COMPLETIONS, {"prompt": "one"})
    two = request_bytes(COMPLETIONS, {"prompt": "two"}, "Connection: close")
    answer = raw(tight, one + two)
    assert answer.closed
    assert answer.body.count(b"HTTP/1.1 200 OK") == 1
    assert answer.body.index(b'"one"') < answer.body.index(b'"two"')


def test_garbage_after_running_stream_is_refused_after_it(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(request_bytes(CHAT, TICKS))
        sock.recv(1)
        sock.sendall(b"\x00garbage\r\n\r\n")
        answer = read(sock, 60)
    assert answer.closed
    stream, _, refusal = answer.body.partition(STREAM_END)
    assert re.match(rb"[0-9a-f]+\r\ndata: ", stream)
    assert refusal.startswith(b"HTTP/1.1 400 ")


def received_until(sock: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        piece = sock.recv(65536)
        assert piece, received[-300:]
        received += piece
    return received


def test_data_after_last_request_is_ignored(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(request_bytes(CHAT, TICKS, "Connection: close"))
        sock.recv(1)
        sock.sendall(b"\x00garbage\r\n\r\n")
        assert received_until(sock, STREAM_END)
        assert read(sock).closed


def test_empty_lines_after_answered_request_are_ignored(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(request_bytes(CHAT, TICKS))
        sock.recv(1)
        sock.sendall(b"\r\n")
        received_until(sock, STREAM_END)
        sock.sendall(b"\r\n" + HEALTH)
        assert read(sock, 0).status == 200


def test_connection_with_only_empty_lines_is_closed_silently(impatient: Running) -> None:
    with connect(impatient) as sock:
        sock.sendall(HEALTH)
        assert read(sock, 0).status == 200
        sock.sendall(b"\r\n")
        answer = read(sock)
    assert answer.closed
    assert answer.head == b""


def test_time_for_next_head_starts_after_running_stream(impatient: Running) -> None:
    with connect(impatient) as sock:
        sock.sendall(request_bytes(CHAT, TICKS) + HEALTH[:20])
        received_until(sock, STREAM_END)
        ended = time.monotonic()
        answer = read(sock)
    refused(answer.response, 408, code="request_timeout")
    assert time.monotonic() - ended > 0.9


def test_garbage_after_waiting_request_is_refused_in_order(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(request_bytes(CHAT, TICKS) + HEALTH)
        under_way(tight, "slow")
        sock.sendall(b"\x00garbage\r\n\r\n")
        answer = read(sock, 60)
    assert answer.closed
    assert re.findall(rb"HTTP/1.1 (\d+)", answer.head + answer.body) == [b"200", b"200", b"400"]
    assert "Traceback" not in tight.log.read_text()


def test_head_size_counts_in_shared_packet(tight: Running) -> None:
    answer = raw(tight, HEALTH + b"GET /health HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * HEADER_BYTES + b"\r\n\r\n")
    assert answer.closed
    assert (answer.head + answer.body).count(b"200 OK") <= 1
    with connect(tight) as sock:
        # The next head begins in the packet in which the body ends, and continues in later ones.
        sock.sendall(request_bytes(CHAT, SMALLEST[CHAT]) + b"GET /health HTTP/1.1\r\n" + HOST + b"X-Long: ")
        assert read(sock, 0).status == 200
        sock.sendall(b"a" * (HEADER_BYTES + 1))
        refused(read(sock).response, 431)


def test_head_response_has_no_body(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(HEALTH.replace(b"GET", b"HEAD"))
        assert received_until(sock, b"\r\n\r\n").split(b" ")[1] in (b"200", b"405")
        sock.sendall(HEALTH)
        following = read(sock, 0)
        assert following.status == 200
        assert following.response.json()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
class TestUpgrade:
    """An `Upgrade` is ignored: the request is served as HTTP."""

    def test_byte_by_byte(self, tight: Running, protocol: str) -> None:
        lines = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAA")
        request = request_bytes(CHAT, SMALLEST[CHAT], *lines)
        with connect(tight) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pieces in ([request], [bytes([byte]) for byte in request]):
                for piece in pieces:
                    sock.sendall(piece)
                assert text_of(read(sock, 0).response) == "hello"

    def test_in_chunks_and_pipelined(self, tight: Running, protocol: str) -> None:
        lines = (b"Connection: Upgrade", b"Upgrade: " + protocol.encode(), b"Transfer-Encoding: chunked")
        one = head(CHAT, b"Host: localhost", *lines) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMALL), SMALL)
        two = b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: upgrade, close\r\nUpgrade: x\r\n\r\n"
        answer = raw(tight, one + two)
        assert answer.closed
        assert answer.status == 200
        assert b'"hello"' in answer.body
        assert answer.body.count(b"HTTP/1.1 200 OK") == 1


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["ended", "never ended"])
@pytest.mark.parametrize("size", [HEADER_BYTES + 1, 1024 * 1024])
def test_headers_too_large(tight: Running, size: int, end: bytes) -> None:
    answer = raw(tight, b"GET / HTTP/1.1\r\n" + HOST + b"X-Long: " + b"a" * size + end)
    refused(answer.response, 431, code="headers_too_large")
    assert answer.closed


def test_many_small_headers_and_long_path_are_too_large(tight: Running) -> None:
    many = b"".join(b"X-%d: a\r\n" % at for at in range(1000))
    refused(raw(tight, b"GET / HTTP/1.1\r\n" + HOST + many + b"\r\n").response, 431)
    refused(raw(tight, b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n").response, 431)
    with connect(tight) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + HOST)
        for at in range(HEADER_BYTES // 110 + 1):
            sock.sendall(b"X-%03d: " % at + b"a" * 100 + b"\r\n")
            time.sleep(0.001)
        refused(read(sock).response, 431)


def test_header_limit_applies_per_request(tight: Running) -> None:
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


def test_largest_body_is_accepted(tight: Running) -> None:
    content = SMALL + b" " * (BODY_BYTES - len(SMALL))
    with talking(tight) as client:
        assert text_of(client.post(CHAT, content=content, headers=JSON_BODY)) == "hello"
        assert text_of(client.post(CHAT, content=iter([content[:9], content[9:]]), headers=JSON_BODY)) == "hello"


def dribble(running: Running, first: bytes, rest: bytes) -> tuple[httpx.Response, float]:
    """Send the end of a request byte by byte, never all of it; returns the answer and the seconds until it came."""
    begun = time.monotonic()
    with connect(running) as sock:
        sock.sendall(first)
        sock.settimeout(0.1)
        for at in range(600):
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
def test_slow_body(impatient: Running, path: str) -> None:
    response, seconds = dribble(impatient, head(path, b"Host: localhost", b"Content-Length: 1000"), b" ")
    refused(response, 408, code="request_timeout")
    assert seconds > 0.9


def test_slow_headers(impatient: Running) -> None:
    response, seconds = dribble(impatient, b"GET / HTTP/1.1\r\n" + HOST + b"X-Slow: ", b"a")
    refused(response, 408, code="request_timeout")
    assert seconds > 0.9


def test_connection_without_a_request_is_closed_silently(impatient: Running) -> None:
    answer = raw(impatient, b"")
    assert answer.closed
    assert answer.head == b""


def test_idle_connection_is_kept_for_next_request(impatient: Running) -> None:
    with connect(impatient) as sock:
        for _ in range(2):
            sock.sendall(HEALTH)
            answer = read(sock, 1.2)
            assert answer.status == 200
            assert not answer.closed


def test_request_that_arrived_during_a_stall_is_answered(impatient: Running) -> None:
    processes = [impatient.process.pid, *impatient.fronts()]
    with connect(impatient) as sock:
        sock.sendall(b"\r\n")
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        try:
            sock.sendall(HEALTH)
            time.sleep(BODY_SECONDS + 0.5)
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGCONT)
        assert read(sock, 0).status == 200

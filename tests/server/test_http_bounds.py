"""Limits on what one connection costs: memory, time and file descriptors."""

import os
import re
import resource
import select
import socket
import time
from pathlib import Path

import pytest

from tests.server.conftest import HEADER_BYTES
from tests.support.raw_http import HEALTH, HOST, connect, head, raw, read, request_bytes
from tests.support.requests import CHAT, PATIENCE, SMALLEST, ask, eventually, recorded, refused, talking, text_of
from tests.support.server_process import Running, Serving, server_fixture

LAST = HEALTH[:-2] + b"Connection: close\r\n\r\n"
CHUNKED = head(CHAT, b"Host: localhost", b"Transfer-Encoding: chunked")
SLOW = SMALLEST[CHAT] | {"model": "slow"}


def listeners(running: Running) -> list[int]:
    """The processes that have connections."""
    return running.fronts() or [running.process.pid]


def memory(running: Running) -> int:
    """Resident bytes of the processes that have connections."""
    page = resource.getpagesize()
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in listeners(running))


def push(sock: socket.socket, data: bytes, limit: int) -> int:
    """Send the data repeatedly; returns how many of `limit` bytes the server took before it stalled or closed."""
    sock.setblocking(False)
    taken = 0
    while taken < limit:
        if not select.select([], [sock], [], 3)[1]:
            break
        try:
            taken += sock.send(data)
        except OSError:
            break
    return taken


crowded = server_fixture(
    {
        "models": {
            "echo": {"engine": "scripted", "chunk": 1000},
            "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]},
        },
        "api_keys": ["sk-one"],
    }
)
"""A server with the default limits."""


KEY = "Authorization: Bearer sk-one"
MEGABYTE = 1024 * 1024


def chunked(*lines: bytes) -> bytes:
    return head(CHAT, b"Host: localhost", KEY.encode(), b"Transfer-Encoding: chunked", *lines)


ENDLESS = {
    "trailers": (b"0\r\n", b"x: y\r\n" * 1000),
    "one trailer": (b"0\r\nx: ", b"y" * 6000),
    "chunk extensions": (b"", (b"1;" + b"a" * 100 + b"\r\n \r\n") * 100),
    "one chunk extension": (b"1;", b"a" * 6000),
    "a chunk size": (b"", b"0" * 6000),
}


@pytest.mark.parametrize(("first", "more"), ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_framing_of_a_body_is_a_431_in_bounded_memory(crowded: Running, first: bytes, more: bytes) -> None:
    before = memory(crowded)
    with connect(crowded) as sock:
        sock.sendall(chunked() + first)
        taken = push(sock, more, 64 * MEGABYTE)
        sock.settimeout(PATIENCE)
        answer = read(sock, PATIENCE)
    assert taken < 32 * MEGABYTE
    assert memory(crowded) - before < 24 * MEGABYTE
    refused(answer.response, 431)
    assert answer.closed


def test_trailers_are_not_headers(crowded: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    content = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    trailers = b"Content-Length: 3\r\nTransfer-Encoding: gzip\r\nX-Dragoman-Timeout: never\r\n\r\n"
    with connect(crowded) as sock:
        sock.sendall(chunked() + content + trailers + LAST)
        answer = read(sock, PATIENCE)
    assert answer.status == 200
    assert b"HTTP/1.1 200 OK" in answer.body
    unsigned = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = raw(crowded, unsigned + content + KEY.encode() + b"\r\n\r\n", PATIENCE)
    refused(answer.response, 401)


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "waiting"])
def test_pipelined_requests_without_a_reader_use_bounded_memory(crowded: Running, is_answered: bool) -> None:
    """The client sends without end and reads nothing. Its first request is answered at once, or not at all."""
    first = b"" if is_answered else request_bytes(CHAT, SLOW, KEY)
    before = memory(crowded)
    with connect(crowded) as sock:
        sock.sendall(first)
        taken = push(sock, HEALTH * 1000, 100 * MEGABYTE)
        assert memory(crowded) - before < 24 * MEGABYTE
        with talking(crowded, {"authorization": "Bearer sk-one"}) as client:
            assert text_of(ask(client, CHAT, model="echo")) == "hello"
    assert taken < 100 * MEGABYTE


def test_many_pipelined_requests_are_all_answered_in_order(crowded: Running) -> None:
    count = 3000
    paths = [b"/v1/models/%d" % at for at in range(count)]
    signed = HOST + KEY.encode() + b"\r\n\r\n"
    sent = b"".join(b"GET " + path + b" HTTP/1.1\r\n" + signed for path in paths) + LAST
    received = bytearray()
    with connect(crowded) as sock:
        sock.setblocking(False)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            readable, writable, _ = select.select([sock], [sock] if sent else [], [], PATIENCE)
            if writable:
                sent = sent[sock.send(sent) :]
            if readable:
                piece = sock.recv(65536)
                if not piece:
                    break
                received += piece
    assert re.findall(rb"model '(\d+)'", received) == [b"%d" % at for at in range(count)]


@pytest.mark.parametrize("size", [100, 100_000], ids=["still read", "paused"])
def test_disconnect_is_noticed_while_pipelined_requests_wait(crowded: Running, size: int) -> None:
    """The larger size is more than the server reads ahead, and less than the socket's buffers hold."""
    left = len(recorded(crowded, 0, status=499, model="slow"))
    with connect(crowded) as sock:
        sock.sendall(request_bytes(CHAT, SLOW, KEY))
        sock.sendall(HEALTH * (size // len(HEALTH)))
    assert eventually(lambda: len(recorded(crowded, 0, status=499, model="slow")) == left + 1)


def test_disconnect_is_noticed_if_more_requests_wait_than_all_buffers_hold(crowded: Running) -> None:
    """The end of the connection is behind the requests that the server has no room for."""
    left = len(recorded(crowded, 0, status=499, model="slow"))
    with connect(crowded) as sock:
        sock.sendall(request_bytes(CHAT, SLOW, KEY))
        while select.select([], [sock], [], 0.2)[1]:
            sock.send(HEALTH * 1000)
    assert eventually(lambda: len(recorded(crowded, 0, status=499, model="slow")) == left + 1)


def test_requests_pipelined_behind_a_long_one_are_dropped_and_the_connection_closes(crowded: Running) -> None:
    body = {"model": "slow", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "stream": True}
    with connect(crowded) as sock:
        sock.sendall(request_bytes(CHAT, body, KEY) + HEALTH * 10_000)
        answer = read(sock, PATIENCE)
    assert answer.closed
    assert answer.body.count(b"HTTP/1.1 ") == 0
    assert answer.body.count(b"tick") == 60


REFUSED = {
    "401": (head(CHAT, b"Host: localhost", b"Content-Length: 9999999999"), 401),
    "413": (head(CHAT, b"Host: localhost", KEY.encode(), b"Content-Length: 9999999999"), 413),
    "413 in chunks": (chunked(), 413),
    "404": (head("/v1/nothing", b"Host: localhost", KEY.encode(), b"Content-Length: 9999999999"), 404),
    "401 in chunks": (CHUNKED, 401),
}


@pytest.mark.parametrize(("first", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_body_of_a_refused_request_is_not_read_to_its_end(crowded: Running, first: bytes, status: int) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    data = chunk if b"chunked" in first else b" " * 65536
    with connect(crowded) as sock:
        sock.sendall(first)
        taken = push(sock, data, 400 * MEGABYTE)
        answer = read(sock, PATIENCE)
    assert answer.closed
    refused(answer.response, status)
    assert answer.response.headers["connection"] == "close"
    # The largest body, the bytes read while lingering, and the buffers of the sockets.
    assert taken < 80 * MEGABYTE


def test_small_rest_of_a_refused_body_is_dropped_and_the_connection_is_kept(crowded: Running) -> None:
    with connect(crowded) as sock:
        sock.sendall(head(CHAT, b"Host: localhost", b"Content-Length: 30000"))
        sock.settimeout(PATIENCE)
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")
        sock.sendall(b" " * 30000 + LAST)
        answer = read(sock, PATIENCE)
    assert answer.closed
    assert answer.status == 200


def test_missing_rest_of_a_refused_body_closes_the_connection(crowded: Running) -> None:
    with connect(crowded) as sock:
        sock.sendall(head(CHAT, b"Host: localhost", b"Content-Length: 30000"))
        answer = read(sock, PATIENCE)
    assert answer.closed
    refused(answer.response, 401)


def test_refused_request_that_expects_100_continue_closes_the_connection(crowded: Running) -> None:
    with connect(crowded) as sock:
        sock.sendall(head(CHAT, b"Host: localhost", b"Expect: 100-continue", b"Content-Length: 10"))
        answer = read(sock, PATIENCE)
    assert answer.closed
    refused(answer.response, 401)
    assert answer.response.headers["connection"] == "close"


def test_large_headers_are_refused_while_they_arrive(tight: Running) -> None:
    with connect(tight) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"X: ")
        taken = push(sock, b"a" * 65536, 200 * MEGABYTE)
        answer = read(sock, PATIENCE)
    assert taken < 32 * MEGABYTE
    refused(answer.response, 431)
    assert answer.closed
    assert len(answer.body) < HEADER_BYTES


@pytest.mark.workers(1, reason="it limits the file descriptors of the process that accepts connections")
def test_connections_wait_while_no_file_descriptor_is_free(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": {"echo": {"engine": "scripted"}}}) as running:
        pid = running.process.pid
        taken = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken + 5, taken + 5))
        socks = [connect(running) for _ in range(40)]
        words = "cannot accept connections"
        assert eventually(lambda: words in running.log.read_text())
        for sock in socks[:30]:
            sock.close()
        for sock in socks[30:]:
            sock.sendall(LAST)
            assert read(sock, PATIENCE).status == 200
            sock.close()
        assert running.log.read_text().count(words) == 1
        before = cpu_seconds(pid)
        held = [connect(running) for _ in range(20)]
        time.sleep(2)
        assert cpu_seconds(pid) - before < 1
        for sock in held:
            sock.close()
        assert running.stop() == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

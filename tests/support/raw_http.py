"""Helpers to send bytes over a socket."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.requests import PATIENCE, SMALLEST
from tests.support.server_process import Running

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass
class Answer:
    """The bytes received, and whether the server then closed the connection."""

    head: bytes
    body: bytes
    closed: bool

    @property
    def status(self) -> int:
        return int(self.head.split(b" ")[1])

    @property
    def response(self) -> httpx.Response:
        lines = [line.split(b": ", 1) for line in self.head.split(b"\r\n")[1:]]
        return httpx.Response(self.status, headers=[(name, value) for name, value in lines], content=self.body)


def connect(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE)


def raw(running: Running, data: bytes, quiet: float = 20.0) -> Answer:
    with connect(running) as sock:
        sock.sendall(data)
        return read(sock, quiet)


def read(sock: socket.socket, quiet: float = 20.0) -> Answer:
    """Everything until the connection ends, or until a response is complete and `quiet` seconds pass without data.
    With 0, one response."""
    received, closed = bytearray(), False
    try:
        while not (whole := _is_whole(received)) or quiet:
            sock.settimeout(quiet if whole else PATIENCE)
            if not (piece := sock.recv(65536)):
                closed = True
                break
            received += piece
    except TimeoutError:
        assert whole, f"no whole response within {PATIENCE} s: {bytes(received[-200:])!r}"
    except ConnectionResetError:
        closed = True
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return Answer(head, body, closed)


def _is_whole(received: bytearray) -> bool:
    """Whether a response is complete, by its Content-Length or its last chunk."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    lines = bytes(received[:end]).lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        return received.endswith(b"\r\n0\r\n\r\n")
    length = next((int(line[16:]) for line in lines if line.startswith(b"content-length: ")), None)
    return length is not None and len(received) >= end + 4 + length


def request_bytes(path: str, body: Mapping[str, Any], *headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}"]).encode() + b"\r\n\r\n" + content


def sent(running: Running, path: str, /, **fields: Any) -> socket.socket:
    """A connection with one request in progress."""
    sock = connect(running)
    sock.sendall(request_bytes(path, SMALLEST[path] | fields, "Connection: close"))
    return sock


def head(path: str, *lines: bytes) -> bytes:
    """The head of a JSON request, without its framing headers."""
    given = b"".join(line + b"\r\n" for line in lines)
    return b"POST " + path.encode() + b" HTTP/1.1\r\nContent-Type: application/json\r\n" + given + b"\r\n"

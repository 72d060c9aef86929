"""A small HTTP client for malformed requests: it sends exactly the given bytes and pipelines requests.

Rules
1. `send_all` returns one answer per request, in order. A connection that the server closes is opened again, and the
   requests that have no answer yet are sent once more.
2. An answer of status 0 stands for a connection that the server closed without a response.
"""

import json
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PIPELINED = 8
"""Requests in flight at the same time. They fit into the socket buffers."""
TIMEOUT_SECONDS = 60
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    method: str
    target: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""

    def encode(self) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.method.encode(), self.target), b"Host: localhost"]
        lines += [name.encode() + b": " + value for name, value in self.headers]
        if self.body:
            lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(self.body)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes = b""
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


class PipelinedClient:
    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._received = bytearray()

    def __enter__(self) -> "PipelinedClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def send(self, request: Request) -> Answer:
        return self.send_all([request])[0]

    def send_all(self, requests: Iterable[Request]) -> list[Answer]:
        waiting = list(requests)
        answers: list[Answer] = []
        while waiting:
            got = self._send_some(waiting[:PIPELINED])
            answers += got
            waiting = waiting[len(got) :]
        return answers

    def _send_some(self, requests: Sequence[Request]) -> list[Answer]:
        """At least one answer; fewer than requests if the server closed the connection."""
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_SECONDS)
        answers: list[Answer] = []
        try:
            self._socket.sendall(b"".join(request.encode() for request in requests))
            for request in requests:
                answer = self._read(request.method)
                answers.append(answer)
                if not answer.status or _CLOSES.search(answer.head):
                    self._close()
                    break
        except (ConnectionResetError, BrokenPipeError):
            self._close()
            answers = answers or [Answer(0)]
        return answers

    def _read(self, method: str) -> Answer:
        while b"\r\n\r\n" not in self._received:
            if not self._receive():
                return Answer(0, bytes(self._received))
        head, _, _ = bytes(self._received).partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = _LENGTH.search(head)
        assert length, f"a response without content-length: {head!r}"
        size = 0 if method == "HEAD" else int(length[1])
        end = len(head) + 4 + size
        while len(self._received) < end:
            if not self._receive():
                return Answer(0, bytes(self._received))
        body = bytes(self._received[len(head) + 4 : end])
        del self._received[:end]
        return Answer(status, head, body)

    def _receive(self) -> int:
        assert self._socket is not None
        data = self._socket.recv(65536)
        self._received += data
        return len(data)

    def _close(self) -> None:
        self._received.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

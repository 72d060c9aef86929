"""Helpers to send requests and raw bytes, and to check refusals."""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.server_process import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SMALLEST: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hello"}}
"""The smallest body of each route."""

JSON_BODY = {"content-type": "application/json"}
STREAM_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
PATIENCE = 60.0
"""Seconds to wait for an expected event: many, because a loaded machine is slow."""


@contextmanager
def talking(running: Running, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of the server. If the server has no keys, it sends the admin token."""
    given = running.operator | dict(headers or {})
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE, headers=given) as client:
        yield client


def ask(client: httpx.Client, path: str, /, **fields: Any) -> httpx.Response:
    return client.post(path, json=SMALLEST[path] | fields)


def text_of(response: httpx.Response, choice: int = 0) -> str:
    assert response.status_code == 200, response.text
    entry = response.json()["choices"][choice]
    text: str = entry["text"] if "text" in entry else entry["message"]["content"]
    return text


def refused(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """The message of an error, after checking its format."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["param"] == param
    assert error["type"]
    assert code is None or error["code"] == code
    message: str = error["message"]
    assert message
    return message


def frames(body: str) -> list[Any]:
    """The payloads of an event stream, including its end mark, without comments."""
    assert body.endswith("\n\n")
    blocks = [block for block in body.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


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


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def under_way(running: Running, model: str, count: int = 1, waiting: int = 0) -> None:
    """Wait until the model serves `count` requests and `waiting` more wait for it."""
    with talking(running) as client:

        def counts() -> tuple[int, int]:
            model_stats = client.get("/stats").json()["models"][model]
            return model_stats["running"], model_stats["waiting"]

        assert eventually(lambda: counts() == (count, waiting)), counts()


def recorded(running: Running, seconds: float = PATIENCE, **wanted: Any) -> list[dict[str, Any]]:
    """The records of the event log with these values, after waiting for the first one."""

    def found() -> list[dict[str, Any]]:
        return [event for event in running.events() if wanted.items() <= event.items()]

    eventually(lambda: bool(found()), seconds)
    return found()


def head(path: str, *lines: bytes) -> bytes:
    """The head of a JSON request, without its framing headers."""
    given = b"".join(line + b"\r\n" for line in lines)
    return b"POST " + path.encode() + b" HTTP/1.1\r\nContent-Type: application/json\r\n" + given + b"\r\n"

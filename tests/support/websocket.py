"""Helpers for tests of the WebSocket of `/v1/responses`: a client of `websockets`, and raw frames."""

import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tools.websocket import CLOSE, HANDSHAKE, TEXT, frame, read_frame
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as connect_websocket

from tests.support.raw_http import connect
from tests.support.requests import PATIENCE
from tests.support.server_process import Running

RESPONSES = "/v1/responses"
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class Address(Protocol):
    port: int


@contextmanager
def opened(
    running: Address, headers: Mapping[str, str] | None = None, path: str = RESPONSES, **options: Any
) -> Iterator[ClientConnection]:
    given = {"open_timeout": PATIENCE, "max_size": None, "proxy": None, "additional_headers": headers, **options}
    with connect_websocket(f"ws://127.0.0.1:{running.port}{path}", **given) as websocket:
        yield websocket


def create(websocket: ClientConnection, text: str | list[Any] = "hello", /, **fields: Any) -> None:
    websocket.send(json.dumps({"type": "response.create", "input": text, "store": False, **fields}))


def next_event(websocket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(websocket.recv(timeout=PATIENCE))
    return event


def events_of(websocket: ClientConnection) -> list[dict[str, Any]]:
    """The events of one response, or one error event."""
    events: list[dict[str, Any]] = []
    while not events or not (events[-1]["type"] in LAST_EVENTS or "status" in events[-1]):
        events.append(next_event(websocket))
    return events


def respond(websocket: ClientConnection, text: str | list[Any] = "hello", /, **fields: Any) -> dict[str, Any]:
    """The response to one request."""
    create(websocket, text, **fields)
    last = events_of(websocket)[-1]
    assert last["type"] in LAST_EVENTS, last
    response: dict[str, Any] = last["response"]
    return response


def refusal(websocket: ClientConnection, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The next message, after checking that it is an error event."""
    event = next_event(websocket)
    assert (event["type"], event["status"]) == ("error", status), event
    error = event["error"]
    assert {"message", "type", "param", "code"} <= error.keys() <= {"message", "type", "param", "code", "headers"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]
    return event


def text_of_response(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


# Raw frames.


def text_frame(value: object) -> bytes:
    return frame(TEXT, json.dumps(value).encode())


def handshake(path: str = RESPONSES, *lines: bytes, opening: bytes = HANDSHAKE) -> bytes:
    return b"\r\n".join((f"GET {path} HTTP/1.1".encode(), b"Host: localhost", opening, *lines)) + b"\r\n\r\n"


class RawSocket:
    """A connection that sends any bytes, and reads frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()

    def send(self, *data: bytes) -> None:
        self.sock.sendall(b"".join(data))

    def _receive(self) -> None:
        piece = self.sock.recv(65536)
        if not piece:
            raise EOFError(bytes(self.received))
        self.received += piece

    def read_head(self) -> bytes:
        while (end := self.received.find(b"\r\n\r\n")) < 0:
            self._receive()
        head = bytes(self.received[:end])
        del self.received[: end + 4]
        return head

    def read_frame(self) -> tuple[int, bytes]:
        while (found := read_frame(self.received)) is None:
            self._receive()
        opcode, payload, end = found
        del self.received[:end]
        return opcode, payload

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """All frames until the server closes the connection."""
        try:
            while True:
                yield self.read_frame()
        except (EOFError, ConnectionResetError):
            return

    def read_event(self) -> dict[str, Any]:
        opcode, payload = self.read_frame()
        assert opcode == TEXT, (opcode, payload)
        event: dict[str, Any] = json.loads(payload)
        return event

    def read_close(self) -> tuple[int, str]:
        """The code and the reason of the close frame. Other frames are skipped. Then the connection must end."""
        closing = [payload for opcode, payload in self.frames() if opcode == CLOSE]
        assert len(closing) == 1, closing
        return struct.unpack("!H", closing[0][:2])[0], closing[0][2:].decode()


@contextmanager
def raw_socket(running: Running, *lines: bytes, trailing: Iterable[bytes] = ()) -> Iterator[RawSocket]:
    """An open WebSocket. `trailing` is sent in the same packet as the handshake."""
    with connect(running) as sock:
        made = RawSocket(sock)
        made.send(handshake(RESPONSES, *lines), *trailing)
        assert made.read_head().startswith(b"HTTP/1.1 101 ")
        yield made

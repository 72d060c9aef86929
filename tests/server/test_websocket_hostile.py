"""WebSockets of clients that break the protocol, do not read, or leave. The server serves others all the time."""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterable, Iterator

import pytest
from tools.websocket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, fragmented, frame

from dragoman.server.http.websocket_frames import MAX_SMALL_FRAMES
from tests.support.raw_http import connect, read
from tests.support.requests import CHAT, PATIENCE, ask, eventually, recorded, refused, talking, text_of, under_way
from tests.support.server_process import Running, server_fixture
from tests.support.websocket import RawSocket, handshake, raw_socket, text_frame

BODY_BYTES = 300_000
CREATE = {"type": "response.create", "input": "hello", "store": False}
server = server_fixture(
    {
        "models": {
            "echo": {"engine": "scripted"},
            "fast": {"engine": "scripted", "slots": 1, "replies": [{"output": "a" * 60_000}], "chunk": 1},
            "ticks": {"engine": "scripted", "tokens_per_second": 50, "replies": [{"output": "tick " * 20_000}]},
        },
        "limits": {"body_bytes": BODY_BYTES, "body_seconds": 1, "write_seconds": 1},
    }
)


@pytest.fixture(autouse=True)
def served_afterwards(server: Running) -> Iterator[None]:
    yield
    with talking(server) as client:
        assert text_of(ask(client, CHAT)) == "hello"
    assert "Traceback" not in server.log.read_text()


def last_type(opened: RawSocket) -> str:
    """The type of the last event of a response."""
    while (event := opened.read_event())["type"] not in ("response.completed", "response.failed", "error"):
        pass
    return str(event["type"])


def sends_until_closed(opened: RawSocket, pieces: Iterable[bytes]) -> bool:
    """Whether the server closes the connection while these pieces are sent."""
    try:
        for piece in pieces:
            opened.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        return True
    return False


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"{}", mask=None), 1002),
        (frame(TEXT, b"{}", rsv=4), 1002),
        (frame(CONTINUATION, b"{}"), 1002),
        (frame(PING, b"a" * 126), 1002),
        (frame(TEXT, b"\xff"), 1007),
        (frame(TEXT, b"a" * (BODY_BYTES + 1)), 1009),
        (frame(BINARY, b"a" * (BODY_BYTES + 1)), 1009),
        (b"".join(fragmented(b"a" * (BODY_BYTES + 1), 4096)), 1009),
        (b"\x81\xff\x7f\xff\xff\xff\xff\xff\xff\xffmask" + b"a" * (BODY_BYTES + 1), 1009),
        (frame(TEXT, b"{", fin=False) + frame(CONTINUATION, fin=False) * MAX_SMALL_FRAMES, 1008),
        (frame(TEXT, b"{}") * (MAX_SMALL_FRAMES + 1), 1008),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 1002),
        (b"\x00" * 100, 1002),
    ],
)
@pytest.mark.parametrize("is_trailing", [False, True], ids=["later", "with the handshake"])
def test_violation_closes_the_connection_with_its_code(
    server: Running, data: bytes, code: int, is_trailing: bool
) -> None:
    with raw_socket(server, trailing=(data,) if is_trailing else ()) as opened:
        if not is_trailing:
            opened.send(data)
        assert opened.read_close()[0] == code


def test_violation_cancels_a_running_response(server: Running) -> None:
    with raw_socket(server) as opened:
        opened.send(text_frame(CREATE | {"model": "ticks"}))
        under_way(server, "ticks")
        opened.send(frame(TEXT, b"\xff"))
        assert opened.read_close()[0] == 1007
        under_way(server, "ticks", 0)


def test_endless_message_is_cut_off(server: Running) -> None:
    """A client that sends for ever cannot keep the connection: what it sends after the close frame is discarded."""
    with raw_socket(server) as opened:
        piece = frame(CONTINUATION, b"a" * 60_000, fin=False)
        opened.send(frame(TEXT, b"{", fin=False))
        assert sends_until_closed(opened, itertools.repeat(piece))


def test_pings_are_answered_also_within_a_message(server: Running) -> None:
    first, *rest = fragmented(b'{"type": "response.create", "input": "hello"}', 5)
    with raw_socket(server) as opened:
        opened.send(first)
        for number, fragment in enumerate(rest):
            opened.send(frame(PING, b"%d" % number), frame(PONG, b"unsolicited"), fragment)
        for number in range(len(rest)):
            assert opened.read_frame() == (PONG, b"%d" % number)
        assert last_type(opened) == "response.completed"


def test_thousands_of_pings_are_answered_and_more_are_refused(server: Running) -> None:
    with raw_socket(server) as opened:
        opened.send(frame(PING, b"a" * 100) * MAX_SMALL_FRAMES)
        for _ in range(MAX_SMALL_FRAMES):
            assert opened.read_frame()[0] == PONG
        opened.send(frame(PING))
        assert opened.read_close()[0] == 1008


@pytest.mark.parametrize("flood", [frame(PING, b"a" * 125), frame(TEXT, b"{}")], ids=["pings", "messages"])
def test_flood_of_a_client_that_does_not_read_ends(server: Running, flood: bytes) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        opened = RawSocket(sock)
        opened.send(handshake())
        sock.settimeout(4)
        # The client learns that the connection was closed only when it reads.
        with contextlib.suppress(OSError):
            opened.send(flood * (4 * MAX_SMALL_FRAMES))
        sock.settimeout(PATIENCE)
        opened.read_head()
        assert len(list(opened.frames())) <= MAX_SMALL_FRAMES + 1


def test_client_that_does_not_read_is_disconnected(server: Running) -> None:
    left = len(recorded(server, 0, status=499, model="fast"))
    with connect(server) as sock:
        # Less is received than one response has.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(handshake() + text_frame(CREATE | {"model": "fast"}))
        assert eventually(lambda: len(recorded(server, 0, status=499, model="fast")) == left + 1)
    with talking(server) as client:
        assert client.get("/stats").json()["models"]["fast"]["running"] == 0


def test_client_that_reads_slowly_gets_everything(server: Running) -> None:
    with raw_socket(server) as opened:
        opened.send(text_frame(CREATE | {"model": "fast"}))
        time.sleep(0.5)
        count = 0
        while opened.read_event()["type"] != "response.completed":
            count += 1
            if count % 10_000 == 0:
                time.sleep(0.1)
        assert count > 60_000


def test_slow_message_is_refused(server: Running) -> None:
    with raw_socket(server) as opened:
        message = frame(TEXT, b'{"type": "response.create", "input": "' + b"a" * 100 + b'"}')
        for byte in message[:20]:
            opened.send(bytes([byte]))
            time.sleep(0.1)
        assert opened.read_close() == (1008, "a message took longer than 1 s")


def test_idle_connection_is_not_closed_after_the_time_for_a_body(server: Running) -> None:
    with raw_socket(server) as opened:
        time.sleep(2.5)
        opened.send(text_frame(CREATE))
        assert last_type(opened) == "response.completed"


def test_slow_handshake_is_refused(server: Running) -> None:
    with connect(server) as sock:
        sock.sendall(handshake()[:-2])
        refused(read(sock).response, 408)


@pytest.mark.parametrize("frames", [b"", frame(CLOSE, b"\x03\xe8")], ids=["at once", "after a close frame"])
def test_disconnect_during_the_handshake(server: Running, frames: bytes) -> None:
    for _ in range(20):
        with connect(server) as sock:
            sock.sendall(handshake() + frames)
    with connect(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        sock.sendall(handshake() + text_frame(CREATE))


@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
def test_disconnect_without_a_close_frame_cancels_the_response(server: Running, is_reset: bool) -> None:
    with raw_socket(server) as opened:
        opened.send(text_frame(CREATE | {"model": "ticks"}))
        under_way(server, "ticks")
        if is_reset:
            opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    under_way(server, "ticks", 0)


def test_close_frame_is_answered_and_ends_the_connection(server: Running) -> None:
    for payload, answer in ((b"\x03\xe8bye", b"\x03\xe8"), (b"", b""), (b"\x0f\xa0", b"\x0f\xa0")):
        with raw_socket(server) as opened:
            opened.send(frame(CLOSE, payload), text_frame(CREATE))
            assert list(opened.frames()) == [(CLOSE, answer)]


def test_frames_byte_by_byte(server: Running) -> None:
    with connect(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in handshake() + text_frame(CREATE):
            sock.sendall(bytes([byte]))
        opened = RawSocket(sock)
        assert opened.read_head().startswith(b"HTTP/1.1 101 ")
        assert last_type(opened) == "response.completed"

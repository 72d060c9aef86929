"""WebSockets of clients that break the protocol, do not read, or leave. The server serves others all the time."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dragoman import create_app
from dragoman.config.settings import Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.http import websocket as websocket_connection
from dragoman.server.http.server import HttpServer, bind_sockets
from dragoman.server.http.websocket_frames import MAX_SMALL_FRAMES
from dragoman.server.websocket import session
from tests.support.raw_http import connect, read
from tests.support.requests import CHAT, PATIENCE, ask, eventually, recorded, refused, talking, text_of, under_way
from tests.support.server_process import Running, server_fixture
from tests.support.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    RawSocket,
    fragmented,
    frame,
    handshake,
    raw_socket,
    text_frame,
)

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
    with raw_socket(server) as opened:
        opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert sends_until_closed(opened, itertools.repeat(flood * 1000))


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


# With shorter times, in this process.


@asynccontextmanager
async def served() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client of a server in this process, after the handshake."""
    listeners = bind_sockets("127.0.0.1", 0)
    app = create_app(ScriptedEngine(), settings=Settings(models_dir=()))
    server, stopping = HttpServer(app, listeners), asyncio.Event()
    started = asyncio.Event()
    task = asyncio.create_task(server.run(stopping, started.set))
    await started.wait()
    reader, writer = await asyncio.open_connection(*listeners[0].getsockname())
    writer.write(handshake())
    try:
        async with asyncio.timeout(PATIENCE):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            yield reader, writer
    finally:
        stopping.set()
        await task
        await server.stop(0)
        await app.stop()
        writer.close()


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    first, size = await reader.readexactly(2)
    return first & 15, await reader.readexactly(size)


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "PING_SECONDS", 0.1)
    monkeypatch.setattr(websocket_connection, "PONG_SECONDS", 0.5)


@pytest.mark.usefixtures("short_times")
async def test_idle_client_is_pinged_and_stays_while_it_answers() -> None:
    async with served() as (reader, writer):
        for _ in range(3):
            assert await read_frame(reader) == (PING, b"")
            writer.write(frame(PONG))
        writer.write(text_frame({"type": "x"}))
        opcode, payload = await read_frame(reader)
        while opcode == PING:
            writer.write(frame(PONG))
            opcode, payload = await read_frame(reader)
        assert opcode == TEXT, payload


@pytest.mark.usefixtures("short_times")
async def test_client_without_pongs_is_disconnected() -> None:
    async with served() as (reader, _):
        assert await read_frame(reader) == (PING, b"")
        opcode, payload = await read_frame(reader)
        assert (opcode, payload[:2], payload[2:]) == (CLOSE, b"\x03\xf3", b"no answer to a ping in 0.5 s")
        assert await reader.read() == b""


async def test_idle_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.3)
    async with served() as (reader, writer):
        began = time.monotonic()
        await asyncio.sleep(0.2)
        writer.write(text_frame({"type": "x"}))
        assert (await read_large_frame(reader))[0] == TEXT
        assert await read_frame(reader) == (CLOSE, b"\x03\xe9no request for 0.3 s")
        assert time.monotonic() - began >= 0.5


async def read_large_frame(reader: asyncio.StreamReader) -> tuple[int, Any]:
    first, size = await reader.readexactly(2)
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2))
    return first & 15, await reader.readexactly(size)


async def test_close_frame_without_an_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(websocket_connection, "CLOSE_SECONDS", 0.5)
    async with served() as (reader, writer):
        assert (await read_frame(reader))[0] == CLOSE
        writer.write(frame(PING) + frame(TEXT, b"{}"))
        assert await reader.read() == b""

"""The time limits of WebSockets, in a server of this process with shorter ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tools.websocket import CLOSE, PING, PONG, TEXT, frame

from dragoman import create_app
from dragoman.config.settings import Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.http import websocket as websocket_connection
from dragoman.server.http.server import HttpServer, bind_sockets
from dragoman.server.websocket import session
from tests.support.requests import PATIENCE
from tests.support.websocket import handshake, text_frame


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
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2))
    return first & 15, await reader.readexactly(size)


@pytest.fixture(autouse=True)
def close_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "CLOSE_SECONDS", 0.3)


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
        assert (await read_frame(reader))[0] == TEXT
        assert await read_frame(reader) == (CLOSE, b"\x03\xe9no request for 0.3 s")
        assert time.monotonic() - began >= 0.5


async def test_close_frame_without_an_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "IDLE_SECONDS", 0.1)
    async with served() as (reader, writer):
        assert (await read_frame(reader))[0] == CLOSE
        writer.write(frame(PING) + frame(TEXT, b"{}"))
        assert await reader.read() == b""

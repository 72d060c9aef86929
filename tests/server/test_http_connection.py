"""The connection with misbehaving apps and idle clients."""

import asyncio
import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from dragoman.config.settings import Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.http.connection import AsgiApp, HttpConnection, ServerState
from dragoman.server.http.response import Receive, Scope, Send
from dragoman.server.http.server import HttpServer, bind_sockets
from dragoman.server.routes import create_app
from dragoman.server.telemetry.recorder import TelemetryRecorder

ASKED = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise ValueError("unexpected")


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    pass


async def halfway(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"beginning", "more_body": True})


async def _answer(
    app: AsgiApp, connection_made: Callable[[HttpConnection], None] = lambda connection: None
) -> tuple[bytes, ServerState]:
    settings = Settings()
    state = ServerState(app, settings.limits, TelemetryRecorder(settings.telemetry, None))

    def connection() -> HttpConnection:
        made = HttpConnection(state)
        connection_made(made)
        return made

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(ASKED)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer, state


@pytest.mark.parametrize("app", [broken, silent])
def test_unanswered_request_gets_500(app: AsgiApp) -> None:
    answer, state = asyncio.run(_answer(app))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert answer.endswith(b"Internal Server Error")
    assert not state.tasks


def test_cut_off_response_does_not_look_complete() -> None:
    answer, state = asyncio.run(_answer(halfway))
    assert b"beginning" in answer
    assert not answer.endswith(b"0\r\n\r\n")
    assert not state.tasks


@pytest.mark.parametrize("has_sent", [True, False])
async def test_head_that_a_busy_server_has_not_read_is_not_late(has_sent: bool) -> None:
    settings = Settings()
    state = ServerState(silent, settings.limits, TelemetryRecorder(settings.telemetry, None))
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: HttpConnection(state), "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while not state.connections:  # noqa: ASYNC110 (a set has no event)
            await asyncio.sleep(0.01)
        [connection] = state.connections
        assert isinstance(connection, HttpConnection)
        connection.transport.pause_reading()
        if has_sent:
            writer.write(ASKED)
            while not connection.buffer.has_unread:  # noqa: ASYNC110 (nor has a socket that is not read)
                await asyncio.sleep(0.01)
        late = loop.time() + settings.limits.body_seconds + 1
        connection.check(late)
        connection.check(late)
        connection.transport.resume_reading()
        async with asyncio.timeout(60):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 500 ") if has_sent else answer == b""
        writer.close()


def test_closed_connection_is_freed_without_garbage_collection() -> None:
    made: list[weakref.ref[HttpConnection]] = []

    async def play() -> None:
        await _answer(silent, lambda connection: made.append(weakref.ref(connection)))
        async with asyncio.timeout(60):
            while made[0]() is not None:  # noqa: ASYNC110 (a weak reference has no event)
                await asyncio.sleep(0.01)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(play())
    finally:
        gc.enable()


def test_forked_process_has_its_own_ids() -> None:
    program = (
        "import os\n"
        "from dragoman.core.ids import new_id\n"
        "new_id('')\n"
        "reads, writes = os.pipe()\n"
        "if not os.fork():\n"
        "    os.write(writes, '\\n'.join(new_id('') for _ in range(200)).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "theirs = os.read(reads, 100_000).decode().split()\n"
        "ours = [new_id('') for _ in range(200)]\n"
        "print(len({*ours, *theirs}))\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "400\n"


IDLE_SECONDS = 1.0


async def check_health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert await reader.readuntil(b"}") == b'{"status":"ok"}'


async def test_every_request_restarts_the_idle_timer() -> None:
    listeners = bind_sockets("127.0.0.1", 0)
    host, port = listeners[0].getsockname()
    server = HttpServer(create_app(ScriptedEngine()), listeners)
    server.state.keep_alive_seconds = IDLE_SECONDS
    stopping = asyncio.Event()
    running = asyncio.create_task(server.run(stopping, lambda: None))
    await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection(host, port)
    for _ in range(2):
        await check_health(reader, writer)
        await asyncio.sleep(IDLE_SECONDS * 0.6)
    await check_health(reader, writer)
    answered = time.monotonic()
    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert time.monotonic() - answered >= IDLE_SECONDS * 0.9
    writer.close()
    stopping.set()
    await running
    await server.end()

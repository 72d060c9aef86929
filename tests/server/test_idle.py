"""Idle connections are closed; active ones stay open."""

import asyncio

from uvicorn.server import ServerState

from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.factory import create_app
from dragoman.server.http.connection import connection_class
from dragoman.server.serve import AppServer

IDLE_SECONDS = 1.0


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
    assert await reader.readuntil(b"}") == b'{"status":"ok"}'


def test_every_request_restarts_the_idle_timer() -> None:
    async def scenario() -> None:
        app = create_app(ScriptedEngine())
        config = AppServer(app).config
        config.timeout_keep_alive = IDLE_SECONDS  # type: ignore[assignment]
        config.load()
        connection, loop = connection_class(app.settings.limits, app.telemetry), asyncio.get_running_loop()
        listening = await loop.create_server(lambda: connection(config, ServerState(), {}), "127.0.0.1")
        async with listening:
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            for _ in range(2):
                await ask(reader, writer)
                await asyncio.sleep(IDLE_SECONDS * 0.6)
            await ask(reader, writer)
            answered = loop.time()
            assert await asyncio.wait_for(reader.read(), 60) == b""
            assert loop.time() - answered >= IDLE_SECONDS * 0.9
            writer.close()

    asyncio.run(scenario())

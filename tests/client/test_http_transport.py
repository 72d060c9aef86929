"""Connections of the HTTP transport that the upstream engine and the load test share."""

import asyncio

import httpx
import pytest

from dragoman.client import http_transport


def test_idle_connection_is_closed_after_its_keepalive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "KEEPALIVE_SECONDS", 0.05)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        try:
            await reader.read()
        except ConnectionResetError:
            pass
        writer.close()
        closed.set()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with httpx.AsyncClient(transport=http_transport.HttpTransport(), trust_env=False) as client, server:
            port = server.sockets[0].getsockname()[1]
            assert (await client.get(f"http://127.0.0.1:{port}/")).text == "hi"
            async with asyncio.timeout(60):
                await closed.wait()

    asyncio.run(scenario())

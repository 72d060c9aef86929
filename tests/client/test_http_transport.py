"""Connections of the HTTP transport that the upstream engine and the load test share."""

import asyncio

import httpx
import pytest

from dragoman.client import http_transport
from tests.support.bad_server import BadServer, whole


def test_idle_connection_is_closed_after_its_keepalive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_transport, "KEEPALIVE_SECONDS", 0.05)

    async def ask(server: BadServer) -> None:
        async with httpx.AsyncClient(transport=http_transport.HttpTransport(), trust_env=False) as client:
            assert (await client.get(f"{server.url}/")).text == "hi"
            assert await asyncio.to_thread(server.left.wait, 60)

    with BadServer() as server:
        server.play([whole(b"hi"), "hang"], path="/")
        asyncio.run(ask(server))

"""An app with an upstream model: requests reach the app without sockets, and the upstream servers with sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.request import Delivery, GenerationRequest, Message, Text
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from dragoman.server.app import App
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER
from dragoman.server.routes import create_app
from tests.support.bad_server import BadServer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
REQUEST = GenerationRequest(model="m", messages=(Message("user", (Text("hello"),)),))
DEFAULT_SETTINGS = Settings()
STREAMED = GenerationRequest(model="m", messages=REQUEST.messages, delivery=Delivery(stream=True))


def upstream_app(
    *urls: str | Mapping[str, Any], name: str = "m", settings: Settings = DEFAULT_SETTINGS, **options: Any
) -> App:
    values = {"urls": list(urls), "protocol": "chat", "health_seconds": 0} | options
    model = ModelSpec(name, "upstream", options=values)
    return create_app(settings=msgspec.structs.replace(settings, models=(model,), models_dir=()))


@asynccontextmanager
async def client_of(app: App) -> AsyncIterator[httpx.AsyncClient]:
    """A client on this machine that may use admin routes. Stops the app at the end."""
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    headers = {ADMIN_TOKEN_HEADER: app.admin_token}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            yield client
    finally:
        await app.stop()


def ask(app: App, path: str = CHAT, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
    """Send one request, then stop the app."""
    return ask_all(app, [fields], path, headers)[0]


def ask_all(
    app: App, bodies: list[dict[str, Any]], path: str = CHAT, headers: Mapping[str, str] | None = None
) -> list[httpx.Response]:
    return asyncio.run(ask_all_async(app, bodies, path, headers))


async def ask_all_async(
    app: App, bodies: list[dict[str, Any]], path: str = CHAT, headers: Mapping[str, str] | None = None
) -> list[httpx.Response]:
    async with client_of(app) as client:
        return [
            await client.post(path, json={"model": "m", "messages": USER} | body, headers=headers, timeout=30)
            for body in bodies
        ]


def sent(server: BadServer, path: str = CHAT) -> list[dict[str, Any]]:
    return [json.loads(body) for body in server.requests[path]]


@asynccontextmanager
async def start_engine(*urls: str, probe: bool = False, **fields: Any) -> AsyncIterator[UpstreamEngine]:
    """An engine, with its probes if `probe` is set. The test must end all its generations."""
    options = UpstreamOptions(urls=urls, protocol="chat", **{"health_seconds": 0, **fields})
    engine = UpstreamEngine("m", options)
    try:
        if probe:
            await engine.start()
        yield engine
        assert not any(server.running for server in engine.states())
    finally:
        await engine.stop()

"""An app with an upstream model: requests reach the app without sockets, and the upstream servers with sockets."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.server.app import App
from dragoman.server.factory import create_app
from tests.support.bad_server import BadServer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


def upstream_app(*urls: str | Mapping[str, Any], **options: Any) -> App:
    values = {"urls": list(urls), "protocol": "chat", "health_seconds": 0} | options
    return create_app(settings=Settings(models=(ModelSpec("m", "upstream", options=values),)))


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
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            return [
                await client.post(path, json={"model": "m", "messages": USER} | body, headers=headers)
                for body in bodies
            ]
    finally:
        await app.stop()


def sent(server: BadServer, path: str = CHAT) -> list[dict[str, Any]]:
    return [json.loads(body) for body in server.requests[path]]

"""The answer to clients that ask for a WebSocket: there is none, and 426 says so."""

import msgspec

from dragoman.core.errors import UpgradeRequired
from dragoman.protocols import openai
from dragoman.server.http_exchange import Receive, Scope, Send

RESPONSES_PATH = "/v1/responses"
"""Codex tries a WebSocket here first."""


def upgrade_required(path: str) -> UpgradeRequired:
    return UpgradeRequired(f"there is no WebSocket here; send the request with POST to {path}")


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """For an app that is mounted into a server which accepts WebSockets."""
    await receive()
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if path != RESPONSES_PATH or "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    error = upgrade_required(path)
    body = msgspec.json.encode(openai.encode_error(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"upgrade", b"HTTP/1.1"),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})

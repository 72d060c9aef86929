"""The route table, and replies to requests without a route."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dragoman.core.errors import DragomanError, MethodNotAllowed, NotFound, UpgradeRequired
from dragoman.protocols import openai
from dragoman.protocols.registry import Family
from dragoman.server.asgi import Receive, Scope, Send
from dragoman.server.http_exchange import HttpExchange

RESPONSES_PATH = "/v1/responses"
"""Codex tries a WebSocket here first."""
Handler = Callable[[Any, HttpExchange], Awaitable[None]]
"""Called with the app and the exchange. A handler that a front end runs gets its `FrontEnd`, all others the `App`."""


@dataclass(frozen=True)
class Route:
    handler: Handler
    id_prefix: str = "req-"
    family: Family | None = None
    """The error format; None: chosen by the path and the headers of the request."""
    is_open: bool = False
    """Whether it works without a key."""
    runs_in_frontend: bool = False
    """Whether a front end runs the handler itself: it is expensive and has no state."""


Methods = Mapping[str, Route]


@dataclass(frozen=True)
class RouteTable:
    """Routes by path and method. `prefixes` contains the routes for all paths that start with a prefix."""

    paths: Mapping[str, Methods]
    prefixes: Mapping[str, Methods]

    def methods_at(self, path: str) -> Methods:
        """The routes of a path by method; empty for an unknown path."""
        methods = self.paths.get(path)
        if methods is not None:
            return methods
        for prefix, methods in self.prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return {}


def not_found_error(exchange: HttpExchange, hint: str = "") -> NotFound:
    return NotFound(f"there is nothing at {exchange.path[:100]}{hint}")


def no_route_error(exchange: HttpExchange, methods: Methods) -> DragomanError:
    if not methods:
        return not_found_error(exchange)
    exchange.response.extra_headers.append((b"allow", ", ".join(methods).encode()))
    return MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method[:20]}")


def upgrade_required(path: str) -> UpgradeRequired:
    return UpgradeRequired(f"WebSockets are not supported; send the request with POST to {path}")


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a WebSocket with 426. Only servers that the app is mounted into pass WebSockets on."""
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

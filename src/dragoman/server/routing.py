"""Routes and the table that finds them by path and method."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.core.errors import DragomanError, MethodNotAllowed, NotFound
from dragoman.protocols.registry import Family
from dragoman.server.http_exchange import Exchange

Handler = Callable[[Any, Exchange], Awaitable[None]]
"""Called with the app and the exchange. A handler that a front end runs gets its `FrontEnd`, all others the `App`."""


@dataclass(frozen=True)
class Route:
    handler: Handler
    id_prefix: str = "req-"
    family: Family | None = None
    """The error format; None: chosen by the path and the headers of the request."""
    is_open: bool = False
    """Whether it needs no key."""
    is_fronted: bool = False
    """Whether a front end runs the handler itself: expensive, and without state of its own."""


Methods = Mapping[str, Route]


@dataclass(frozen=True)
class RouteTable:
    """Routes by path and method. `below` has those for every path that begins with a prefix."""

    paths: Mapping[str, Methods]
    below: Mapping[str, Methods]

    def methods_at(self, path: str) -> Methods:
        """The routes at a path, by method; empty if there is none."""
        methods = self.paths.get(path)
        if methods is not None:
            return methods
        for prefix, methods in self.below.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return {}


def no_route(exchange: Exchange, methods: Methods) -> DragomanError:
    if not methods:
        return NotFound(f"there is nothing at {exchange.path[:100]}")
    exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
    return MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method[:20]}")

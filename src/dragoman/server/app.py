"""The ASGI app: a route table, and an answer for everything that can go wrong."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from dragoman.catalog import Catalog
from dragoman.config import Settings
from dragoman.engines.interface import Engine
from dragoman.errors import DragomanError, MethodNotAllowed, NotFound
from dragoman.protocols import PROTOCOLS, openai
from dragoman.server import listing
from dragoman.server.auth import Keys
from dragoman.server.exchange import Exchange, Receive, Scope, Send
from dragoman.server.respond import answer, new_id
from dragoman.server.watch import Watch
from dragoman.telemetry import EventLog

Handler = Callable[["App", Exchange], Awaitable[None]]

ROUTES: dict[str, dict[str, Handler]] = {
    "/": {"GET": listing.root},
    "/health": {"GET": listing.health},
    "/ready": {"GET": listing.ready},
    "/v1/models": {"GET": listing.models},
    "/v1/models/": {"GET": listing.one_model},
    "/v1/chat/completions": {"POST": partial(answer, protocol=PROTOCOLS["chat"])},
    "/v1/completions": {"POST": partial(answer, protocol=PROTOCOLS["completions"])},
    "/tokenize": {"POST": listing.tokenize},
    "/detokenize": {"POST": listing.detokenize},
}
"""A path that ends in a slash stands for everything below it."""

OPEN = frozenset({"/", "/health", "/ready"})
"""Paths that need no key."""


class App:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = ()) -> None:
        self.settings = settings
        self.catalog = Catalog(settings, engines)
        self.watch = Watch(settings.limits)
        self.log = EventLog(settings.event_log)
        self.created = int(time.time())
        self._keys = Keys(settings.api_keys)
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    def is_strict(self, exchange: Exchange) -> bool:
        asked = exchange.headers.get(b"x-dragoman-strict")
        return self.settings.strict if asked is None else asked.lower() in (b"true", b"1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Exchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close"})

    async def _http(self, exchange: Exchange) -> None:
        self.watch.add(exchange)
        try:
            with exchange.abort_as_error():
                await self._dispatch(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
        except Exception as error:  # noqa: BLE001 (told to the caller, and to the log)
            await self._fail(exchange, exchange.told(error))
        finally:
            self.watch.discard(exchange)
            exchange.close()
            self.log.request(exchange.record)

    async def _dispatch(self, exchange: Exchange) -> None:
        exchange.record.id = new_id("req-")
        exchange.check_host(self._hosts)
        if exchange.path not in OPEN:
            exchange.record.principal = self._keys.principal(exchange.headers)
        methods = self._methods(exchange.path)
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
            raise MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method[:20]}")
        await handler(self, exchange)

    def _methods(self, path: str) -> dict[str, Handler]:
        methods = ROUTES.get(path)
        if methods is not None and (not path.endswith("/") or path == "/"):
            return methods
        for route, below in ROUTES.items():
            if route != "/" and route.endswith("/") and path.startswith(route) and len(path) > len(route):
                return below
        raise NotFound(f"there is nothing at {path[:100]}")

    async def _fail(self, exchange: Exchange, error: DragomanError) -> None:
        exchange.record.status = error.status
        if exchange.begun:
            return
        if error.retry_after is not None:
            exchange.extra_headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
        await exchange.reply(error.status, msgspec.json.encode(openai.encode_error(error)))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def start(self) -> None:
        self.log.start([model.name for model in self.catalog.models.values()])

    async def stop(self) -> None:
        await self.catalog.stop()
        self.log.close()


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """An ASGI app that serves the engines given and the models of the settings; it mounts into any other ASGI app."""
    return App(settings or Settings(), engines)

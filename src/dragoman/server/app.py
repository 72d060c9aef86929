"""The ASGI app: a route table, and an answer for everything that can go wrong."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dragoman.catalog import Catalog
from dragoman.config import Limits, Settings
from dragoman.engines.interface import Engine
from dragoman.errors import DragomanError, MethodNotAllowed, NotFound, NotSupported, Unavailable
from dragoman.protocols import ANTHROPIC, OPENAI, PROTOCOLS, Family, Protocol, family
from dragoman.protocols.responses import PREFIX
from dragoman.server import embedding, listing, prompts, responses, upstreams
from dragoman.server.auth import Keys
from dragoman.server.exchange import Exchange, Receive, Scope, Send
from dragoman.server.respond import answer, new_id
from dragoman.server.watch import Watch
from dragoman.store import ResponseStore
from dragoman.store.memory import MemoryResponses
from dragoman.telemetry import EventLog

Handler = Callable[["App", Exchange], Awaitable[None]]


@dataclass(frozen=True)
class Route:
    handler: Handler
    id_prefix: str = "req-"
    family: Family | None = None
    """In whose words it tells of errors; None: in those of whoever asks."""
    is_open: bool = False
    """Whether it needs no key."""


def _generates(protocol: Protocol) -> Route:
    return Route(partial(answer, protocol=protocol), protocol.id_prefix, protocol.family)


ROUTES = {
    "/": {"GET": Route(listing.root, is_open=True)},
    "/health": {"GET": Route(listing.health, is_open=True)},
    "/ready": {"GET": Route(listing.ready, is_open=True)},
    "/v1/models": {"GET": Route(listing.models)},
    "/v1/chat/completions": {"POST": _generates(PROTOCOLS["chat"])},
    "/v1/chat/completions/render": {"POST": Route(prompts.render)},
    "/v1/completions": {"POST": _generates(PROTOCOLS["completions"])},
    "/v1/messages": {"POST": _generates(PROTOCOLS["messages"])},
    "/v1/messages/count_tokens": {"POST": Route(prompts.messages_count, family=ANTHROPIC)},
    responses.ROOT: {
        "POST": Route(responses.create, PREFIX, OPENAI),
        "GET": Route(responses.no_websocket, family=OPENAI),
    },
    f"{responses.ROOT}/input_tokens": {"POST": Route(responses.count, family=OPENAI)},
    "/v1/embeddings": {"POST": Route(embedding.embeddings, "emb-", OPENAI)},
    "/v1/rerank": {"POST": Route(embedding.rerank, "rerank-", OPENAI)},
    "/tokenize": {"POST": Route(listing.tokenize)},
    "/detokenize": {"POST": Route(listing.detokenize)},
    "/admin/upstreams": {"GET": Route(upstreams.show)},
    "/admin/upstreams/drain": {"POST": Route(upstreams.drain)},
}
"""Path, method, route."""

ROUTES_BELOW = {
    "/v1/models/": {"GET": Route(listing.one_model)},
    f"{responses.ROOT}/": {
        "GET": Route(responses.show, family=OPENAI),
        "DELETE": Route(responses.delete, family=OPENAI),
        "POST": Route(responses.cancel, family=OPENAI),
    },
}
"""The same for everything below a path."""


class App:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = ()) -> None:
        self.settings = settings
        self.catalog = Catalog(settings, engines)
        self.watch = Watch(settings.limits)
        self.log = EventLog(settings.event_log)
        self.responses: ResponseStore = _response_store(settings.limits)
        self.created = int(time.time())
        self._started = False
        self._keys = Keys(settings.api_keys)
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    def is_strict(self, exchange: Exchange) -> bool:
        asked = exchange.headers.get(b"x-dragoman-strict")
        return self.settings.strict if asked is None else asked.lower() in (b"true", b"1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await responses.refuse_websocket(scope, receive, send)
            return
        if not self._started:
            self.start()
        exchange = Exchange(scope, receive, send)
        self.watch.add(exchange)
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:
            error = exchange.take_cancellation()
            if error is not None:
                await self._fail(exchange, exchange.told(error))
            elif not exchange.gone:
                raise
        except Exception as error:  # noqa: BLE001 (told to the caller, and to the log)
            await self._fail(exchange, exchange.told(error))
        finally:
            self.watch.discard(exchange)
            exchange.close()
            self.log.request(exchange.record)

    async def _dispatch(self, exchange: Exchange) -> None:
        methods = _methods(exchange.path)
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        exchange.record.id = new_id(route.id_prefix if route else "req-")
        exchange.speak(route.family if route and route.family else family(exchange.path, exchange.headers))
        exchange.check_host(self._hosts)
        if route is None or not route.is_open:
            exchange.record.principal = self._keys.principal(exchange.headers)
        if route is None:
            raise _no_route(exchange, methods)
        await route.handler(self, exchange)

    async def _fail(self, exchange: Exchange, error: DragomanError) -> None:
        status = exchange.family.status(error)
        exchange.record.status = status
        if exchange.begun:
            return
        if error.status == NotSupported.status:
            # The SDKs try again after any 5xx; here nothing would be different.
            exchange.extra_headers.append((b"x-should-retry", b"false"))
        if error.retry_after is not None:
            exchange.extra_headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
        await exchange.reply_json(exchange.family.encode_error(error, exchange.record.id), status)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def start(self) -> None:
        """Called by the lifespan; an app that is mounted into another has none, and starts with its first request."""
        self._started = True
        self.log.start([model.name for model in self.catalog.models.values()])

    def stop_requests(self) -> None:
        """What is cancelled from now on, is because the server ends; whoever waits is told so."""
        for exchange in self.watch.watched:
            exchange.stopping = Unavailable("the server is stopping", retry_after=10)

    async def stop(self) -> None:
        await self.catalog.stop()
        self.log.close()


def _response_store(limits: Limits) -> ResponseStore:
    return MemoryResponses(count=limits.kept_responses, size=limits.kept_bytes, seconds=limits.kept_seconds)


def _methods(path: str) -> Mapping[str, Route]:
    """The routes at a path, by method; none where there is nothing."""
    methods = ROUTES.get(path)
    if methods is not None:
        return methods
    for pattern, methods in ROUTES_BELOW.items():
        if path.startswith(pattern) and len(path) > len(pattern):
            return methods
    return {}


def _no_route(exchange: Exchange, methods: Mapping[str, Route]) -> DragomanError:
    if not methods:
        return NotFound(f"there is nothing at {exchange.path[:100]}")
    exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
    return MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method[:20]}")


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """An ASGI app that serves the engines given and the models of the settings; it mounts into any other ASGI app."""
    return App(settings or Settings(), engines)

"""The ASGI app: a route table, and an answer for everything that can go wrong."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from dragoman import hops
from dragoman.catalog import Catalog, Model
from dragoman.config import Limits, Settings
from dragoman.engines.interface import Engine
from dragoman.errors import (
    ConfigError,
    DragomanError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotSupported,
    RateLimited,
    Unavailable,
)
from dragoman.protocols import ANTHROPIC, OPENAI, PROTOCOLS, Family, Protocol, family
from dragoman.protocols.admin import Reloaded
from dragoman.protocols.responses import PREFIX
from dragoman.quota import Lease
from dragoman.server import admin, embedding, listing, prompts, responses, stats, upstreams
from dragoman.server.auth import Access
from dragoman.server.cors import Origins, is_preflight
from dragoman.server.exchange import Exchange, Receive, Scope, Send
from dragoman.server.proxies import Proxies
from dragoman.server.respond import answer, new_id
from dragoman.server.scopes import scope_of
from dragoman.server.watch import Watch
from dragoman.store import ResponseStore
from dragoman.store.memory import MemoryResponses
from dragoman.telemetry import Telemetry

log = logging.getLogger("dragoman")

STOPPING = "the server is stopping"
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
    stats.METRICS: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    admin.ROOT: {"GET": Route(admin.models)},
    "/admin/reload": {"POST": Route(admin.reload)},
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
    f"{admin.ROOT}/": {"POST": Route(admin.change)},
}
"""The same for everything below a path."""


Reread = Callable[[], Settings]

FIXED = ("host", "port", "socket", "tls", "event_log", "grace_seconds")
FIXED_TELEMETRY = ("log_format", "log_level", "log_requests", "traces")
FIXED_LIMITS = (
    *("header_bytes", "body_seconds", "write_seconds", "keepalive_seconds", "stall_seconds"),
    *("kept_responses", "kept_bytes", "kept_seconds"),
)
"""Settings that stay as they were when the server started."""


def fixed_differences(before: Settings, after: Settings) -> tuple[str, ...]:
    sections: tuple[tuple[str, tuple[str, ...], msgspec.Struct, msgspec.Struct], ...] = (
        ("", FIXED, before, after),
        ("telemetry.", FIXED_TELEMETRY, before.telemetry, after.telemetry),
        ("limits.", FIXED_LIMITS, before.limits, after.limits),
    )
    return tuple(
        f"{section}{name}"
        for section, names, was, is_now in sections
        for name in names
        if getattr(was, name) != getattr(is_now, name)
    )


def with_fixed(settings: Settings, begun: Settings) -> Settings:
    """What a running server can take over of new settings: some of a kind must not be old and others new."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        telemetry=replace(settings.telemetry, **{name: getattr(begun.telemetry, name) for name in FIXED_TELEMETRY}),
        limits=replace(settings.limits, **{name: getattr(begun.limits, name) for name in FIXED_LIMITS}),
        **{name: getattr(begun, name) for name in FIXED},
    )


ONLY_ENGINES = Settings(models_dir=())
"""Who serves engines of their own does not expect others beside them."""


class App:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = (), reread: Reread | None = None) -> None:
        """`reread` gives the settings as they are written down now."""
        self.settings = settings
        self.catalog = Catalog(settings, engines)
        self.watch = Watch(settings.limits)
        self.telemetry = Telemetry(settings.telemetry, settings.event_log)
        self.is_stopping = False
        self.responses: ResponseStore = _response_store(settings.limits)
        self.created = int(time.time())
        self._started = False
        self._stopped = False
        self._reread = reread
        self._reloading = asyncio.Lock()
        self._begun_with = settings
        self._access = Access(settings)
        self._apply(settings, self._access, Proxies(settings.proxies))

    def _apply(self, settings: Settings, access: Access, proxies: Proxies) -> None:
        self._access = access
        self._origins = Origins(settings.cors)
        self._proxies = proxies
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    @property
    def can_reload(self) -> bool:
        return self._reread is not None

    async def reload(self) -> Reloaded:
        """Take the configuration over as it is now; where it has a mistake, a ConfigError, and all stays as it was."""
        if self._reread is None:
            raise NotSupported("this server was started without a configuration that could be read again")
        async with self._reloading:
            read = await asyncio.to_thread(self._reread)
            settings = with_fixed(read, self._begun_with)
            before = {name: spec for spec in self.settings.models for name in spec.names}
            after = {name: spec for spec in settings.models for name in spec.names}
            self._take_over(settings)
            told = Reloaded(
                models=tuple(after),
                added=tuple(name for name in after if name not in before),
                changed=tuple(name for name in after if name in before and before[name] != after[name]),
                removed=tuple(name for name in before if name not in after),
                restart_needed=fixed_differences(self._begun_with, read),
            )
            self.settings = settings
            log.info("the configuration was read again; models: %s", ", ".join(after) or "none")
        return told

    def _take_over(self, settings: Settings) -> None:
        """What may be refused comes first: then nothing has changed."""
        access, proxies = Access(settings), Proxies(settings.proxies)
        try:
            self.catalog.reconfigure(settings)
        except ConfigError:
            access.close()
            raise
        access.follow(self._access)
        self._apply(settings, access, proxies)

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
        if self.is_stopping:
            exchange.stopping = Unavailable(STOPPING, retry_after=10)
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
            self.telemetry.request(exchange.record)

    async def _dispatch(self, exchange: Exchange) -> None:
        methods = _methods(exchange.path)
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        exchange.record.id = new_id(route.id_prefix if route else "req-")
        exchange.speak(route.family if route and route.family else family(exchange.path, exchange.headers))
        exchange.check_host(self._hosts)
        self._note_client(exchange)
        if self._origins.greet(exchange) and is_preflight(exchange) and methods:
            self._origins.allow(exchange, [*methods, *(["HEAD"] if "GET" in methods else [])])
            await exchange.reply(b"", b"text/plain", 204)
            return
        if not self._is_open(exchange.path, route):
            self._let_in(exchange)
        if route is None:
            raise _no_route(exchange, methods)
        await route.handler(self, exchange)

    def _note_client(self, exchange: Exchange) -> None:
        record, peer = exchange.record, exchange.peer
        hops.arrive(exchange.headers.get(b"x-dragoman-via"))
        if self._proxies.is_empty:
            record.client = peer
        else:
            record.client = self._proxies.client(peer, exchange.headers)
            record.scheme = self._proxies.scheme(peer, exchange.headers)
        if self.telemetry.is_tracing and b"traceparent" in exchange.headers:
            record.trace = exchange.headers[b"traceparent"].decode("latin-1")[:100]

    def _is_open(self, path: str, route: Route | None) -> bool:
        is_open = route is not None and route.is_open
        return is_open or (path == stats.METRICS and self.settings.telemetry.metrics == "open")

    def _let_in(self, exchange: Exchange) -> None:
        """Who is asking, and whether it may: now, and this."""
        exchange.limit_time(self.settings.limits.request_seconds)
        exchange.caller = caller = self._access.caller(exchange.headers)
        exchange.record.principal = caller.principal
        exchange.record.scope = scope_of(exchange.path)
        caller.check_route(exchange.path)
        if caller.quota is not None and exchange.method == "POST":
            exchange.lease = Lease(caller.quota)
            exchange.lease.enter()

    def is_local(self, exchange: Exchange) -> bool:
        """Whether whoever asks is on this machine."""
        return self._proxies.is_local(exchange.peer, exchange.headers)

    async def model(self, exchange: Exchange, name: str) -> Model:
        """The model of this name, if the caller may ask it."""
        caller = exchange.caller
        try:
            model = await self.catalog.find(name)
        except ModelNotFound:
            if caller.models is None:
                raise
            # Its words would name what is none of this caller's business.
            words = f"model {name[:100]!r} is not served here; this key is for: {', '.join(caller.models) or 'none'}"
            raise ModelNotFound(words, param="model") from None
        exchange.record.model = model.label
        caller.check_model(model.name)
        return model

    def fallbacks(self, exchange: Exchange, model: Model) -> Iterator[Model]:
        """Those that may answer for it, if the caller may ask them."""
        return (other for other in self.catalog.fallbacks(model) if exchange.caller.may_ask(other.name))

    async def _fail(self, exchange: Exchange, error: DragomanError) -> None:
        status = exchange.family.status(error)
        exchange.record.status = status
        if isinstance(error, RateLimited):
            self.telemetry.metrics.limited[error.type] += 1
        if exchange.begun:
            return
        if error.status == NotSupported.status:
            # The SDKs try again after any 5xx; here nothing would be different.
            exchange.extra_headers.append((b"x-should-retry", b"false"))
        if error.retry_after is not None:
            exchange.extra_headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
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
        self.telemetry.start(stats.described(self))

    def stop_requests(self) -> None:
        """What is cancelled from now on, is because the server ends; whoever waits is told so."""
        self.is_stopping = True
        for exchange in self.watch.watched:
            exchange.stopping = Unavailable(STOPPING, retry_after=10)

    async def stop(self) -> None:
        """To stop twice is to stop once."""
        if self._stopped:
            return
        self._stopped = True
        await self.catalog.stop()
        self._access.close()
        self.telemetry.close()


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
    return App(settings or ONLY_ENGINES, engines)

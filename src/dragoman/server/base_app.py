"""Where requests come in: what is the same whether the server is one process or has front ends.

    App       everything in one process, and the parent of front ends (see `app`)
    FrontEnd  a process that has no state, and asks its parent (see `fronts`)

Every request gets an answer here, whatever goes wrong.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.errors import ConfigError, DragomanError, NotSupported, Unavailable
from dragoman.core.ids import new_id
from dragoman.protocols.registry import family
from dragoman.server.auth.access import Access
from dragoman.server.auth.scopes import scope_of
from dragoman.server.deadlines import Watch
from dragoman.server.http.cors import Origins, is_preflight
from dragoman.server.http.proxies import Proxies
from dragoman.server.http.websocket import refuse_websocket
from dragoman.server.http_exchange import Exchange, Receive, Scope, Send
from dragoman.server.model_lease import Engaging
from dragoman.server.routing import Route, RouteTable, no_route
from dragoman.server.telemetry import Recorder
from dragoman.storage.base import Keeping

STOPPING = "the server is stopping"
METRICS_PATH = "/metrics"


class Door(ABC):
    responses: Keeping

    def __init__(self, routes: RouteTable, settings: Settings, telemetry: Recorder) -> None:
        self.routes = routes
        self.settings = settings
        self.watch = Watch(settings.limits)
        self.telemetry = telemetry
        self.is_stopping = False
        self._started = False
        self._access = Access(settings)
        self._apply(settings, self._access, Proxies(settings.proxies))

    def _apply(self, settings: Settings, access: Access, proxies: Proxies) -> None:
        self.settings = settings
        self._access = access
        self._origins = Origins(settings.cors)
        self._proxies = proxies
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    def _adopt(self, settings: Settings) -> None:
        """Take over what may change while the server runs; a ConfigError leaves all as it was."""
        access, proxies = Access(settings), Proxies(settings.proxies)
        try:
            self._reconfigure(settings)
        except ConfigError:
            access.close()
            raise
        access.follow(self._access)
        self._apply(settings, access, proxies)

    @abstractmethod
    def _reconfigure(self, settings: Settings) -> None:
        """What else there is to change; it may still be refused."""

    @abstractmethod
    def start(self) -> None:
        """Called by the lifespan; an app that is mounted into another has none, and starts with its first request."""

    @abstractmethod
    async def stop(self) -> None:
        """To stop twice is to stop once."""

    @abstractmethod
    def engagement(self, exchange: Exchange) -> Engaging:
        """The hold on a model that the request will have."""

    @abstractmethod
    def _take_lease(self, exchange: Exchange, route: Route | None) -> Awaitable[None] | None:
        """Of the quota that the caller has; may ask to be waited for."""

    @abstractmethod
    def _answer(self, exchange: Exchange, route: Route) -> Awaitable[None]: ...

    def is_strict(self, exchange: Exchange) -> bool:
        asked = exchange.headers.get(b"x-dragoman-strict")
        return self.settings.strict if asked is None else asked.lower() in (b"true", b"1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await refuse_websocket(scope, receive, send)
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
            if not exchange.is_relayed:
                self.telemetry.request(exchange.record)

    async def _dispatch(self, exchange: Exchange) -> None:
        methods = self.routes.methods_at(exchange.path)
        if exchange.path not in self.routes.paths:
            # A caller may have put a key into the path by mistake.
            exchange.record.route = f"{exchange.method} {self._access.redact(exchange.path)[:100]}"
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        exchange.record.id = new_id(route.id_prefix if route else "req-")
        exchange.speak(route.family if route and route.family else family(exchange.path, exchange.headers))
        exchange.check_headers(self._hosts)
        self._note_client(exchange)
        if self._origins.greet(exchange) and is_preflight(exchange) and methods:
            self._origins.allow(exchange, [*methods, *(["HEAD"] if "GET" in methods else [])])
            await exchange.reply(b"", b"text/plain", 204)
            return
        if not self._is_open(exchange.path, route):
            self._let_in(exchange)
            pause = self._take_lease(exchange, route)
            if pause is not None:
                await pause
        if route is None:
            raise no_route(exchange, methods)
        await self._answer(exchange, route)

    def _note_client(self, exchange: Exchange) -> None:
        record, peer = exchange.record, exchange.peer
        loop_guard.arrive(exchange.headers.get(loop_guard.HEADER_BYTES))
        if self._proxies.is_empty:
            record.client = peer
        else:
            record.client = self._proxies.client(peer, exchange.headers)
            record.scheme = self._proxies.scheme(peer, exchange.headers)
        if self.telemetry.is_tracing and b"traceparent" in exchange.headers:
            record.trace = exchange.headers[b"traceparent"].decode("latin-1")[:100]

    def _is_open(self, path: str, route: Route | None) -> bool:
        is_open = route is not None and route.is_open
        return is_open or (path == METRICS_PATH and self.settings.telemetry.metrics == "open")

    def _let_in(self, exchange: Exchange) -> None:
        """Who is asking, and whether it may."""
        exchange.limit_time(self.settings.limits.request_seconds)
        exchange.caller = caller = self._access.caller(exchange.headers)
        exchange.record.principal = caller.principal
        exchange.record.scope = scope = scope_of(exchange.path)
        caller.check_route(scope)

    async def _fail(self, exchange: Exchange, error: DragomanError) -> None:
        status = exchange.family.status(error)
        exchange.record.status = status
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

    def stop_requests(self) -> None:
        """What is cancelled from now on, is because the server ends; whoever waits is told so."""
        self.is_stopping = True
        for exchange in self.watch.watched:
            exchange.stopping = Unavailable(STOPPING, retry_after=10)

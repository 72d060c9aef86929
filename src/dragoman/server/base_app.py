"""The base of the two ASGI apps: routing, authentication and error replies.

    App       serves in one process, or as the parent of front ends (see `app`)
    FrontEnd  a process without state that uses its parent's models (see `frontends`)

Every request gets a reply here, whatever fails.
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
from dragoman.server.asgi import Receive, Scope, Send
from dragoman.server.auth.access import Access
from dragoman.server.auth.scopes import scope_for_path
from dragoman.server.deadlines import DeadlineMonitor
from dragoman.server.http.cors import CorsPolicy, is_preflight
from dragoman.server.http.proxies import TrustedProxies
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import ModelLeaseProtocol
from dragoman.server.routing import Route, RouteTable, no_route_error, refuse_websocket
from dragoman.server.telemetry import Recorder
from dragoman.storage.base import BasicResponseStore

STOPPING = "the server is stopping"
METRICS_PATH = "/metrics"


class BaseApp(ABC):
    responses: BasicResponseStore

    def __init__(self, routes: RouteTable, settings: Settings, telemetry: Recorder) -> None:
        self.routes = routes
        self.settings = settings
        self.watch = DeadlineMonitor(settings.limits)
        self.telemetry = telemetry
        self.is_stopping = False
        self._started = False
        self._access = Access(settings)
        self._apply(settings, self._access, TrustedProxies(settings.proxies))

    def _apply(self, settings: Settings, access: Access, proxies: TrustedProxies) -> None:
        self.settings = settings
        self._access = access
        self._cors = CorsPolicy(settings.cors)
        self._proxies = proxies
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    def _apply_reloaded(self, settings: Settings) -> None:
        """Apply the settings that may change while the server runs. A ConfigError leaves everything as it was."""
        access, proxies = Access(settings), TrustedProxies(settings.proxies)
        try:
            self._reconfigure(settings)
        except ConfigError:
            access.close()
            raise
        access.follow(self._access)
        self._apply(settings, access, proxies)

    @abstractmethod
    def _reconfigure(self, settings: Settings) -> None:
        """Apply the settings to the subclass, or raise a ConfigError."""

    @abstractmethod
    def start(self) -> None:
        """Called by the lifespan, or by the first request of an app that is mounted into another one."""

    @abstractmethod
    async def stop(self) -> None:
        """Further calls do nothing."""

    @abstractmethod
    def model_lease(self, exchange: HttpExchange) -> ModelLeaseProtocol:
        """A new model lease for the request."""

    @abstractmethod
    def _enter_quota(self, exchange: HttpExchange, route: Route | None) -> Awaitable[None] | None:
        """Take a lease on the caller's quota. The result, if any, must be awaited."""

    @abstractmethod
    def _answer(self, exchange: HttpExchange, route: Route) -> Awaitable[None]: ...

    def is_strict(self, exchange: HttpExchange) -> bool:
        header = exchange.headers.get(b"x-dragoman-strict")
        return self.settings.strict if header is None else header.lower() in (b"true", b"1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await refuse_websocket(scope, receive, send)
            return
        if not self._started:
            self.start()
        exchange = HttpExchange(scope, receive, send)
        if self.is_stopping:
            exchange.stopping = Unavailable(STOPPING, retry_after=10)
        self.watch.add(exchange)
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:
            error = exchange.take_cancellation()
            if error is not None:
                await self._fail(exchange, exchange.public_error(error))
            elif not exchange.is_disconnected:
                raise
        except Exception as error:  # noqa: BLE001 (sent to the client and logged)
            await self._fail(exchange, exchange.public_error(error))
        finally:
            self.watch.discard(exchange)
            exchange.close()
            if not exchange.is_answered_by_parent:
                self.telemetry.request(exchange.record)

    async def _dispatch(self, exchange: HttpExchange) -> None:
        methods = self.routes.methods_at(exchange.path)
        if exchange.path not in self.routes.paths:
            # The path may contain a key by mistake.
            exchange.record.route = f"{exchange.method} {self._access.redact(exchange.path)[:100]}"
        route = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        exchange.record.id = new_id(route.id_prefix if route else "req-")
        exchange.response.set_family(
            route.family if route and route.family else family(exchange.path, exchange.headers)
        )
        exchange.check_headers(self._hosts)
        self._note_client(exchange)
        if self._cors.add_headers(exchange) and is_preflight(exchange) and methods:
            self._cors.add_preflight_headers(exchange, [*methods, *(["HEAD"] if "GET" in methods else [])])
            await exchange.response.send(b"", b"text/plain", 204)
            return
        if not self._is_open(exchange.path, route):
            self._authorize(exchange)
            entering = self._enter_quota(exchange, route)
            if entering is not None:
                await entering
        if route is None:
            raise no_route_error(exchange, methods)
        await self._answer(exchange, route)

    def _note_client(self, exchange: HttpExchange) -> None:
        record, peer = exchange.record, exchange.peer
        loop_guard.store_path_header(exchange.headers.get(loop_guard.HEADER_BYTES))
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

    def _authorize(self, exchange: HttpExchange) -> None:
        timeout = exchange.headers.get(b"x-dragoman-timeout")
        exchange.timer.set_deadline(self.settings.limits.request_seconds, timeout)
        exchange.caller = caller = self._access.caller(exchange.headers)
        exchange.record.principal = caller.principal
        exchange.record.scope = scope = scope_for_path(exchange.path)
        caller.check_route(scope)

    async def _fail(self, exchange: HttpExchange, error: DragomanError) -> None:
        response = exchange.response
        status = response.family.status(error)
        exchange.record.status = status
        if response.is_started:
            return
        if error.status == NotSupported.status:
            # The SDKs retry after any 5xx; a retry cannot succeed here.
            response.extra_headers.append((b"x-should-retry", b"false"))
        if error.retry_after is not None:
            response.extra_headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
        await response.send_json(response.family.encode_error(error, exchange.record.id), status)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def stop_requests(self) -> None:
        """From now on, a cancelled request gets the error that the server is stopping."""
        self.is_stopping = True
        for exchange in self.watch.watched:
            exchange.stopping = Unavailable(STOPPING, retry_after=10)

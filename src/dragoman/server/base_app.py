"""The base of the two ASGI apps: routing, authentication, time limits and error replies.

    App          serves in one process, or as the parent of front ends (see `app`)
    FrontEndApp  a process without state that uses its parent's models (see `frontends`)

Rules
1. Every request gets a reply here, whatever fails.
2. A request past its deadline, or past the time allowed for its next step, is aborted with a timeout error.
3. A silent stream gets a comment frame, so that proxies do not close it.
4. Listening for a client disconnect starts with the first check: most requests complete before it.
"""

import asyncio
import difflib
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.errors import (
    ConfigError,
    DragomanError,
    MethodNotAllowed,
    ModelLoading,
    ModelNotFound,
    NotSupported,
    PermissionDenied,
    QuotaExhausted,
    UpgradeRequired,
)
from dragoman.core.ids import new_id
from dragoman.core.types import RouteScope
from dragoman.protocols.registry import family
from dragoman.protocols.wire_protocol import Family
from dragoman.server.auth.access import Authenticator
from dragoman.server.auth.callers import ANONYMOUS, scope_for_path
from dragoman.server.auth.host_user import Identify
from dragoman.server.background import BackgroundStarter
from dragoman.server.detached_tasks import DetachedTasks
from dragoman.server.hooks import Hooks
from dragoman.server.http.headers import CorsPolicy, TrustedProxies
from dragoman.server.http.response import Receive, Scope, Send
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import ModelLease
from dragoman.server.request_timer import stopping_error
from dragoman.server.telemetry.recorder import Recorder
from dragoman.server.telemetry.recording import ExchangeRecording, RecordingFile
from dragoman.server.tool_servers import ToolServers
from dragoman.server.websocket.handshake import HandshakeRequest
from dragoman.server.websocket.response_cache import ProcessResponseCache
from dragoman.server.websocket.session import WebSocketSession
from dragoman.storage.batches import Batches
from dragoman.storage.blobs import BlobStore
from dragoman.storage.files import Files
from dragoman.storage.response_values import StoredResponses

METRICS_PATH = "/metrics"
RESPONSES_PATH = "/v1/responses"
CHECK_SECONDS = 0.25
MAX_SHOWN_PATH = 100
CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""An `X-Request-Id` that is returned and logged. Others are ignored."""

AppT = TypeVar("AppT", contravariant=True)
Handler = Callable[[AppT, HttpExchange], Awaitable[None]]


@dataclass(frozen=True)
class Route(Generic[AppT]):
    handler: Handler[AppT]
    id_prefix: str = "req-"
    family: Family | None = None
    """The error format; None: chosen by the path and the headers of the request."""
    is_open: bool = False
    """Whether it works without a key."""
    opens_websocket: bool = False
    scope: RouteScope | None = None
    """The scope that a key needs; None: chosen by the path."""
    is_recorded: bool = False
    """Whether its exchanges are recorded, if `record` is set."""


class SharedRoute(Route["BaseApp"]):
    """A route that a front end answers itself, because it is expensive and has no state."""


Methods = Mapping[str, Route[AppT]]


@dataclass(frozen=True)
class RouteTable(Generic[AppT]):
    """Routes by path and method. `prefixes` contains the routes for all paths that start with a prefix."""

    paths: Mapping[str, Methods[AppT]]
    prefixes: Mapping[str, Methods[AppT]]

    def methods_below(self, path: str) -> Methods[AppT]:
        """The routes by method of a path that starts with a prefix; empty for an unknown path."""
        for prefix, methods in self.prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods
        return {}

    def similar_path(self, path: str) -> str | None:
        """Return the path that was probably meant: the base URL lacks /v1 or has it twice, or a letter is wrong."""
        by_end = {known.removeprefix("/v1"): known for known in self.paths if known != "/"}
        sent = path.rstrip("/")
        ends = [end for end in by_end if sent.endswith(end)]
        close = [max(ends, key=len)] if ends else difflib.get_close_matches(sent.removeprefix("/v1"), by_end, n=1)
        return by_end[close[0]] if close else None


class BaseApp(ABC):
    responses: StoredResponses
    background: BackgroundStarter
    files: Files
    blobs: BlobStore
    batches: Batches
    tool_servers: ToolServers
    hooks: Hooks | None = None
    """Callables of the application that made this app."""
    identify: Identify | None = None
    """Finds the user of the application that this app is mounted into."""

    def __init__(self, routes: RouteTable[Any], settings: Settings, telemetry: Recorder) -> None:
        self.routes = routes
        self.telemetry = telemetry
        self.exchanges: set[HttpExchange] = set()
        """The open requests. One timer checks all of them."""
        self._timer: asyncio.TimerHandle | None = None
        self.tasks = DetachedTasks()
        self.response_cache = ProcessResponseCache()
        limits = settings.limits
        self._keepalive = limits.keepalive_seconds
        shortest = min(self._keepalive, limits.stall_seconds, limits.body_seconds, limits.request_seconds)
        self._check_interval = min(CHECK_SECONDS, shortest / 4)
        self.is_stopping = False
        self._started = False
        self._recording_file = None if settings.record is None else RecordingFile(settings.record)
        self._apply(settings, Authenticator(settings), TrustedProxies(settings.proxies))

    def _apply(self, settings: Settings, authenticator: Authenticator, proxies: TrustedProxies) -> None:
        self.settings = settings
        self._authenticator = authenticator
        self._cors = CorsPolicy(settings.cors)
        self._proxies = proxies
        self._hosts = None if settings.hosts is None else frozenset(name.lower().encode() for name in settings.hosts)

    def _apply_reloaded(self, settings: Settings) -> None:
        """Apply the settings that may change while the server runs. A ConfigError leaves everything as it was."""
        authenticator, proxies = Authenticator(settings), TrustedProxies(settings.proxies)
        try:
            self._reconfigure(settings)
        except ConfigError:
            authenticator.close()
            raise
        authenticator.inherit_quotas(self._authenticator)
        self._authenticator.close()
        self._apply(settings, authenticator, proxies)

    @abstractmethod
    def _reconfigure(self, settings: Settings) -> None:
        """Apply the settings to the subclass, or raise a ConfigError."""

    def start(self) -> None:
        """Called by the lifespan, or by the first request of an app that is mounted into another one."""
        self._started = True

    @abstractmethod
    async def stop(self) -> None:
        """Further calls do nothing."""

    @abstractmethod
    def model_lease(self, exchange: HttpExchange) -> ModelLease:
        """A new model lease for the request."""

    @abstractmethod
    def _enter_quota(self, exchange: HttpExchange, route: Route[Any] | None) -> Awaitable[None] | None:
        """Take a lease on the caller's quota. The result, if any, must be awaited."""

    @abstractmethod
    def _answer(self, exchange: HttpExchange, route: Route[Any]) -> Awaitable[None]: ...

    def public_error(self, exchange: HttpExchange, error: Exception) -> DragomanError:
        """The error as the client sees it, with the type that the settings ask for."""
        shown = exchange.public_error(error)
        if self.settings.errors == "lethean" and isinstance(shown, ModelNotFound | ModelLoading):
            shown.type = shown.code or shown.type
        return shown

    def check_origin(self, exchange: HttpExchange, action: str) -> None:
        """Refuse what a web page of an unknown origin may have sent. Browsers send forms and open WebSockets for every
        page."""
        if not self._cors.allows_page(exchange.headers):
            raise PermissionDenied(f"this origin may not {action} without a key; `cors.origins` allows origins")

    def is_strict(self, exchange: HttpExchange) -> bool:
        header = exchange.headers.get(b"x-dragoman-strict")
        return self.settings.strict if header is None else header.lower() in (b"true", b"1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if not self._started:
            self.start()
        if scope["type"] == "websocket":
            await self._open_websocket(scope, receive, send)
            return
        exchange = HttpExchange(scope, receive, send)
        if self.is_stopping:
            exchange.stopping = stopping_error()
        self.exchanges.add(exchange)
        if self._timer is None:
            self._start_timer()
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:
            error = exchange.take_cancellation()
            if error is not None:
                await self._fail(exchange, self.public_error(exchange, error))
            elif not exchange.is_disconnected:
                raise
        except Exception as error:  # noqa: BLE001 (sent to the client and logged)
            await self._fail(exchange, self.public_error(exchange, error))
        finally:
            self.exchanges.discard(exchange)
            exchange.close()
            if not exchange.is_answered_by_parent:
                self.telemetry.request(exchange.record)
                self._write_recording(exchange)

    async def _open_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        handshake = HandshakeRequest(scope, receive, send)
        await self(handshake.scope, handshake.receive, handshake.send)
        if handshake.is_accepted:
            await WebSocketSession(self, scope, receive, send).run()

    async def _dispatch(self, exchange: HttpExchange) -> None:
        path, method, response = exchange.path, exchange.method, exchange.response
        methods = self.routes.paths.get(path)
        if methods is None:
            methods = self.routes.methods_below(path)
            # The path may contain a key by mistake.
            exchange.record.route = f"{method} {self._authenticator.redact(path)[:MAX_SHOWN_PATH]}"
        route = methods.get("GET" if method == "HEAD" else method)
        job = exchange.job
        exchange.record.id = new_id(route.id_prefix if route else "req-") if job is None else job.id
        response.family = route.family if route and route.family else family(path, exchange.headers)
        if job is None:
            exchange.check_headers(self._hosts)
        self._note_client(exchange)
        if not self._cors.is_empty:
            response.extra_headers += self._cors.reply_headers(exchange.headers)
            if methods and self._is_preflight(exchange):
                allowed = [*methods, *(["HEAD"] if "GET" in methods else [])]
                response.extra_headers += self._cors.preflight_headers(exchange.headers, allowed)
                await response.send(b"", b"text/plain", 204)
                return
        is_open = route is not None and route.is_open
        if not (is_open or (path == METRICS_PATH and self.settings.telemetry.metrics == "open")):
            self._authorize(exchange, scope_for_path(path) if route is None or route.scope is None else route.scope)
            entering = self._enter_quota(exchange, route)
            if entering is not None:
                await entering
        if exchange.is_websocket and methods and not (route is not None and route.opens_websocket):
            raise UpgradeRequired(f"there is no WebSocket at {path}; send the request as HTTP")
        if route is not None:
            if route.is_recorded:
                response.recording = self._begin_recording(exchange)
            await self._answer(exchange, route)
        elif methods:
            response.extra_headers.append((b"allow", ", ".join(methods).encode()))
            raise MethodNotAllowed(f"{path} takes {' or '.join(methods)}, not {method[:20]}")
        else:
            similar = self.routes.similar_path(path[:MAX_SHOWN_PATH])
            raise exchange.not_found_error(f"; did you mean {similar}?" if similar else "")

    def _begin_recording(self, exchange: HttpExchange) -> ExchangeRecording | None:
        if self._recording_file is None:
            return None
        return ExchangeRecording(exchange.timer.started, None if exchange.job is None else exchange.job.kind)

    def _write_recording(self, exchange: HttpExchange) -> None:
        recording = exchange.response.recording
        if recording is not None and self._recording_file is not None:
            fields = exchange.record, exchange.headers, exchange.is_disconnected, self._authenticator.redact
            self._recording_file.write(recording.size, partial(recording.complete, *fields))

    async def _close_recording(self) -> None:
        if self._recording_file is not None:
            await asyncio.to_thread(self._recording_file.close)

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._check_interval, self._check_exchanges)

    def _check_exchanges(self) -> None:
        self._timer = None
        now = time.monotonic()
        for exchange in self.exchanges:
            exchange.check(now, self._keepalive)
        if self.exchanges:
            self._start_timer()

    def _is_preflight(self, exchange: HttpExchange) -> bool:
        headers = exchange.headers
        is_request = exchange.method == "OPTIONS" and b"access-control-request-method" in headers
        return is_request and self._cors.allows(headers)

    def _note_client(self, exchange: HttpExchange) -> None:
        record, peer = exchange.record, exchange.peer
        path_header = exchange.headers.get(loop_guard.HEADER_BYTES)
        if path_header is not None or loop_guard.stored_path.get():
            # A pipelined request starts with the context of the request before it.
            loop_guard.store_path_header(path_header)
        if self._proxies.is_empty:
            record.client = peer
        else:
            record.client = self._proxies.client(peer, exchange.headers)
            record.scheme = self._proxies.scheme(peer, exchange.headers)
        sent_id = exchange.headers.get(b"x-request-id", b"").decode("latin-1")
        # It may contain a key by mistake.
        if CLIENT_REQUEST_ID.fullmatch(sent_id) and self._authenticator.redact(sent_id) == sent_id:
            record.client_request_id = sent_id
        if self.telemetry.is_tracing and b"traceparent" in exchange.headers:
            record.trace = exchange.headers[b"traceparent"].decode("latin-1")[:100]

    def _authorize(self, exchange: HttpExchange, scope: RouteScope | None) -> None:
        if exchange.job is None:
            timer = exchange.timer
            timer.deadline = timer.started + self.settings.limits.request_seconds
            if b"x-dragoman-timeout" in exchange.headers:
                timer.shorten_deadline(exchange.headers[b"x-dragoman-timeout"])
            caller = self._authenticator.authenticate(exchange.headers)
            if caller.principal == ANONYMOUS and (principal := exchange.host_principal(self.identify)) is not None:
                caller = replace(caller, principal=principal)
        else:
            caller = exchange.job.caller
        exchange.caller = caller
        exchange.record.principal = caller.principal
        exchange.record.key = caller.key
        exchange.record.scope = scope
        caller.check_route(scope)

    async def _fail(self, exchange: HttpExchange, error: DragomanError) -> None:
        response = exchange.response
        status = response.family.status(error)
        exchange.record.status = status
        if response.is_started:
            return
        if isinstance(error, NotSupported | QuotaExhausted):
            # The SDKs retry after 429 and any 5xx; a retry cannot succeed here.
            response.extra_headers.append((b"x-should-retry", b"false"))
        if isinstance(error, UpgradeRequired):
            response.extra_headers.append((b"upgrade", b"HTTP/1.1"))
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
        for exchange in self.exchanges:
            exchange.stopping = stopping_error()

"""Contains the app of a front end: it answers the busiest routes itself and relays the others to the parent."""

import asyncio
from collections.abc import Awaitable

from dragoman.config.settings import Settings
from dragoman.server.base_app import BaseApp
from dragoman.server.frontends.messages import CancelRelay, ConfigApplied, Relay
from dragoman.server.frontends.remote import (
    ParentConnection,
    RemoteModelLease,
    RemoteQuotaLease,
    RemoteResponses,
    RemoteTelemetry,
    relay_request,
)
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routing import Route, RouteTable

END_SECONDS = 5.0
"""Time for cancelled requests to send their errors when the front end stops."""
POLL_SECONDS = 0.02


class FrontEndApp(BaseApp):
    def __init__(self, routes: RouteTable, settings: Settings, parent: ParentConnection) -> None:
        super().__init__(routes, settings, RemoteTelemetry(parent, settings))
        self.responses = RemoteResponses(parent)
        self._parent = parent

    def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_SECONDS
        while self.watch.watched and loop.time() < deadline:  # noqa: ASYNC110 (once)
            await asyncio.sleep(POLL_SECONDS)
        self._access.close()

    def configure(self, settings: Settings) -> None:
        """Apply settings that the parent has applied already."""
        self._apply_reloaded(settings)
        self._parent.send(ConfigApplied())

    def _reconfigure(self, settings: Settings) -> None:
        """Nothing here can reject new settings."""

    def model_lease(self, exchange: HttpExchange) -> RemoteModelLease:
        return RemoteModelLease(self._parent, exchange)

    def _enter_quota(self, exchange: HttpExchange, route: Route | None) -> Awaitable[None] | None:
        # The parent takes the lease of a relayed request.
        is_answered_by_parent = route is not None and not route.runs_in_frontend
        if exchange.caller.quota is None or exchange.method != "POST" or is_answered_by_parent:
            return None
        exchange.quota_lease = lease = RemoteQuotaLease()
        return lease.enter(self._parent, exchange)

    def _answer(self, exchange: HttpExchange, route: Route) -> Awaitable[None]:
        return route.handler(self, exchange) if route.runs_in_frontend else self._relay(exchange)

    async def _relay(self, exchange: HttpExchange) -> None:
        body = await exchange.read_body(self.settings.limits, bytes) if exchange.method == "POST" else b""
        message = Relay(exchange.record.id, exchange.serializable_scope(), body)
        # The parent enforces the deadline.
        exchange.is_answered_by_parent = True
        exchange.timer.stop()
        try:
            answer = await relay_request(self._parent, message)
        except asyncio.CancelledError:
            self._parent.send(CancelRelay(message.id))
            raise
        await exchange.response.relay(answer.status, answer.headers, answer.body)

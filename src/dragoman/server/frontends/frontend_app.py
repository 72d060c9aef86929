"""The door of a front end: what takes the most work is answered here, everything else by the parent."""

import asyncio
from collections.abc import Awaitable

from dragoman.config.settings import Settings
from dragoman.server.base_app import Door
from dragoman.server.frontends.messages import Drop, Relay
from dragoman.server.frontends.remote import (
    Parent,
    RemoteEngagement,
    RemoteLease,
    RemoteResponses,
    Reporting,
    relayed,
)
from dragoman.server.http_exchange import Exchange
from dragoman.server.routing import Route, RouteTable

END_SECONDS = 5.0
"""For what was cancelled to be told, when the front end stops."""
LOOK_SECONDS = 0.02


class FrontEnd(Door):
    def __init__(self, routes: RouteTable, settings: Settings, parent: Parent) -> None:
        super().__init__(routes, settings, Reporting(parent, settings))
        self.responses = RemoteResponses(parent)
        self._parent = parent

    def start(self) -> None:
        self._started = True

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.time() + END_SECONDS
        while self.watch.watched and loop.time() < patience:  # noqa: ASYNC110 (once)
            await asyncio.sleep(LOOK_SECONDS)
        self._access.close()

    def configure(self, settings: Settings) -> None:
        """The parent has adopted them already; what can be wrong here has become so since."""
        self._adopt(settings)
        self._parent.tell_adopted()

    def _reconfigure(self, settings: Settings) -> None:
        """There is nothing here that could refuse them."""

    def engagement(self, exchange: Exchange) -> RemoteEngagement:
        return RemoteEngagement(self._parent, exchange)

    def _take_lease(self, exchange: Exchange, route: Route | None) -> Awaitable[None] | None:
        # What the parent answers has its lease there.
        is_ours = route is None or route.is_fronted
        if exchange.caller.quota is None or exchange.method != "POST" or not is_ours:
            return None
        exchange.lease = lease = RemoteLease()
        return lease.enter(self._parent, exchange)

    def _answer(self, exchange: Exchange, route: Route) -> Awaitable[None]:
        return route.handler(self, exchange) if route.is_fronted else self._relay(exchange)

    async def _relay(self, exchange: Exchange) -> None:
        body = await exchange.decoded(self.settings.limits, bytes) if exchange.method == "POST" else b""
        question = Relay(exchange.record.id, exchange.plain_scope(), body)
        # How long it may take is the parent's to say.
        exchange.is_relayed = True
        exchange.timer.stop()
        try:
            answer = await relayed(self._parent, question)
        except asyncio.CancelledError:
            self._parent.send(Drop(question.id))
            raise
        await exchange.response.relay(answer.status, answer.headers, answer.body)

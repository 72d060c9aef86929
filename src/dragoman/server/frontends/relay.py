"""Answers relayed requests and queries of stored responses for a front end.

A relayed request is answered by calling the app as an ASGI server would.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dragoman.server.app import App
from dragoman.server.frontends import messages
from dragoman.server.frontends.request_state import FrontEndOutput, Handler


class RelayedRequest:
    def __init__(self, message: messages.Relay) -> None:
        self.task: asyncio.Task[None] | None = None
        self._message = message
        self._is_body_read = False
        self._disconnected = asyncio.Event()
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def disconnect(self) -> None:
        self._disconnected.set()

    async def answer(self, app: Any) -> messages.RelayReply:
        scope = self._message.scope | {"asgi": {"version": "3.0"}, "server": None, "extensions": {}}
        await app(scope, self._receive, self._send)
        return messages.RelayReply(self._message.id, self._status, self._headers, b"".join(self._body))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_body_read:
            self._is_body_read = True
            return {"type": "http.request", "body": self._message.body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        else:
            self._body.append(message.get("body", b""))


class AppCallHandlers:
    """Handles relayed requests and queries of stored responses."""

    def __init__(self, app: App, connection: FrontEndOutput) -> None:
        self._app = app
        self._connection = connection
        self._relays: dict[str, RelayedRequest] = {}

    def handlers(self) -> dict[type, Handler]:
        return {
            messages.Relay: self._relay,
            messages.CancelRelay: self._cancel_relay,
            messages.FindResponse: self._in_task(self._find_response),
            messages.FindItems: self._in_task(self._find_items),
            messages.StoreResponse: self._in_task(self._store_response),
        }

    def _in_task(self, handle: Callable[[Any], Coroutine[Any, Any, None]]) -> Handler:
        return lambda message: self._connection.spawn(message.id, handle(message))

    def close(self) -> int:
        """Disconnect all relayed requests; return their number."""
        count = len(self._relays)
        for relay in self._relays.values():
            relay.disconnect()
        self._relays.clear()
        return count

    def _relay(self, message: messages.Relay) -> None:
        self._relays[message.id] = relay = RelayedRequest(message)
        relay.task = self._connection.spawn(message.id, self._answer(message.id, relay))

    async def _answer(self, request_id: str, relay: RelayedRequest) -> None:
        try:
            answer = await relay.answer(self._app)
        finally:
            is_wanted = self._relays.pop(request_id, None) is not None
        if is_wanted:
            self._connection.send(answer)

    def _cancel_relay(self, message: messages.CancelRelay) -> None:
        relay = self._relays.pop(message.id, None)
        if relay is None or relay.task is None:
            return
        if self._app.is_stopping:
            relay.task.cancel()
        else:
            relay.disconnect()

    async def _find_response(self, message: messages.FindResponse) -> None:
        response = await self._app.responses.find(message.principal, message.response)
        self._connection.send(messages.StoreReply(message.id, response))

    async def _find_items(self, message: messages.FindItems) -> None:
        items = await self._app.responses.items(message.principal, message.items)
        self._connection.send(messages.StoreReply(message.id, items=dict(items)))

    async def _store_response(self, message: messages.StoreResponse) -> None:
        await self._app.responses.keep(message.response)
        self._connection.send(messages.StoreReply(message.id))

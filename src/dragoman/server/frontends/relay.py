"""Answers requests that a front end relays to the parent, by calling the app as an ASGI server would."""

import asyncio
from typing import Any

from dragoman.server.frontends.messages import Relay, Relayed


class RelayedRequest:
    def __init__(self, message: Relay) -> None:
        self.task: asyncio.Task[None] | None = None
        self._message = message
        self._is_body_read = False
        self._disconnected = asyncio.Event()
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def disconnect(self) -> None:
        self._disconnected.set()

    async def answer(self, app: Any) -> Relayed:
        scope = self._message.scope | {"asgi": {"version": "3.0"}, "server": None, "extensions": {}}
        await app(scope, self._receive, self._send)
        return Relayed(self._message.id, self._status, self._headers, b"".join(self._body))

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

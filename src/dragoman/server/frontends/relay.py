"""A request that the parent answers for a front end: the app is called as a server would call it."""

import asyncio
from typing import Any

from dragoman.server.frontends.messages import Relay, Relayed


class Passing:
    def __init__(self, question: Relay) -> None:
        self.question = question
        self.task: asyncio.Task[None] | None = None
        self._given = False
        self._left = asyncio.Event()
        self._status = 500
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self.question.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
        else:
            self._body.append(message.get("body", b""))

    def answer(self) -> Relayed:
        return Relayed(self.question.id, self._status, self._headers, b"".join(self._body))

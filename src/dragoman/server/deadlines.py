"""What takes long: one timer looks at every request that is not answered yet.

Rules
1. A request past its `due` time is aborted with the error it has ready for that, one past its deadline in any case.
2. A silent stream gets a comment frame, so that nobody in between closes it.
3. Whether the client has left is listened for only from the first look on: most requests are answered before.
"""

import asyncio
import time

from dragoman.config.settings import Limits
from dragoman.server.http_exchange import Exchange

LOOK_SECONDS = 0.25


class Watch:
    def __init__(self, limits: Limits) -> None:
        self._keepalive = limits.keepalive_seconds
        allowed = (self._keepalive, limits.stall_seconds, limits.body_seconds, limits.request_seconds)
        self._interval = min(LOOK_SECONDS, min(allowed) / 4)
        self.watched: set[Exchange] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, exchange: Exchange) -> None:
        self.watched.add(exchange)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def discard(self, exchange: Exchange) -> None:
        self.watched.discard(exchange)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for exchange in self.watched:
            exchange.listen()
            if now > exchange.deadline:
                exchange.abort_late()
            elif now > exchange.due:
                exchange.abort_overdue()
            elif exchange.streaming and now - exchange.written > self._keepalive:
                exchange.ping()
        if self.watched:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

"""Silence: who has heard nothing for too long.

One timer looks at all streams. A silent stream gets a comment frame so that nobody in between closes it; a request
whose engine says nothing for too long is ended.
"""

import asyncio
import time
from typing import Protocol

from dragoman.config import Limits
from dragoman.errors import DragomanError, EngineTimeout


class Watched(Protocol):
    streaming: bool
    written: float
    heard: float

    def ping(self) -> None: ...

    def abort(self, error: DragomanError) -> None: ...


class Watch:
    def __init__(self, limits: Limits) -> None:
        self._keepalive = limits.keepalive_seconds
        self._stall = limits.stall_seconds
        self._interval = min(1.0, self._keepalive / 4, self._stall / 4)
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, exchange: Watched) -> None:
        self._watched.add(exchange)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

    def discard(self, exchange: Watched) -> None:
        self._watched.discard(exchange)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for exchange in self._watched:
            if now - exchange.heard > self._stall:
                exchange.abort(EngineTimeout(f"the engine gave no answer within {self._stall:g} s"))
            elif exchange.streaming and now - exchange.written > self._keepalive:
                exchange.ping()
        if self._watched:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._look)

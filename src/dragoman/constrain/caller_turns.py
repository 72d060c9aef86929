"""Turns between callers: a bounded number at once, of which one caller has some at most.

Callers who wait take turns, however many requests each of them has waiting.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class CallerTurns:
    """For one event loop."""

    def __init__(self, total: int, per_caller: int) -> None:
        self._free = total
        self._per_caller = per_caller
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[None, None]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            # A request that is cancelled while it waits stays in line until its turn comes, and is passed over then.
            if not granted.cancelled():
                self._release(caller)

    def _grant(self) -> None:
        while self._free:
            caller = next((name for name in self._waiting if self._running[name] < self._per_caller), None)
            if caller is None:
                return
            # The next one is another caller, if any other waits.
            self._waiting.move_to_end(caller)
            granted = self._waiting[caller].popleft()
            if not self._waiting[caller]:
                del self._waiting[caller]
            if not granted.cancelled():
                self._running[caller] += 1
                self._free -= 1
                granted.set_result(None)

    def _release(self, caller: str) -> None:
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        self._free += 1
        self._grant()

"""A semaphore that is fair to callers."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class FairSemaphore:
    """Limits concurrent work in total and per caller. Waiting callers are served in rotation. Not thread-safe."""

    def __init__(self, total: int, per_caller: int) -> None:
        self._free = total
        self._per_caller = per_caller
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def acquire(self, caller: str) -> AsyncGenerator[None, None]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(granted)
        self._grant()
        try:
            await granted
            yield
        finally:
            # `_grant` skips a request that was cancelled while it waited.
            if not granted.cancelled():
                self._release(caller)

    def _grant(self) -> None:
        while self._free:
            caller = next((name for name in self._waiting if self._running[name] < self._per_caller), None)
            if caller is None:
                return
            # Serve another waiting caller next.
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

"""Responses in memory, gone with the process.

The oldest make room for the new: there are at most so many, of so many bytes together, and none lives longer than its
time. A response that is larger than all the room there is, is not kept.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from dragoman.storage.base import KeptResponse

OVERHEAD = 512
"""Bytes that a response and each of its items take beside their own, roughly."""


class MemoryResponses:
    def __init__(self, *, count: int, size: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._size = size
        self._seconds = seconds
        self._clock = clock
        self._kept: dict[str, tuple[float, KeptResponse]] = {}
        """By age: what was kept first comes first."""
        self._holders: dict[tuple[str, str], dict[str, bytes]] = {}
        """Of each item of a principal the responses that have it, each with its body."""
        self._held = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def keep(self, response: KeptResponse) -> None:
        size = _weight(response)
        if size > self._size:
            return
        # Made before anything changes: what cannot be found by its items is not half kept.
        bodies = {(response.principal, item.id): item.body for item in response.items}
        self._remove(response.id)
        self._forget_old()
        while self._kept and (len(self._kept) >= self._count or self._held + size > self._size):
            self._remove(next(iter(self._kept)))
        self._kept[response.id] = self._clock() + self._seconds, response
        self._held += size
        for key, body in bodies.items():
            self._holders.setdefault(key, {})[response.id] = body

    async def find(self, principal: str, response_id: str) -> KeptResponse | None:
        self._forget_old()
        _, response = self._kept.get(response_id, (0, None))
        return response if response is not None and response.principal == principal else None

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        self._forget_old()
        found = ((item, self._holders.get((principal, item))) for item in ids)
        return {item: next(reversed(bodies.values())) for item, bodies in found if bodies}

    async def delete(self, principal: str, response_id: str) -> bool:
        if await self.find(principal, response_id) is None:
            return False
        self._remove(response_id)
        return True

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._remove(next(iter(self._kept)))

    def _remove(self, response_id: str) -> None:
        _, response = self._kept.pop(response_id, (0, None))
        if response is None:
            return
        self._held -= _weight(response)
        for item in response.items:
            key = response.principal, item.id
            holders = self._holders.get(key, {})
            holders.pop(response_id, None)
            if not holders:
                self._holders.pop(key, None)


def _weight(response: KeptResponse) -> int:
    return response.size + OVERHEAD * (1 + len(response.items))

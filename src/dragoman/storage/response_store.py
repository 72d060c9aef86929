"""Stores responses, and defines the interface of their stores.

Rules
1. Every response belongs to a principal. Other principals cannot see it.
2. A response can be found as soon as `keep` has returned, until it is deleted, expires, or newer ones need the room.
3. In memory, the number of responses, their total size and their age are limited; the oldest are evicted first. A
   response that is larger than the size limit is not stored.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

OVERHEAD = 512
"""Approximate overhead in bytes of a response and of each item."""


class StoredItem(msgspec.Struct, frozen=True):
    """An item of a conversation; `body` is its JSON."""

    id: str
    body: bytes


class StoredResponse(msgspec.Struct, frozen=True):
    """A response with its input and output items; `body` is its JSON, including the items."""

    id: str
    principal: str
    body: bytes
    input: tuple[StoredItem, ...]
    output: tuple[StoredItem, ...]

    @property
    def items(self) -> tuple[StoredItem, ...]:
        return self.input + self.output

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(item.body) for item in self.items)


class ResponseStore(Protocol):
    async def keep(self, response: StoredResponse) -> None: ...

    async def find(self, principal: str, response_id: str) -> StoredResponse | None: ...

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        """Return the bodies of the items that exist, in any response."""


class MemoryResponseStore:
    def __init__(self, *, count: int, size: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_count = count
        self._max_bytes = size
        self._max_age = seconds
        self._clock = clock
        self._responses: dict[str, tuple[float, StoredResponse]] = {}
        """With the expiry time, oldest first."""
        self._item_bodies: dict[tuple[str, str], dict[str, bytes]] = {}
        """Bodies of each item of a principal, by response id."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    async def keep(self, response: StoredResponse) -> None:
        size = _memory_size(response)
        if size > self._max_bytes:
            return
        # Built before anything changes: an invalid item must not leave a partial entry.
        bodies = {(response.principal, item.id): item.body for item in response.items}
        self._remove(response.id)
        self._evict_expired()
        while self._responses and (len(self._responses) >= self._max_count or self._bytes + size > self._max_bytes):
            self._remove(next(iter(self._responses)))
        self._responses[response.id] = self._clock() + self._max_age, response
        self._bytes += size
        for key, body in bodies.items():
            self._item_bodies.setdefault(key, {})[response.id] = body

    async def find(self, principal: str, response_id: str) -> StoredResponse | None:
        self._evict_expired()
        _, response = self._responses.get(response_id, (0, None))
        return response if response is not None and response.principal == principal else None

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        self._evict_expired()
        found = ((item, self._item_bodies.get((principal, item))) for item in ids)
        return {item: next(reversed(bodies.values())) for item, bodies in found if bodies}

    async def delete(self, principal: str, response_id: str) -> bool:
        """Return whether the response existed."""
        if await self.find(principal, response_id) is None:
            return False
        self._remove(response_id)
        return True

    def _evict_expired(self) -> None:
        now = self._clock()
        while self._responses and next(iter(self._responses.values()))[0] <= now:
            self._remove(next(iter(self._responses)))

    def _remove(self, response_id: str) -> None:
        _, response = self._responses.pop(response_id, (0, None))
        if response is None:
            return
        self._bytes -= _memory_size(response)
        for item in response.items:
            key = response.principal, item.id
            bodies_by_response = self._item_bodies.get(key, {})
            bodies_by_response.pop(response_id, None)
            if not bodies_by_response:
                self._item_bodies.pop(key, None)


def _memory_size(response: StoredResponse) -> int:
    return response.size + OVERHEAD * (1 + len(response.items))

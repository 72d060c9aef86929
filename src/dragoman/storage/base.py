"""Defines stored responses and the interface of their stores.

Rules
1. Every response belongs to a principal. Other principals cannot see it.
2. A response can be found as soon as `keep` has returned, until it is deleted, expires, or newer ones need the room.

    memory.py  responses in memory
    keys.py    API keys in SQLite
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec


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


class BasicResponseStore(Protocol):
    async def keep(self, response: StoredResponse) -> None: ...

    async def find(self, principal: str, response_id: str) -> StoredResponse | None: ...

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        """Return the bodies of the items that exist, in any response."""


class ResponseStore(BasicResponseStore, Protocol):
    async def delete(self, principal: str, response_id: str) -> bool:
        """Return whether the response existed."""

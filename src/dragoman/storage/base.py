"""What is kept between requests, behind small interfaces.

Rules
1. Every response belongs to a principal. What belongs to another one is not there.
2. Who keeps something finds it again as soon as `keep` has returned, until it is deleted or too old, or until what is
   newer needs the room.

    memory.py  responses, in memory
    keys.py    keys, in a file of SQLite's: the operator's, and no principal's
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec


class KeptItem(msgspec.Struct, frozen=True):
    """An item of a conversation: `body` is its JSON."""

    id: str
    body: bytes


class KeptResponse(msgspec.Struct, frozen=True):
    """A response, what it answered and what it answered with; `body` is its JSON, items included."""

    id: str
    principal: str
    body: bytes
    input: tuple[KeptItem, ...]
    output: tuple[KeptItem, ...]

    @property
    def items(self) -> tuple[KeptItem, ...]:
        return self.input + self.output

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(item.body) for item in self.items)


class Keeping(Protocol):
    async def keep(self, response: KeptResponse) -> None: ...

    async def find(self, principal: str, response_id: str) -> KeptResponse | None: ...

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        """Those of the items that are there, whichever response they belong to."""


class ResponseStore(Keeping, Protocol):
    async def delete(self, principal: str, response_id: str) -> bool:
        """Whether there was one."""

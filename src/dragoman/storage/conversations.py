"""Stores conversations: lists of items that responses continue.

Rules
1. Every conversation belongs to a principal. Other principals cannot see it.
2. Items that are added at the same time by several callers are all kept, those of one call together and in order.
3. A conversation is removed when it was not changed for as long as responses are kept (`storage.keep.responses`). In
   memory their number and their total size are limited as those of responses are.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlalchemy import Connection

from dragoman.core.errors import NotFound, TooLarge, quote
from dragoman.core.ids import new_id
from dragoman.protocols.files import Order
from dragoman.protocols.responses.items import MAX_ITEMS
from dragoman.storage import conversation_sql
from dragoman.storage.conversation_sql import ConversationFull, ItemPage, StoredConversation, UnknownItem
from dragoman.storage.database import Database
from dragoman.storage.response_sql import Bounds
from dragoman.storage.response_values import StoredItem
from dragoman.storage.responses import ID
from dragoman.storage.space import SpaceLimit

PREFIX = "conv_"
T = TypeVar("T")


class ConversationStore:
    """`keep_seconds` is how long an unused conversation is kept, `most` how many bytes its items may have."""

    def __init__(
        self,
        database: Database,
        keep_seconds: float,
        bounds: Bounds | None,
        most: int,
        space: SpaceLimit | None = None,
    ) -> None:
        self._database = database
        self._keep_seconds = keep_seconds
        self._bounds = bounds
        self.most = most
        self._space = space

    async def create(self, principal: str, metadata: bytes, items: Sequence[StoredItem]) -> StoredConversation:
        created = StoredConversation(new_id(PREFIX), principal, float(int(time.time())), metadata)

        def change(connection: Connection) -> None:
            conversation_sql.create(connection, created, items)
            if self._bounds is not None:
                conversation_sql.evict(connection, *self._bounds)

        await self._take_space(principal, items)
        await self._database.write(change)
        return created

    async def _take_space(self, principal: str, items: Sequence[StoredItem]) -> None:
        if self._space is not None:
            await self._space.take(principal, conversation_sql.OVERHEAD + conversation_sql.size_of(items))

    async def find(self, principal: str, conversation_id: str) -> StoredConversation | None:
        if not ID.fullmatch(conversation_id):
            return None
        find = conversation_sql.find
        return await self._database.read(lambda connection: find(connection, principal, conversation_id))

    async def page(
        self, principal: str, conversation_id: str, limit: int, order: Order, after: str | None
    ) -> ItemPage | None:
        if not ID.fullmatch(conversation_id):
            return None
        arguments, find_page = (principal, conversation_id, limit, order, after), conversation_sql.find_page
        try:
            return await self._database.read(lambda connection: find_page(connection, *arguments))
        except UnknownItem:
            raise NotFound(f"after: there is no item {quote(after or '')}", param="after") from None

    async def item(self, conversation_id: str, item_id: str) -> bytes | None:
        """An item of a conversation that was found."""
        find_item = conversation_sql.find_item
        return await self._database.read(lambda connection: find_item(connection, conversation_id, item_id))

    async def append(
        self, principal: str, conversation_id: str, items: Sequence[StoredItem]
    ) -> tuple[StoredItem, ...] | None:
        """Add items, and return them as they are stored."""
        arguments = principal, conversation_id, items, time.time(), self.most
        append = conversation_sql.append
        await self._take_space(principal, items)
        try:
            return await self._write(conversation_id, lambda connection: append(connection, *arguments))
        except ConversationFull:
            message = f"the items of the conversation are larger than {self.most} bytes or more than {MAX_ITEMS}"
            raise TooLarge(message, param="items") from None

    async def set_metadata(self, principal: str, conversation_id: str, metadata: bytes) -> StoredConversation | None:
        arguments = principal, conversation_id, metadata, time.time()
        return await self._write(
            conversation_id, lambda connection: conversation_sql.set_metadata(connection, *arguments)
        )

    async def delete(self, principal: str, conversation_id: str) -> bool:
        """Return whether the conversation existed."""
        remove = conversation_sql.remove
        return bool(
            await self._write(conversation_id, lambda connection: remove(connection, principal, conversation_id))
        )

    async def delete_item(self, principal: str, conversation_id: str, item_id: str) -> bool:
        """Return whether the item existed."""
        arguments = principal, conversation_id, item_id, time.time()
        return bool(
            await self._write(conversation_id, lambda connection: conversation_sql.remove_item(connection, *arguments))
        )

    async def remove_unused(self) -> None:
        if not self._database.is_open:
            return
        before = time.time() - self._keep_seconds
        while await self._database.write(lambda connection: conversation_sql.remove_unused(connection, before)):
            pass

    async def _write(self, conversation_id: str, change: Callable[[Connection], T]) -> T | None:
        return await self._database.write(change) if ID.fullmatch(conversation_id) else None

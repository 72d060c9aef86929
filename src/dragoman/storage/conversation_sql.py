"""The statements about conversations. Each function runs within a transaction."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from dragoman.core.ids import new_id
from dragoman.protocols.files import Order
from dragoman.protocols.responses.items import MAX_ITEMS
from dragoman.storage.response_values import StoredItem
from dragoman.storage.tables import conversation_items, conversations

OVERHEAD = 512
"""Approximate overhead in bytes of a conversation and of each item."""
GROUP = 200
"""Conversations that one statement removes."""


class StoredConversation(msgspec.Struct, frozen=True):
    """`metadata` is JSON."""

    id: str
    principal: str
    created: float
    metadata: bytes


_HEAD = (conversations.c.id, conversations.c.principal, conversations.c.created, conversations.c.metadata)


def item_key(item_id: str) -> bytes:
    """Callers can choose ids, and Postgres refuses NUL characters in text."""
    return item_id.encode("utf-8", "surrogatepass")


def size_of(items: Sequence[StoredItem]) -> int:
    return sum(len(item.body) + OVERHEAD for item in items)


def create(connection: Connection, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
    values = {**msgspec.structs.asdict(conversation), "used": conversation.created, "size": OVERHEAD}
    connection.execute(insert(conversations).values(values))
    append(connection, conversation.principal, conversation.id, items, conversation.created)


def append(
    connection: Connection,
    principal: str,
    conversation_id: str,
    items: Sequence[StoredItem],
    now: float,
    most: int | None = None,
) -> tuple[StoredItem, ...] | None:
    """Add items at the end, and return them as they are stored: one whose id is taken gets another. None: there is no
    such conversation. With `most`, nothing is added if the items would have more bytes than that, or be
    more than a request may have."""
    size = size_of(items)
    # The update locks the row, so that items of two transactions do not get the same positions.
    change = update(conversations).where(_is_own(principal, conversation_id))
    changed = change.values(used=now, size=conversations.c.size + size).returning(conversations.c.size)
    total = connection.execute(changed).scalar_one_or_none()
    if total is None:
        return None
    if most is not None and total > most:
        raise ConversationFull
    columns = conversation_items.c
    is_in = columns.conversation == conversation_id
    taken = set(
        connection.execute(
            select(columns.item).where(is_in, columns.item.in_([item_key(item.id) for item in items]))
        ).scalars()
    )
    position = connection.execute(select(func.coalesce(func.max(columns.position), -1)).where(is_in)).scalar_one()
    stored = []
    for item in items:
        if item_key(item.id) in taken:
            item = _renamed(item)
        taken.add(item_key(item.id))
        stored.append(item)
    rows = [
        {"conversation": conversation_id, "position": at, "item": item_key(item.id), "body": item.body}
        for at, item in enumerate(stored, position + 1)
    ]
    if most is not None:
        count = connection.execute(select(func.count()).select_from(conversation_items).where(is_in)).scalar_one()
        if count + len(rows) > MAX_ITEMS:
            raise ConversationFull
    if rows:
        connection.execute(insert(conversation_items), rows)
    return tuple(stored)


class ConversationFull(Exception):
    """The items of the conversation would be too large or too many."""


class UnknownItem(Exception):
    """The conversation has no such item."""


class ItemPage(NamedTuple):
    items: Sequence[StoredItem]
    has_more: bool


def _renamed(item: StoredItem) -> StoredItem:
    prefix = item.id.partition("_")[0][:20]
    fresh = new_id(f"{prefix}_" if prefix.isalpha() and prefix.isascii() else "item_")
    return StoredItem(fresh, msgspec.json.encode(msgspec.json.decode(item.body) | {"id": fresh}))


def find(connection: Connection, principal: str, conversation_id: str) -> StoredConversation | None:
    row = connection.execute(select(*_HEAD).where(_is_own(principal, conversation_id))).one_or_none()
    return None if row is None else StoredConversation(**row._asdict())


def find_items(connection: Connection, principal: str, conversation_id: str) -> tuple[StoredItem, ...] | None:
    if find(connection, principal, conversation_id) is None:
        return None
    columns = conversation_items.c
    query = select(columns.item, columns.body).where(columns.conversation == conversation_id).order_by(columns.position)
    rows = connection.execute(query)
    return tuple(StoredItem(row.item.decode("utf-8", "surrogatepass"), row.body) for row in rows)


def find_item(connection: Connection, conversation_id: str, item_id: str) -> bytes | None:
    columns = conversation_items.c
    is_item = and_(columns.conversation == conversation_id, columns.item == item_key(item_id))
    return connection.execute(select(columns.body).where(is_item)).scalar_one_or_none()


def find_page(
    connection: Connection, principal: str, conversation_id: str, limit: int, order: Order, after: str | None
) -> ItemPage | None:
    """Items in this order, from the one behind the item `after`. Raises UnknownItem if there is no such item."""
    if find(connection, principal, conversation_id) is None:
        return None
    columns = conversation_items.c
    query = select(columns.item, columns.body).where(columns.conversation == conversation_id)
    if after is not None:
        is_item = and_(columns.conversation == conversation_id, columns.item == item_key(after))
        place = connection.execute(select(columns.position).where(is_item)).scalar_one_or_none()
        if place is None:
            raise UnknownItem
        query = query.where(columns.position > place if order == "asc" else columns.position < place)
    query = query.order_by(columns.position.asc() if order == "asc" else columns.position.desc()).limit(limit + 1)
    items = [StoredItem(row.item.decode("utf-8", "surrogatepass"), row.body) for row in connection.execute(query)]
    return ItemPage(items[:limit], len(items) > limit)


def set_metadata(
    connection: Connection, principal: str, conversation_id: str, metadata: bytes, now: float
) -> StoredConversation | None:
    change = update(conversations).where(_is_own(principal, conversation_id)).values(metadata=metadata, used=now)
    row = connection.execute(change.returning(*_HEAD)).one_or_none()
    return None if row is None else StoredConversation(**row._asdict())


def remove(connection: Connection, principal: str, conversation_id: str) -> bool:
    return bool(connection.execute(delete(conversations).where(_is_own(principal, conversation_id))).rowcount)


def remove_item(connection: Connection, principal: str, conversation_id: str, item_id: str, now: float) -> bool:
    change = update(conversations).where(_is_own(principal, conversation_id)).values(used=now)
    if not connection.execute(change).rowcount:
        return False
    columns = conversation_items.c
    is_item = and_(columns.conversation == conversation_id, columns.item == item_key(item_id))
    removed = connection.execute(delete(conversation_items).where(is_item).returning(columns.body)).scalar_one_or_none()
    if removed is None:
        return False
    size = conversations.c.size - len(removed) - OVERHEAD
    connection.execute(update(conversations).where(conversations.c.id == conversation_id).values(size=size))
    return True


def remove_unused(connection: Connection, before: float) -> int:
    unused = select(conversations.c.id).where(conversations.c.used <= before).limit(GROUP)
    return connection.execute(delete(conversations).where(conversations.c.id.in_(unused))).rowcount


def evict(connection: Connection, most: int, most_bytes: int) -> None:
    """Remove the conversations that were unused for longest, while there are too many."""
    totals = select(func.count(), func.coalesce(func.sum(conversations.c.size), 0)).select_from(conversations)
    count, size = connection.execute(totals).one()
    while count > 1 and (count > most or size > most_bytes):
        oldest = select(conversations.c.id).order_by(conversations.c.used).limit(1)
        query = delete(conversations).where(conversations.c.id.in_(oldest)).returning(conversations.c.size)
        size -= connection.execute(query).scalar_one()
        count -= 1


def _is_own(principal: str, conversation_id: str) -> ColumnElement[bool]:
    return and_(conversations.c.id == conversation_id, conversations.c.principal == principal)

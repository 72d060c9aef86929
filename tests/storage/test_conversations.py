"""Stored conversations: order, privacy, bounds."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest
from sqlalchemy import update

from dragoman.core.errors import NotFound, TooLarge
from dragoman.protocols.files import Order
from dragoman.storage import conversation_sql
from dragoman.storage.conversations import ConversationStore
from dragoman.storage.database import Database
from dragoman.storage.response_sql import Bounds
from dragoman.storage.response_values import StoredItem
from dragoman.storage.tables import conversations
from tests.support.postgres import Postgres

MOST = 100_000


@pytest.fixture
def store(database: Database) -> ConversationStore:
    return ConversationStore(database, 1000, None, MOST)


def items(*names: str) -> list[StoredItem]:
    return [StoredItem(name, msgspec.json.encode({"id": name})) for name in names]


def ids(stored: Sequence[StoredItem] | None) -> list[str]:
    assert stored is not None
    assert [msgspec.json.decode(item.body)["id"] for item in stored] == [item.id for item in stored]
    return [item.id for item in stored]


async def all_items(store: ConversationStore, principal: str, conversation_id: str) -> Sequence[StoredItem] | None:
    page = await store.page(principal, conversation_id, 1000, "asc", None)
    return None if page is None else page.items


async def test_items_keep_their_order(store: ConversationStore) -> None:
    made = await store.create("ann", b"{}", items("a", "b"))
    await store.append("ann", made.id, items("c"))
    assert await store.delete_item("ann", made.id, "b")
    assert not await store.delete_item("ann", made.id, "b")
    await store.append("ann", made.id, items("d"))
    assert ids(await all_items(store, "ann", made.id)) == ["a", "c", "d"]


async def test_item_whose_id_is_taken_is_renamed(store: ConversationStore) -> None:
    made = await store.create("ann", b"{}", items("msg_1"))
    added = ids(await store.append("ann", made.id, items("msg_1", "msg_2", "msg_2")))
    assert added[1] == "msg_2"
    assert len({"msg_1", *added}) == 4
    assert all(name.startswith("msg_") for name in added)
    assert ids(await all_items(store, "ann", made.id)) == ["msg_1", *added]


async def test_conversation_is_visible_only_to_its_principal(store: ConversationStore) -> None:
    made = await store.create("ann", b'{"a":"b"}', items("a"))
    assert await store.find("ann", made.id) == made
    assert await store.find("bob", made.id) is None
    assert await all_items(store, "bob", made.id) is None
    assert await store.append("bob", made.id, items("b")) is None
    assert await store.set_metadata("bob", made.id, b"{}") is None
    assert not await store.delete_item("bob", made.id, "a")
    assert not await store.delete("bob", made.id)
    assert await store.find("ann", "conv_\0") is None
    assert ids(await all_items(store, "ann", made.id)) == ["a"]
    assert await store.delete("ann", made.id)
    assert await all_items(store, "ann", made.id) is None


async def test_too_many_bytes_are_refused_and_change_nothing(store: ConversationStore) -> None:
    made = await store.create("ann", b"{}", items("a"))
    with pytest.raises(TooLarge):
        await store.append("ann", made.id, [StoredItem("b", b"x" * MOST)])
    await store.append("ann", made.id, items("c"))
    assert ids(await all_items(store, "ann", made.id)) == ["a", "c"]


async def test_unused_conversation_is_removed(store: ConversationStore, database: Database) -> None:
    old, used = await store.create("ann", b"{}", ()), await store.create("ann", b"{}", ())
    await database.write(lambda connection: connection.execute(update(conversations).values(used=time.time() - 2000)))
    await store.append("ann", used.id, items("a"))
    await store.remove_unused()
    assert await store.find("ann", old.id) is None
    assert await store.find("ann", used.id) == used


async def test_servers_that_share_a_database_lose_nothing(postgres: Postgres) -> None:
    address = postgres.new_database()
    databases = [Database(address) for _ in range(3)]
    stores = [ConversationStore(database, 1000, None, MOST) for database in databases]
    made = await stores[0].create("ann", b"{}", ())
    pairs = [[f"i{number}", f"j{number}"] for number in range(60)]
    await asyncio.gather(
        *(stores[number % 3].append("ann", made.id, items(*pair)) for number, pair in enumerate(pairs))
    )
    found = ids(await all_items(stores[0], "ann", made.id))
    assert len(found) == 120
    assert sorted(found[at : at + 2] for at in range(0, 120, 2)) == sorted(pairs)
    for database in databases:
        database.close()


async def test_number_in_memory_is_limited() -> None:
    database = Database("memory")
    store = ConversationStore(database, 1000, Bounds(2, 1_000_000), MOST)
    made = [await store.create("ann", b"{}", ()) for _ in range(4)]
    assert [await store.find("ann", one.id) is not None for one in made] == [False, False, True, True]
    database.close()


async def test_conversation_does_not_get_more_items_than_a_request_may_have(
    store: ConversationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_sql, "MAX_ITEMS", 3)
    made = await store.create("ann", b"{}", items("a", "b"))
    with pytest.raises(TooLarge):
        await store.append("ann", made.id, items("c", "d"))
    await store.append("ann", made.id, items("c"))
    assert ids(await all_items(store, "ann", made.id)) == ["a", "b", "c"]


async def test_pages_of_items_in_both_orders(store: ConversationStore) -> None:
    made = await store.create("ann", b"{}", items("a", "b", "c"))

    async def page(order: Order, after: str | None) -> tuple[list[str], bool]:
        found = await store.page("ann", made.id, 2, order, after)
        assert found is not None
        return ids(found.items), found.has_more

    assert await page("asc", None) == (["a", "b"], True)
    assert await page("asc", "b") == (["c"], False)
    assert await page("desc", None) == (["c", "b"], True)
    assert await page("desc", "b") == (["a"], False)
    with pytest.raises(NotFound):
        await page("asc", "x")

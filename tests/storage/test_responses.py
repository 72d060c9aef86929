"""Stored responses: privacy, states, events, bounds, and servers that died."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, insert, update

from dragoman.config.sections import Keep, Storage
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import StorageUnavailable
from dragoman.protocols.responses.frames import encode_frame
from dragoman.storage.database import Database
from dragoman.storage.response_sql import OVERHEAD
from dragoman.storage.response_values import (
    EndedResponse,
    RecordedEvents,
    Recording,
    ResponseStatus,
    StoredItem,
    StoredResponse,
)
from dragoman.storage.responses import ResponseStore
from dragoman.storage.tables import responses, servers

BODY = msgspec.json.encode({"id": "r1", "status": "in_progress", "output": []})


def store(database: Database, count: int = 10, size: int = 100_000, seconds: float = 1000) -> ResponseStore:
    limits = Limits(kept_responses=count, kept_bytes=size, kept_seconds=seconds)
    return ResponseStore(database, Settings(limits=limits, storage=Storage(keep=Keep(responses=seconds))))


@pytest.fixture
def kept(database: Database) -> ResponseStore:
    return store(database)


def head(
    name: str,
    status: ResponseStatus = "completed",
    *,
    principal: str = "ann",
    body: bytes = BODY,
    is_background: bool = False,
) -> StoredResponse:
    return StoredResponse(name, principal, time.time(), status, body, is_background)


def stored_items(*names: str) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(name, name.encode()) for name in names)


def ended(name: str, *items: str, **fields: Any) -> EndedResponse:
    return EndedResponse(head(name), stored_items(*items), (), **fields)


def frames(first: int, *types: str) -> RecordedEvents:
    return RecordedEvents(first, b"".join(encode_frame(name, {}, at) for at, name in enumerate(types, first)))


def item_frame(number: int, item_id: str) -> RecordedEvents:
    return RecordedEvents(number, encode_frame("response.output_item.done", {"item": {"id": item_id}}, number))


async def record(kept: ResponseStore, name: str, events: RecordedEvents, is_first: bool, **fields: Any) -> bool:
    return await kept.record(Recording(head(name, "in_progress", **fields), events, is_first))


async def body_of(kept: ResponseStore, name: str) -> dict[str, Any]:
    found = await kept.find("ann", name)
    assert found is not None
    body: dict[str, Any] = msgspec.json.decode(found.body)
    assert body["status"] == found.status
    return body


async def numbers(kept: ResponseStore, name: str, after: int = -1) -> list[int]:
    """The sequence numbers of the events of a response that has ended."""
    found = []
    while (page := await kept.read_events("ann", name, after)) is not None:
        blocks = page.frames.decode().split("\n\n")[:-1]
        found += [msgspec.json.decode(block.partition("data: ")[2])["sequence_number"] for block in blocks]
        if page.has_ended:
            break
        after = page.last
    return found


async def test_response_is_visible_only_to_its_principal(kept: ResponseStore) -> None:
    await kept.keep(ended("r1", "i1"))
    found = await kept.find("ann", "r1")
    assert found is not None
    assert (found.id, found.status, found.body) == ("r1", "completed", BODY)
    for look in (kept.find("bob", "r1"), kept.find_items("bob", "r1"), kept.read_events("bob", "r1", -1)):
        assert await look is None
    assert await kept.items("ann", ["i1", "i2"]) == {"i1": b"i1"}
    assert await kept.items("bob", ["i1"]) == {}
    assert not await kept.delete("bob", "r1")
    assert await kept.delete("ann", "r1")
    assert not await kept.delete("ann", "r1")
    assert await kept.items("ann", ["i1"]) == {}


async def test_item_ids_may_have_any_character(kept: ResponseStore) -> None:
    odd = "i\0\u00e9\U0001f600"
    await kept.keep(ended("r1", odd))
    assert await kept.items("ann", [odd]) == {odd: odd.encode()}
    assert await kept.find("ann", "r\0") is None


async def test_item_is_found_in_the_newest_response(kept: ResponseStore) -> None:
    await kept.keep(ended("r1", "i1"))
    newer = EndedResponse(head("r2"), (StoredItem("i1", b"newer"),), stored_items("i2"))
    await kept.keep(newer)
    assert await kept.items("ann", ["i1", "i2"]) == {"i1": b"newer", "i2": b"i2"}
    await kept.delete("ann", "r2")
    assert await kept.items("ann", ["i1", "i2"]) == {"i1": b"i1"}
    found = await kept.find_items("ann", "r1")
    assert found is not None
    assert (found.input, found.output) == (stored_items("i1"), ())


async def test_events_are_read_from_any_number_on(kept: ResponseStore) -> None:
    assert await record(kept, "r1", frames(0, "a", "b", "c"), is_first=True)
    assert await record(kept, "r1", frames(3, "d"), is_first=False)
    page = await kept.read_events("ann", "r1", 1)
    assert page is not None
    assert (page.frames, page.last, page.has_ended) == (frames(2, "c", "d").frames, 3, False)
    await kept.keep(ended("r1", events=frames(4, "e", "f"), is_recorded=True))
    for after in range(-1, 8):
        assert await numbers(kept, "r1", after) == list(range(after + 1, 6))


async def test_many_groups_of_events_are_read_in_pages(kept: ResponseStore) -> None:
    await record(kept, "r1", frames(0, "a"), is_first=True)
    for number in range(1, 200):
        await record(kept, "r1", frames(number, "b"), is_first=False)
    await kept.keep(ended("r1", is_recorded=True))
    assert await numbers(kept, "r1") == list(range(200))


async def test_reader_waits_for_events(kept: ResponseStore) -> None:
    await record(kept, "r1", frames(0, "a"), is_first=True)
    reading = asyncio.create_task(kept.read_events("ann", "r1", 0))
    await asyncio.sleep(0)
    await record(kept, "r1", frames(1, "b"), is_first=False)
    page = await reading
    assert page is not None
    assert page.last == 1
    assert kept._waiting == {}


async def test_response_that_ended_does_not_change(kept: ResponseStore) -> None:
    await record(kept, "r1", item_frame(0, "i1"), is_first=True)
    await kept.end_early("r1", "cancelled", "", "")
    assert not await record(kept, "r1", frames(1, "b"), is_first=False)
    assert not await kept.keep(ended("r1", "i1", is_recorded=True))
    body = await body_of(kept, "r1")
    assert (body["status"], body["output"]) == ("cancelled", [{"id": "i1"}])
    await kept.end_early("r1", "failed", "server_error", "late")
    assert (await body_of(kept, "r1"))["status"] == "cancelled"
    assert await numbers(kept, "r1") == [0, 1]


async def test_response_that_is_kept_is_not_recorded_again(kept: ResponseStore) -> None:
    """As if the client had left while the end was stored."""
    await kept.keep(ended("r1", events=frames(0, "a")))
    assert not await record(kept, "r1", frames(0, "a"), is_first=True)
    await kept.end_early("r1", "cancelled", "", "")
    found = await kept.find("ann", "r1")
    assert found is not None
    assert found.status == "completed"


async def test_deleted_response_does_not_come_back(kept: ResponseStore) -> None:
    await record(kept, "r1", frames(0, "a"), is_first=True)
    assert await kept.delete("ann", "r1")
    assert not await record(kept, "r1", frames(1, "b"), is_first=False)
    assert not await kept.keep(ended("r1", is_recorded=True))
    assert await kept.find("ann", "r1") is None


async def test_background_response_begins_once(kept: ResponseStore) -> None:
    await kept.queue(head("r1", "queued", is_background=True), b"request", frames(0, "a", "b").frames)
    assert await record(kept, "r1", frames(2, "c"), is_first=True, is_background=True)
    assert not await record(kept, "r1", frames(2, "c"), is_first=True, is_background=True)
    found = await kept.find("ann", "r1")
    assert found is not None
    assert (found.status, found.is_background) == ("in_progress", True)


async def test_expired_responses_are_removed(database: Database) -> None:
    kept = store(database, seconds=0.001)
    await kept.keep(ended("r1", "i1"))
    await asyncio.sleep(0.01)
    assert await kept.find("ann", "r1") is None
    assert await kept.items("ann", ["i1"]) == {}
    await kept.remove_expired()
    assert await database.read(lambda connection: connection.execute(responses.select()).all()) == []


async def test_restart_keeps_responses(tmp_path: Path) -> None:
    path = str(tmp_path / "x.db")
    first = Database(path)
    await store(first).keep(ended("r1", "i1", events=frames(0, "a")))
    first.close()
    second = Database(path)
    kept = store(second)
    assert await kept.items("ann", ["i1"]) == {"i1": b"i1"}
    assert await numbers(kept, "r1") == [0]
    second.close()


async def die(database: Database) -> None:
    """Make all responses those of a server that has died."""
    await database.write(lambda connection: connection.execute(update(responses).values(server="srv-dead")))


async def test_responses_of_dead_servers_end_or_are_taken_over(kept: ResponseStore, database: Database) -> None:
    await record(kept, "r1", item_frame(0, "i1"), is_first=True)
    await kept.queue(head("r2", "queued", is_background=True), b"request", frames(0, "a").frames)
    assert await kept.close_lost() == []
    await die(database)
    lost = await kept.close_lost()
    assert [(one.id, one.request) for one in lost] == [("r2", b"request")]
    body = await body_of(kept, "r1")
    assert (body["status"], body["output"], body["error"]["code"]) == ("failed", [{"id": "i1"}], "server_error")
    assert await kept.close_lost() == []
    assert (await body_of(kept, "r1"))["status"] == "failed"


async def test_server_that_was_taken_for_dead_cannot_change_its_responses(
    kept: ResponseStore, database: Database
) -> None:
    for name in ("r1", "r2"):
        await kept.queue(head(name, "queued", is_background=True), b"request", frames(0, "a").frames)
    assert await record(kept, "r2", frames(1, "b"), is_first=True, is_background=True)
    # Another server runs both now.
    await die(database)
    assert not await record(kept, "r1", frames(1, "b"), is_first=True, is_background=True)
    assert not await record(kept, "r2", frames(2, "c"), is_first=False)
    for name in ("r1", "r2"):
        assert not await kept.keep(ended(name, is_recorded=True, events=frames(1, "b", "c")))
    found = [await kept.find("ann", name) for name in ("r1", "r2")]
    assert [response and response.status for response in found] == ["queued", "in_progress"]


async def test_server_without_a_heartbeat_keeps_its_own_responses(kept: ResponseStore, database: Database) -> None:
    await record(kept, "r1", frames(0, "a"), is_first=True)
    await kept.queue(head("r2", "queued", is_background=True), b"request", frames(0, "a").frames)
    old = update(servers).values(heartbeat=time.time() - 3600)
    await database.write(lambda connection: connection.execute(old) and None)
    assert await kept.close_lost() == []
    assert (await body_of(kept, "r1"))["status"] == "in_progress"


async def test_another_server_that_is_alive_keeps_its_responses(kept: ResponseStore, database: Database) -> None:
    await record(kept, "r1", frames(0, "a"), is_first=True)
    await die(database)
    now = time.time()
    alive = insert(servers).values(id="srv-dead", started=now, heartbeat=now)
    await database.write(lambda connection: connection.execute(alive))
    await kept.close_lost()
    assert (await body_of(kept, "r1"))["status"] == "in_progress"
    await database.write(lambda connection: connection.execute(delete(servers).where(servers.c.id == "srv-dead")))
    await kept.close_lost()
    assert (await body_of(kept, "r1"))["status"] == "failed"


async def test_response_whose_end_could_not_be_stored_fails_later(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    database = Database(str(path))
    kept = store(database)
    await record(kept, "r1", frames(0, "a"), is_first=True)

    def limit_pages(connection: Any) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    await database.write(limit_pages)
    huge = EndedResponse(head("r1", body=b"x" * 1_000_000), (), (), is_recorded=True)
    with pytest.raises(StorageUnavailable):
        await kept.keep(huge)
    await database.write(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1000000").close())
    await kept.close_lost()
    assert (await body_of(kept, "r1"))["status"] == "failed"
    database.close()


class TestInMemory:
    @pytest.fixture
    def address(self) -> str:
        return "memory"

    async def test_oldest_response_is_evicted(self, database: Database) -> None:
        kept = store(database, count=2)
        for name in ("r1", "r2", "r3"):
            await kept.keep(ended(name))
        assert [await kept.find("ann", name) is not None for name in ("r1", "r2", "r3")] == [False, True, True]

    async def test_running_response_is_not_evicted(self, database: Database) -> None:
        kept = store(database, count=1)
        await record(kept, "r1", frames(0, "a"), is_first=True)
        for name in ("r2", "r3"):
            await kept.keep(ended(name))
        assert [await kept.find("ann", name) is not None for name in ("r1", "r2", "r3")] == [True, False, False]

    async def test_total_size_is_limited(self, database: Database) -> None:
        kept = store(database, count=100, size=3 * (OVERHEAD + 1000))

        async def count() -> int:
            return len([name for name in names if await kept.find("ann", name) is not None])

        names = [f"r{number}" for number in range(50)]
        for name in names:
            await kept.keep(EndedResponse(head(name, body=b"x" * 1000), (), ()))
        assert await count() == 3
        await kept.keep(EndedResponse(head("huge", body=b"x" * 100_000), (), ()))
        assert await kept.find("ann", "huge") is None
        assert await count() == 3

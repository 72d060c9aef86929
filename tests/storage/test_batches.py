import asyncio
import time
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select, update

from dragoman.core.errors import BadRequest, RateLimited, StorageUnavailable
from dragoman.core.events import Usage
from dragoman.protocols.batch_lines import InputLine, LineResult
from dragoman.protocols.batches import InputError
from dragoman.storage.batch_states import StoredBatch, WrongState
from dragoman.storage.batches import FIRST, GROUP, SERVER_PRINCIPAL, BatchStore, NewBatch
from dragoman.storage.blobs import BlobStore
from dragoman.storage.database import Database
from dragoman.storage.files import FileStore, NewFile
from dragoman.storage.tables import batch_lines, batches, servers
from tests.support.postgres import Postgres

DAY = 86400.0
GOOD, FAILED = LineResult(200, "chatcmpl-1", b"{}"), LineResult(400, "chatcmpl-2", b"{}")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def store(database: Database, blobs: BlobStore) -> BatchStore:
    return make_store(database, blobs)


def make_store(database: Database, blobs: BlobStore) -> BatchStore:
    return BatchStore(database, FileStore(database, blobs, DAY), DAY)


def files_of(store: BatchStore) -> FileStore:
    return store._files


async def add(store: BatchStore, principal: str = "ann", api: str = "openai", **fields: object) -> StoredBatch:
    blob = files_of(store)._blobs.add(b"the input")
    known = {"caller": b"\xffcaller", "endpoint": "/v1/embeddings", "window": "24h", "seconds": DAY, "blob": blob}
    return await store.add(NewBatch(principal=principal, api=api, **(known | fields)))  # type: ignore[arg-type]


async def add_running(store: BatchStore, count: int = 3, **fields: object) -> StoredBatch:
    batch = await add(store, **fields)  # type: ignore[arg-type]
    prefixes = [b"b", b"a", b"a\x00"]
    lines = [InputLine(at + 1, 10 * at, 9, f"n{at}", prefixes[at % 3]) for at in range(count)]
    await store.add_lines(batch.id, lines)
    running = await store.note_validated(batch.id, count, (), 0)
    assert running is not None
    return running


async def end(store: BatchStore, batch: StoredBatch) -> StoredBatch:
    principal = batch.principal if batch.api == "openai" else SERVER_PRINCIPAL
    file = files_of(store).draft(NewFile(principal, "out", "batch_output", files_of(store)._blobs.add(b"results")))
    ended = await store.end(batch.id, file, None)
    assert ended is not None
    return ended


async def test_added_batch_is_found_by_its_principal_only(store: BatchStore) -> None:
    batch = await add(store, metadata={"a": "\x00ü"}, output_seconds=3600)
    assert await store.find("ann", "openai", batch.id) == batch
    assert (batch.state, batch.caller, batch.metadata) == ("validating", b"\xffcaller", {"a": "\x00ü"})
    assert batch.expires == batch.created + DAY
    assert await store.find("bob", "openai", batch.id) is None
    assert await store.find("ann", "anthropic", batch.id) is None
    assert await store.cancel("bob", "openai", batch.id) is None
    assert not await store.delete("bob", "openai", batch.id)
    for other in ("", "batch_", batch.id + "0", "batch_\x00", f"msg{batch.id}"):
        assert await store.find("ann", "openai", other) is None
        assert await store.cancel("ann", "openai", other) is None
    assert [found.id for found in (await store.list("ann", "openai", 10)).batches] == [batch.id]
    assert not (await store.list("bob", "openai", 10)).batches
    assert not (await store.list("ann", "anthropic", 10)).batches


async def test_list_has_pages_in_both_orders(store: BatchStore) -> None:
    made = [(await add(store)).id for _ in range(5)]
    first = await store.list("ann", "openai", 2)
    second = await store.list("ann", "openai", 2, first.batches[-1])
    third = await store.list("ann", "openai", 2, second.batches[-1])
    found = [batch.id for page in (first, second, third) for batch in page.batches]
    assert found == made[::-1]
    assert [page.has_more for page in (first, second, third)] == [True, True, False]
    page = await store.list("ann", "openai", 2, third.batches[-1], "asc")
    assert [batch.id for batch in page.batches] == made[1:3]


async def test_waiting_lines_come_in_the_order_of_their_prefixes(store: BatchStore) -> None:
    batch = await add_running(store, 6)
    seen, place = [], FIRST
    while page := await store.read_waiting(batch.id, place, 2):
        seen += [line.number for line in page]
        place = page[-1].prefix, page[-1].number
        if len(seen) == 2:
            assert await store.record(batch.id, 1, GOOD, Usage())
    assert seen == [2, 5, 3, 6, 4]


async def test_first_result_of_a_line_is_final(store: BatchStore) -> None:
    batch = await add_running(store)
    results = [GOOD, FAILED, GOOD, FAILED]
    recorded = await asyncio.gather(*(store.record(batch.id, 2, result, Usage(5, 1, 3)) for result in results))
    assert sorted(recorded) == [False, False, False, True]
    assert await store.record(batch.id, 1, FAILED, Usage())
    assert not await store.record(batch.id, 99, GOOD, Usage())
    [first, second, third] = await store.read_results(batch.id, 0, 10)
    assert (first.result, third.result) == (FAILED, None)
    assert second.result == results[recorded.index(True)]
    found = await store.find_own(batch.id)
    assert found is not None
    assert (found.succeeded + found.errored, found.waiting, found.prompt, found.cached) == (2, 1, 5, 3)


async def test_batch_is_finalized_only_when_no_line_waits(store: BatchStore) -> None:
    batch = await add_running(store)
    for number in (1, 2, 3):
        running = await store.finalize(batch.id)
        assert running is not None
        assert running.state == "in_progress"
        assert await store.record(batch.id, number, GOOD, Usage())
    finalizing = await store.finalize(batch.id)
    assert finalizing is not None
    assert finalizing.state == "finalizing"
    assert not await store.record(batch.id, 1, GOOD, Usage())
    ended = await end(store, finalizing)
    assert (ended.state, ended.server) == ("completed", None)
    assert ended.output_file is not None
    assert await files_of(store).find("ann", ended.output_file) is not None
    with pytest.raises(BadRequest, match="already ended"):
        await store.cancel("ann", "openai", batch.id)


async def test_cancelled_batch_takes_results_until_it_has_ended(store: BatchStore) -> None:
    batch = await add_running(store)
    changes: list[str] = []
    store.on_change = lambda: changes.append("changed")
    cancelled = await store.cancel("ann", "openai", batch.id)
    assert cancelled is not None
    assert (cancelled.state, changes) == ("cancelling", ["changed"])
    assert await store.record(batch.id, 1, GOOD, Usage())
    assert (await end(store, cancelled)).state == "cancelled"
    assert not await store.record(batch.id, 2, GOOD, Usage())


async def test_lines_with_errors_keep_their_names(store: BatchStore) -> None:
    batch = await add(store)
    error = InputError("duplicate_custom_id", "line 2: used before", 2)
    lines = [InputLine(1, 0, 5, "\x00ü"), InputLine(2, 6, 5, "\x00ü", error=error), InputLine(3, 9, 5, error=error)]
    await store.add_lines(batch.id, lines)
    validated = await store.note_validated(batch.id, 3, (error,), 2)
    assert validated is not None
    assert (validated.errors, validated.errored) == ((error,), 2)
    assert [line.custom_id for line in await store.read_results(batch.id, 0, 10)] == ["\x00ü", "\x00ü", None]
    assert [line.number for line in await store.read_waiting(batch.id, FIRST, 10)] == [1]


async def test_files_and_end_of_a_batch_appear_together_or_not_at_all(store: BatchStore, blobs: BlobStore) -> None:
    batch = await add_running(store)
    await store.cancel("ann", "openai", batch.id)
    blob = blobs.add(b"results")
    file = files_of(store).draft(NewFile("ann", "out", "batch_output", blob))
    blobs.delete(blob.digest)
    with pytest.raises(StorageUnavailable):
        await store.end(batch.id, file, None)
    assert await files_of(store).find("ann", file.id) is None
    found = await store.find_own(batch.id)
    assert found is not None
    assert found.state == "cancelling"


async def test_deleted_batch_takes_its_results_with_it(store: BatchStore) -> None:
    batch = await add_running(store, api="anthropic")
    with pytest.raises(BadRequest, match="cancel it first"):
        await store.delete("ann", "anthropic", batch.id)
    await store.cancel("ann", "anthropic", batch.id)
    ended = await end(store, batch)
    assert await store.delete("ann", "anthropic", batch.id)
    assert not await store.delete("ann", "anthropic", batch.id)
    assert ended.output_file is not None
    assert await files_of(store).find(SERVER_PRINCIPAL, ended.output_file) is None


async def test_expired_batches_and_forgotten_lines_are_removed(store: BatchStore, database: Database) -> None:
    old, fresh, running = [await add_running(store, GROUP + 5), await add_running(store), await add_running(store)]
    for batch in (old, fresh):
        await store.cancel("ann", "openai", batch.id)
        await end(store, batch)
    late = update(batches).where(batches.c.id == old.id).values(ended=time.time() - DAY - 1)
    await database.write(lambda connection: connection.execute(late) and None)
    assert await store.find("ann", "openai", old.id) is None
    await store.remove_expired()
    left = select(batches.c.id).order_by(batches.c.created)
    assert await database.read(lambda connection: connection.execute(left).scalars().all()) == [fresh.id, running.id]
    count = select(batch_lines.c.batch, func.count()).group_by(batch_lines.c.batch)
    rows = await database.read(lambda connection: connection.execute(count).all())
    assert [tuple(row) for row in rows] == [(running.id, 3)]


async def test_database_in_memory_is_not_opened_to_look_for_batches(tmp_path: Path) -> None:
    database = Database("memory")
    store = make_store(database, BlobStore(tmp_path))
    await store.remove_expired()
    assert not store.is_used
    await add(store)
    assert store.is_used
    database.close()


async def test_restarted_server_takes_its_batches_over(tmp_path: Path) -> None:
    blobs, address = BlobStore(tmp_path / "blobs"), str(tmp_path / "d.db")
    before = Database(address)
    store = make_store(before, blobs)
    batch = await add_running(store)
    assert await store.record(batch.id, 1, GOOD, Usage())
    before.close()
    after = Database(address)
    store = make_store(after, blobs)
    assert not await store.list_own()
    assert await store.claim() == 1
    assert await store.claim() == 0
    [own] = await store.list_own()
    assert (own.id, own.succeeded, own.waiting) == (batch.id, 1, 2)
    assert [line.number for line in await store.read_waiting(batch.id, FIRST, 10)] == [2, 3]
    after.close()


async def test_one_of_several_servers_takes_over_a_dead_ones_batches(postgres: Postgres, tmp_path: Path) -> None:
    address, blobs = postgres.new_database(), BlobStore(tmp_path / "blobs")
    databases = [Database(address) for _ in range(3)]
    stores = [make_store(database, blobs) for database in databases]
    dead, *living = stores
    made = [await add_running(dead) for _ in range(10)]
    assert await living[0].claim() == 0
    gone = delete(servers).where(servers.c.id == databases[0].server)
    await databases[1].write(lambda connection: connection.execute(gone) and None)
    assert sum(await asyncio.gather(*(store.claim() for store in living for _ in range(3)))) == 10
    owned = [batch.id for store in living for batch in await store.list_own()]
    assert sorted(owned) == sorted(batch.id for batch in made)
    assert not await dead.list_own()
    # The server was only slow: what it still does has no effect.
    assert not await dead.record(made[0].id, 1, GOOD, Usage())
    assert await dead.finalize(made[0].id) is None
    assert await dead.end(made[0].id, None, None) is None
    with pytest.raises(WrongState):
        await dead.add_lines(made[0].id, [InputLine(9, 0, 9, "late")])
    with pytest.raises(WrongState):
        await dead.remove_lines(made[0].id, is_reading=True)
    assert [line.number for line in await living[0].read_waiting(made[0].id, FIRST, 10)] == [2, 3, 1]
    for database in databases:
        database.close()


async def test_number_of_running_batches_of_a_principal_is_limited(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.storage.batches.MAX_RUNNING", 2)
    first = await add(store)
    await add(store)
    with pytest.raises(RateLimited):
        await add(store)
    await add(store, "bob")
    is_first, now = batches.c.id == first.id, time.time()
    await store._database.write(
        lambda connection: connection.execute(update(batches).where(is_first).values(ended=now)) and None
    )
    await add(store)

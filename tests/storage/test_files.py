import asyncio
import errno
import os
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, func, select

from dragoman.core.errors import StorageUnavailable
from dragoman.storage.blobs import ORPHAN_SECONDS, BlobStore
from dragoman.storage.database import Database
from dragoman.storage.files import GROUP, FileStore, NewFile, StoredFile
from dragoman.storage.tables import files as table
from tests.support.postgres import Postgres

DAY = 86400.0


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def files(database: Database, blobs: BlobStore) -> FileStore:
    return FileStore(database, blobs, DAY)


async def add(
    files: FileStore,
    blobs: BlobStore,
    content: bytes = b"hello",
    principal: str = "ann",
    name: str = "a.jsonl",
    purpose: str = "batch",
    expires: float | None = None,
) -> StoredFile:
    return await files.add(NewFile(principal, name, purpose, blobs.add(content), expires))


async def ids(files: FileStore, principal: str = "ann") -> list[str]:
    return [file.id for file in (await files.list(principal)).files]


async def test_added_file_is_found_by_its_principal_only(files: FileStore, blobs: BlobStore) -> None:
    before = time.time()
    file = await add(files, blobs, name="größe\x00'\n.txt")
    assert await files.find("ann", file.id) == file
    assert (file.principal, file.name, file.purpose, file.size) == ("ann", "größe\x00'\n.txt", "batch", 5)
    assert blobs.path(file.digest).read_bytes() == b"hello"
    assert before <= file.created <= time.time()
    assert file.expires == file.created + DAY
    assert await files.find("bob", file.id) is None
    assert not await files.delete("bob", file.id)
    assert await ids(files, "bob") == []
    for other in ("", "file-", file.id + "0", "file-\x00", f" {file.id}", "*"):
        assert await files.find("ann", other) is None
        assert not await files.delete("ann", other)
    assert await files.find("ann", file.id) == file


async def test_content_is_removed_with_the_last_file_that_has_it(files: FileStore, blobs: BlobStore) -> None:
    first = await add(files, blobs)
    second = await add(files, blobs, principal="bob")
    assert await files.delete("ann", first.id)
    assert not await files.delete("ann", first.id)
    assert await files.find("ann", first.id) is None
    assert blobs.has(second.digest)
    assert await files.delete("bob", second.id)
    assert not blobs.has(second.digest)


async def test_file_whose_content_was_removed_meanwhile_is_refused(files: FileStore, blobs: BlobStore) -> None:
    first = await add(files, blobs)
    blob = blobs.add(b"hello")
    await files.delete("ann", first.id)
    with pytest.raises(StorageUnavailable, match="send it again"):
        await files.add(NewFile("bob", "b", "batch", blob))
    assert await ids(files, "bob") == []
    await add(files, blobs, principal="bob")
    assert len(await ids(files, "bob")) == 1


async def test_stored_files_have_their_content_while_equal_ones_come_and_go(files: FileStore, blobs: BlobStore) -> None:
    async def come_and_go(principal: str) -> None:
        for _ in range(20):
            blob = await asyncio.to_thread(blobs.add, b"the same")
            try:
                file = await files.add(NewFile(principal, "a", "batch", blob))
            except StorageUnavailable:
                continue
            assert blobs.has(file.digest)
            await asyncio.sleep(0)
            assert blobs.has(file.digest)
            assert await files.delete(principal, file.id)

    await asyncio.gather(*(come_and_go(str(number)) for number in range(8)))
    assert not [path for path in blobs.directory.rglob("*") if path.is_file()]


async def test_servers_that_share_postgres_do_notremove_unused_contents_in_use(
    postgres: Postgres, tmp_path: Path
) -> None:
    address = postgres.new_database()
    databases = [Database(address), Database(address)]
    blobs = BlobStore(tmp_path / "blobs")

    async def come_and_go(files: FileStore, principal: str) -> None:
        for _ in range(25):
            blob = await asyncio.to_thread(blobs.add, b"the same")
            try:
                file = await files.add(NewFile(principal, "a", "batch", blob))
            except StorageUnavailable:
                continue
            for _ in range(3):
                assert blobs.has(file.digest)
                await asyncio.sleep(0.001)
            assert await files.delete(principal, file.id)

    stores = [FileStore(database, blobs, DAY) for database in databases]
    await asyncio.gather(
        *(come_and_go(files, f"{at}-{number}") for at, files in enumerate(stores) for number in (1, 2))
    )
    for database in databases:
        database.close()


async def test_full_database_leaves_no_content(files: FileStore, blobs: BlobStore, database: Database) -> None:
    if database.is_shared:
        return
    kept = await add(files, blobs)
    await database.write(lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 1"))
    blob = blobs.add(b"other")
    with pytest.raises(StorageUnavailable):
        await files.add(NewFile("ann", "long name" * 100_000, "batch", blob))
    assert not blobs.has(blob.digest)
    assert await ids(files) == [kept.id]


async def test_content_stays_if_the_deletion_of_its_file_is_rolled_back(tmp_path: Path, blobs: BlobStore) -> None:
    """The deletion, and the look whether the content is still in use, are queued together; the disk is full then."""
    database = Database(str(tmp_path / "d.db"))
    files = FileStore(database, blobs, DAY)
    file = await add(files, blobs)
    begun, go, commits = asyncio.Event(), threading.Event(), count()

    def hold(_: Connection) -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(60)

    def fail(_: Connection) -> None:
        # The first commit is that of `hold`.
        if next(commits) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    loop = asyncio.get_running_loop()
    assert database._writer is not None
    event.listen(database._writer, "commit", fail)
    holding = asyncio.create_task(database.write(hold))
    await begun.wait()
    deleting = asyncio.create_task(files.delete("ann", file.id))
    removing = asyncio.create_task(files.remove_unused_contents([file.digest]))
    for _ in range(5):
        # Until both have queued their writes.
        await asyncio.sleep(0)
    go.set()
    with pytest.raises(StorageUnavailable):
        await deleting
    await asyncio.gather(holding, removing)
    assert await files.find("ann", file.id) == file
    assert blobs.has(file.digest)
    database.close()


async def test_list_has_pages_in_both_orders(files: FileStore, blobs: BlobStore) -> None:
    made = [await add(files, blobs, purpose="batch" if at % 3 else "user_data") for at in range(10)]
    await add(files, blobs, principal="bob")
    for order, expected in (("asc", made), ("desc", made[::-1])):
        seen: list[StoredFile] = []
        after, has_more = None, True
        while has_more:
            page = await files.list("ann", limit=3, after=after, order=order)  # type: ignore[arg-type]
            assert len(page.files) <= 3
            seen += page.files
            after, has_more = page.files[-1], page.has_more
        assert seen == expected
    page = await files.list("ann", "user_data", limit=2, order="asc")
    assert (list(page.files), page.has_more) == ([made[0], made[3]], True)
    page = await files.list("ann", "user_data", limit=2, after=made[3], order="asc")
    assert (list(page.files), page.has_more) == ([made[6], made[9]], False)


async def test_expired_files_are_gone(files: FileStore, blobs: BlobStore, database: Database) -> None:
    file = await add(files, blobs, expires=time.time() + 0.3)
    lasting = await add(files, blobs, b"other")
    assert await files.find("ann", file.id) == file
    await asyncio.sleep(0.4)
    assert await files.find("ann", file.id) is None
    assert not await files.delete("ann", file.id)
    assert await ids(files) == [lasting.id]
    assert blobs.has(file.digest)
    await files.remove_expired()
    assert not blobs.has(file.digest)
    assert blobs.has(lasting.digest)
    count = select(func.count()).select_from(table)
    assert await database.read(lambda connection: connection.execute(count).scalar_one()) == 1


async def test_many_expired_files_are_removed(files: FileStore, blobs: BlobStore, database: Database) -> None:
    blob = blobs.add(b"hello")
    adding = (files.add(NewFile("ann", "a", "batch", blob, time.time() - 1)) for _ in range(2 * GROUP + 1))
    await asyncio.gather(*adding)
    await files.remove_expired()
    count = select(func.count()).select_from(table)
    assert await database.read(lambda connection: connection.execute(count).scalar_one()) == 0
    assert not blobs.has(blob.digest)


async def test_sweep_keeps_the_contents_of_files(files: FileStore, blobs: BlobStore) -> None:
    file = await add(files, blobs)
    orphan = blobs.add(b"orphan")
    age(blobs)
    await files.sweep()
    assert blobs.has(file.digest)
    assert not blobs.has(orphan.digest)


async def test_jobs_do_not_open_a_database_in_memory(tmp_path: Path) -> None:
    database, blobs = Database("memory"), BlobStore(tmp_path)
    orphan = blobs.add(b"content of another run")
    age(blobs)
    files = FileStore(database, blobs, DAY)
    await files.remove_expired()
    await files.sweep()
    assert not database.is_open
    assert blobs.has(orphan.digest)
    database.close()


def age(blobs: BlobStore) -> None:
    """Make all contents old enough for the sweep."""
    old = time.time() - ORPHAN_SECONDS - 1
    for path in blobs.directory.rglob("*"):
        if path.is_file():
            os.utime(path, (old, old))

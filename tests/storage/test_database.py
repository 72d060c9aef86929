import asyncio
import errno
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection, insert, select, text, update

from dragoman.core.errors import ConfigError, StorageUnavailable
from dragoman.storage.database import Database, StorageInUse, StorageNotWritable
from dragoman.storage.servers import is_dead
from dragoman.storage.tables import conversations, metadata, migrate, servers
from tests.support.postgres import Postgres


def adding(name: str, started: float = 1.0) -> Callable[[Connection], str]:
    """A change that adds a row."""

    def change(connection: Connection) -> str:
        connection.execute(insert(servers).values(id=name, started=started, heartbeat=time.time()))
        return name

    return change


def names(connection: Connection) -> list[str]:
    found = connection.execute(select(servers.c.id).order_by(servers.c.id)).scalars()
    return [name for name in found if not name.startswith("srv-")]


async def test_written_rows_are_read(database: Database) -> None:
    assert await database.write(adding("one")) == "one"
    assert await database.read(names) == ["one"]


async def test_failure_of_a_change_concerns_only_its_caller(database: Database) -> None:
    """Changes that are queued together share a transaction."""
    await database.write(adding("one"))
    changes = [adding("two"), adding("one"), lambda _: 1 / 0, adding("three")]
    results = await asyncio.gather(*map(database.write, changes), return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["str", "IntegrityError", "ZeroDivisionError", "str"]
    assert await database.read(names) == ["one", "three", "two"]


async def test_thousand_concurrent_writes(database: Database) -> None:
    await asyncio.gather(*(database.write(adding(f"{number:04}")) for number in range(1000)))
    assert len(await database.read(names)) == 1000


async def test_cancelled_write_leaves_the_others(database: Database) -> None:
    tasks = [asyncio.create_task(database.write(adding(str(number)))) for number in range(100)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(await database.read(names)) >= {str(number) for number in range(1, 100, 2)}


def add_conversation(name: str) -> Callable[[Connection], object]:
    row = insert(conversations).values(id=name, principal="ann", created=1.0, used=1.0, size=0, metadata=b"{}")
    return lambda connection: connection.execute(row)


def conversation_names(connection: Connection) -> list[str]:
    return list(connection.execute(select(conversations.c.id).order_by(conversations.c.id)).scalars())


async def test_rows_are_kept_over_restart(address: str) -> None:
    if address == "memory":
        return
    for number in range(3):
        database = Database(address)
        await database.write(add_conversation(str(number)))
        database.close()
    database = Database(address)
    assert await database.read(conversation_names) == ["0", "1", "2"]
    database.close()


async def dead_servers(database: Database, *ids: str, seconds: float = 0) -> list[str]:
    """Those of the given servers that are dead after a time without heartbeats."""
    for name in ids:
        await database.write(add_conversation(name))
    dead = select(conversations.c.id).where(is_dead(conversations.c.id, time.time() + seconds))
    found = await database.read(lambda connection: set(connection.execute(dead).scalars()))
    return [name for name in ids if name in found]


async def test_stopped_servers_are_dead(address: str) -> None:
    first, second = Database(address), Database(address)
    await first.write(adding("late"))
    await first.write(lambda connection: connection.execute(servers.update().values(heartbeat=1.0)).rowcount)
    await first.renew_heartbeat()
    assert await dead_servers(first, first.server, "late", "unknown") == ["late", "unknown"]
    if first.is_shared:
        await second.renew_heartbeat()
        second.close()
        assert await dead_servers(first, second.server) == [second.server]
    first.close()


async def test_only_servers_that_share_a_database_need_heartbeats(address: str) -> None:
    database = Database(address)
    dead = await dead_servers(database, database.server, seconds=3600)
    assert dead == ([database.server] if database.is_shared else [])
    database.close()


async def test_killed_server_is_dead_when_another_opens_its_file(tmp_path: Path) -> None:
    killed = Database(str(tmp_path / "dragoman.db"))
    await killed.write(adding("killed"))
    killed.close()
    database = Database(str(tmp_path / "dragoman.db"))
    assert await dead_servers(database, "killed", database.server) == ["killed"]
    database.close()


async def test_closed_database_is_unavailable(database: Database) -> None:
    await database.write(adding("one"))
    database.close()
    database.close()
    with pytest.raises(StorageUnavailable):
        await database.write(adding("two"))


async def test_deleting_a_row_deletes_what_refers_to_it(database: Database) -> None:
    def change(connection: Connection) -> None:
        connection.execute(
            insert(conversations).values(id="c", principal="ann", created=1.0, used=1.0, size=0, metadata=b"{}")
        )
        items = metadata.tables["conversation_items"]
        connection.execute(insert(items).values(conversation="c", position=0, item=b"i", body=b"{}"))
        connection.execute(conversations.delete())
        assert not connection.execute(select(items)).all()

    await database.write(change)


def test_file_is_private(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "home" / "dragoman.db"))
    database.open()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "home").iterdir()} == {0o600}
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
    database.close()


def test_file_belongs_to_one_server(tmp_path: Path) -> None:
    first, second = (Database(str(tmp_path / "dragoman.db")) for _ in range(2))
    first.open()
    with pytest.raises(StorageInUse, match="another server uses it"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_file_that_cannot_be_written_has_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageNotWritable, match="cannot be opened: "):
        Database(str(tmp_path / "file" / "dragoman.db")).open()
    (tmp_path / "other.db").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError) as failure:
        Database(str(tmp_path / "other.db")).open()
    assert not isinstance(failure.value, StorageNotWritable)


async def test_log_has_one_line_for_the_begin_of_an_outage_and_one_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: Connection) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def lines() -> list[str]:
        return [record.message.removeprefix(f"the storage {path} ") for record in caplog.records]

    path = tmp_path / "dragoman.db"
    begin, end = "is not available: No space left on device", "works again"
    database = Database(str(path))
    for change in (fail, adding("one"), fail, adding("two")):
        with nullcontext() if change is not fail else pytest.raises(StorageUnavailable):
            await database.write(change)
    assert lines() == [begin]
    monkeypatch.setattr("dragoman.storage.database.OUTAGE_SECONDS", 0.0)
    await database.write(adding("three"))
    await database.write(adding("four"))
    assert lines() == [begin, end]
    with pytest.raises(StorageUnavailable):
        await database.write(fail)
    assert lines() == [begin, end, begin]
    database.close()


async def test_locked_file_is_unavailable_until_it_is_free(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "dragoman.db"))
    await database.write(adding("one"))
    other = sqlite3.connect(tmp_path / "dragoman.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable) as failure:
        await database.write(adding("two"))
    assert failure.value.retry_after
    assert await database.read(names) == ["one"]
    other.execute("ROLLBACK")
    other.close()
    await database.write(adding("two"))
    database.close()


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dragoman.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"dragoman\.db cannot be opened: file is not a database"):
        Database(str(tmp_path / "dragoman.db")).open()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("postgresql://ann:secret@127.0.0.1:1/none", "refused"),
        ("postgresql://ann:secret@127.0.0.1:none/none", "expected postgresql://"),
    ],
)
def test_unreachable_postgres_is_refused_without_the_password(address: str, reason: str) -> None:
    with pytest.raises(ConfigError) as failure:
        Database(address).open()
    assert reason in str(failure.value)
    assert "secret" not in str(failure.value)


async def test_lost_connection_to_postgres_is_made_again(database: Database) -> None:
    if not database.is_shared:
        return
    await database.write(adding("one"))
    other = Database(database.address)
    end = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    await other.write(lambda connection: connection.execute(end).all())
    await database.write(adding("two"))
    assert await database.read(names) == ["one", "two"]
    other.close()


async def test_deadlock_of_two_servers_fails_no_write(postgres: Postgres) -> None:
    """Both run two changes in one transaction, and lock the same rows in the other order."""
    address, locked = postgres.new_database(), [threading.Event(), threading.Event()]
    databases = [Database(address), Database(address)]
    for name in "01":
        await databases[0].write(add_conversation(name))
    begin = threading.Event()
    held = threading.Barrier(3)

    def hold(_: Connection) -> None:
        held.wait(60)
        begin.wait(60)

    holding = [database.submit(hold) for database in databases]
    await asyncio.to_thread(held.wait, 60)

    def lock(own: int, name: int, *, is_first: bool) -> Callable[[Connection], None]:
        change = update(conversations).where(conversations.c.id == str(name)).values(size=conversations.c.size + 1)

        def run(connection: Connection) -> None:
            if not is_first:
                # Set by the first run of both, so that a further run does not wait.
                locked[1 - own].wait(60)
            connection.execute(change)
            locked[own].set()

        return run

    writes = [
        database.submit(lock(own, (own + step) % 2, is_first=not step))
        for own, database in enumerate(databases)
        for step in range(2)
    ]
    begin.set()
    await asyncio.gather(*map(asyncio.wrap_future, [*holding, *writes]))
    sizes = await databases[0].read(lambda connection: connection.execute(select(conversations.c.size)).scalars().all())
    assert sizes == [2, 2]
    for database in databases:
        database.close()


async def test_server_that_is_suspended_within_a_transaction_does_not_stop_the_others(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, awake = postgres.new_database(), threading.Event()
    monkeypatch.setattr("dragoman.storage.database.IDLE_MILLISECONDS", 500)
    suspended, other = Database(address), Database(address)
    await other.write(add_conversation("one"))
    locked, loop = asyncio.Event(), asyncio.get_running_loop()
    change = update(conversations).values(size=5)

    def sleep(connection: Connection) -> None:
        connection.execute(change)
        loop.call_soon_threadsafe(locked.set)
        awake.wait(20)
        connection.execute(change)

    sleeping = asyncio.create_task(suspended.write(sleep))
    await locked.wait()
    await other.write(lambda connection: connection.execute(change) and None)
    assert not sleeping.done()
    awake.set()
    with pytest.raises(StorageUnavailable):
        await sleeping
    await suspended.write(add_conversation("two"))
    for database in (suspended, other):
        database.close()


async def test_connection_to_postgres_ends_if_the_server_does_not_answer(postgres: Postgres) -> None:
    database = Database(postgres.new_database())
    driver = await database.read(lambda connection: connection.connection.driver_connection)
    assert isinstance(driver, psycopg.Connection)
    parameters = driver.info.get_parameters()
    assert int(parameters["tcp_user_timeout"]) == 15_000
    assert int(parameters["keepalives_idle"]) + 3 * int(parameters["keepalives_interval"]) <= 30
    database.close()


async def test_newer_schema_is_refused(address: str) -> None:
    if address == "memory":
        return
    database = Database(address)
    await database.write(lambda connection: connection.execute(text("UPDATE schema_version SET version = 99")).rowcount)
    database.close()
    with pytest.raises(ConfigError, match="a newer version of Dragoman wrote it"):
        Database(address).open()


async def test_older_schema_gets_the_migrations_that_it_lacks(database: Database) -> None:
    def first(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE servers ADD COLUMN first TEXT"))

    def second(connection: Connection) -> None:
        connection.execute(text("ALTER TABLE servers ADD COLUMN second TEXT"))

    for migrations in ((first,), (first, second), (first, second)):
        await database.write(lambda connection, wanted=migrations: migrate(connection, wanted))  # type: ignore[misc]
    found = await database.read(lambda connection: connection.execute(text("SELECT version FROM schema_version")).all())
    assert found == [(3,)]
    await database.read(lambda connection: connection.execute(text("SELECT first, second FROM servers")).all())


WRITER = """
import asyncio, sys
from sqlalchemy import insert
from dragoman.storage.database import Database
from dragoman.storage.servers import is_dead
from dragoman.storage.tables import conversations
async def write():
    database = Database(sys.argv[1])
    for number in range(100_000):
        await database.write(lambda c: c.execute(insert(conversations).values(
            id=f"{number:06}", principal="", created=1, used=1, size=0, metadata=b"")))
        print(number, flush=True)
asyncio.run(write())
"""


def test_acknowledged_writes_survive_kill(tmp_path: Path) -> None:
    path = tmp_path / "dragoman.db"
    for count in (1, 7, 40):
        path.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(count)]
            process.send_signal(signal.SIGKILL)
            said += process.stdout.readlines()
        database = Database(str(path))
        kept = asyncio.run(database.read(conversation_names))
        database.close()
        acknowledged = [int(line) for line in said if line.endswith("\n")]
        assert [int(name) for name in kept][: len(acknowledged)] == acknowledged

"""The ledger on real databases."""

import asyncio
import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from sqlalchemy import Connection, delete, select, text

from dragoman.config.sections import Budget, BudgetLimit, Keep, KeyLimits, Price, Storage
from dragoman.config.settings import Settings
from dragoman.core.errors import StorageUnavailable
from dragoman.protocols.usage import day_of
from dragoman.server.auth.callers import own_budgets
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage import ledger_sql, ledger_writer
from dragoman.storage.budgets import Owner
from dragoman.storage.database import Database
from dragoman.storage.ledger import Ledger
from dragoman.storage.ledger_entries import LOST, MAX_TOKENS, Entry, EntryGroup, UsageKey, UsageSums
from dragoman.storage.tables import ledger as ledger_table
from dragoman.storage.tables import servers, usage
from tests.storage.journal_steps import JournalRun, steps

T = TypeVar("T")
ANNA = Owner("k1", "user:anna")
PRICES = {"echo": Price(input=1.0, cached_input=0.5, output=10.0), "ec*": Price(input=100.0)}
REFUSING = Settings(budgets=(Budget(per="day", tokens=1000, principal="*"),))


def open_ledger(database: Database, **settings: Any) -> Ledger:
    return Ledger(database, Settings(**settings), Counter())


def ended(request_id: str, *, status: int = 200, model: str | None = "echo", **counts: Any) -> RequestRecord:
    return RequestRecord(request_id, "POST /v1/chat/completions", model=model, status=status, **counts)


async def entries_in(database: Database) -> list[Entry]:
    query = select(ledger_table).order_by(ledger_table.c.id)
    return await database.read(lambda connection: [Entry(*row) for row in connection.execute(query)])


async def sums_in(database: Database) -> dict[UsageKey, UsageSums]:
    found = await database.read(lambda connection: connection.execute(select(usage)).all())
    return {(row[0], row[1], row[2], row[3]): list(row[4:]) for row in found}


class SqlStore:
    """The store of the random steps in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def run(self, change: Callable[[Connection], T]) -> T:
        return self._database.submit(change).result()

    def write(self, group: EntryGroup) -> None:
        self.run(lambda connection: ledger_sql.write_group(connection, group, (), keeps_closed=True))

    def reserve(self, entry: Entry) -> None:
        assert self.run(lambda connection: ledger_sql.reserve(connection, entry, ())) is None

    def close_lost(self, server: str) -> None:
        # No server has a row, so all are dead.
        self.run(lambda connection: connection.execute(delete(servers)).rowcount)
        while self.run(lambda connection: ledger_sql.close_lost(connection, f"not {server}", time.time())):
            pass

    def entries(self) -> list[Entry]:
        return self.run(lambda connection: [Entry(*row) for row in connection.execute(select(ledger_table))])

    def sums(self) -> dict[UsageKey, UsageSums]:
        rows = self.run(lambda connection: connection.execute(select(usage)).all())
        return {(row[0], row[1], row[2], row[3]): list(row[4:]) for row in rows}

    def clear(self) -> None:
        for table in (ledger_table, usage):
            self.run(lambda connection, table=table: connection.execute(delete(table)).rowcount)  # type: ignore[misc]


@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=steps)
def test_database_and_journal_agree_after_any_steps(database: Database, made: list[tuple[str, int]]) -> None:
    store = SqlStore(database)
    store.clear()
    run = JournalRun(store)
    for name, number in made:
        run.step(name, number)
    run.finish()
    run.check()


async def test_request_is_counted_once_with_its_tokens_and_cost(database: Database) -> None:
    ledger = open_ledger(database, prices=PRICES)
    assert ledger.open("req-1", ANNA, ["echo"], 100, 1000) is None
    await ledger.flush()
    counts: dict[str, Any] = {"prompt_tokens": 50, "cached_tokens": 10, "completion_tokens": 7, "reasoning_tokens": 3}
    ledger.close(ended("req-1", **counts))
    ledger.close(ended("req-1", **counts))
    await ledger.stop()
    [(key, sums)] = (await sums_in(database)).items()
    assert key[1:] == ("k1", "user:anna", "echo")
    # 40 at 1, 10 at 0.5 and 7 at 10 for a million.
    assert sums == [1, 50, 10, 7, 3, 40_000 + 5_000 + 70_000]
    kept = await entries_in(database)
    if database.address == "memory":
        assert not kept
    else:
        assert [(entry.id, entry.status, entry.cost) for entry in kept] == [("req-1", 200, 115_000)]


async def test_flush_writes_a_request_that_ended_while_its_begin_was_being_written(database: Database) -> None:
    may_write = threading.Event()
    ledger = open_ledger(database)
    database.submit(lambda _: may_write.wait(60))
    ledger.open("req-1", ANNA, ["echo"], 100, 20)
    first = asyncio.create_task(ledger.flush())
    await asyncio.sleep(0)
    ledger.close(ended("req-1", prompt_tokens=3))
    second = asyncio.create_task(ledger.flush())
    await asyncio.sleep(0)
    may_write.set()
    await asyncio.gather(first, second)
    assert list((await sums_in(database)).values()) == [[1, 3, 0, 0, 0, 0]]


async def test_requests_that_end_during_a_write_wait_for_the_next_group(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(database)
    real, is_submitted = database.submit, asyncio.Event()

    def submit(change: Callable[[Connection], T]) -> Any:
        database.submit = real  # type: ignore[method-assign]
        is_submitted.set()
        monkeypatch.setattr(ledger_writer, "WRITE_SECONDS", 3600.0)
        ledger.open("req-2", ANNA, ["echo"], 1, 1)
        ledger.close(ended("req-2", prompt_tokens=2))
        return real(change)

    monkeypatch.setattr(ledger_writer, "WRITE_SECONDS", 0.01)
    ledger.open("req-1", ANNA, ["echo"], 1, 1)
    ledger.close(ended("req-1", prompt_tokens=1))
    database.submit = submit  # type: ignore[method-assign, assignment]
    await is_submitted.wait()
    for _ in range(3):
        await database.write(lambda _: None)
    assert [sums[:2] for sums in (await sums_in(database)).values()] == [[1, 1]]
    await ledger.stop()
    assert [sums[:2] for sums in (await sums_in(database)).values()] == [[2, 3]]


async def test_request_that_runs_long_is_written_while_it_runs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_writer, "WRITE_SECONDS", 0.01)
    ledger = open_ledger(database)
    ledger.open("req-1", ANNA, ["echo"], 100, 20)
    while not (found := await entries_in(database)):
        pass
    assert [(entry.id, entry.closed, entry.prompt) for entry in found] == [("req-1", None, 100)]
    await ledger.stop()


async def test_tokens_of_a_cancelled_request_count(database: Database) -> None:
    ledger = open_ledger(database)
    ledger.open("req-1", ANNA, ["echo"], 100, 1000)
    ledger.close(ended("req-1", status=499, unfinished_tokens=12, unfinished_prompt_tokens=5))
    await ledger.stop()
    [sums] = (await sums_in(database)).values()
    assert sums == [1, 5, 0, 7, 0, 0]


async def test_tokens_of_a_fallback_count_for_the_model_that_answered(database: Database) -> None:
    ledger = open_ledger(database, prices={"a": Price(1.0), "b": Price(3.0)})
    ledger.open("req-1", ANNA, ["a", "b"], 100, 0)
    await ledger.flush()
    if database.address != "memory":
        # The highest of both prices is reserved.
        assert [entry.cost for entry in await entries_in(database)] == [300_000]
    ledger.close(ended("req-1", model="b", prompt_tokens=10))
    await ledger.stop()
    assert [(key[3], sums[1], sums[5]) for key, sums in (await sums_in(database)).items()] == [("b", 10, 30_000)]


async def test_request_whose_front_end_died_counts_what_it_reserved(database: Database) -> None:
    ledger = open_ledger(database)
    ledger.open("req-1", ANNA, ["echo"], 100, 20)
    ledger.abandon("req-1")
    ledger.abandon("req-1")
    ledger.close(ended("req-1", prompt_tokens=1))
    await ledger.stop()
    assert list((await sums_in(database)).values()) == [[1, 100, 0, 20, 0, 0]]


async def test_requests_that_a_killed_server_ran_are_closed_at_the_next_start(address: str) -> None:
    if address == "memory":
        return
    killed = Database(address)
    reserving = open_ledger(killed, budgets=REFUSING.budgets)
    reservation = reserving.open("reserved", ANNA, ["echo"], 100, 20)
    assert reservation is not None
    await reservation
    open_ledger(killed).open("waiting", ANNA, ["echo"], 1, 1)
    # Without `Ledger.stop` and without removing its row, as after kill -9.
    killed.submit(lambda connection: connection.execute(servers.update().values(heartbeat=1.0)).rowcount).result()
    disconnect(killed)
    database = Database(address)
    ledger = open_ledger(database)
    await ledger.close_lost()
    await ledger.close_lost()
    assert [(entry.id, entry.status) for entry in await entries_in(database)] == [("reserved", LOST)]
    assert list((await sums_in(database)).values()) == [[1, 100, 0, 20, 0, 0]]
    database.close()


def disconnect(database: Database) -> None:
    database._disconnect()


async def test_job_that_runs_again_after_a_crash_has_an_entry_of_its_own(address: str) -> None:
    if address == "memory":
        return
    killed = Database(address)
    first = open_ledger(killed)
    first.open("line-1", ANNA, ["echo"], 100, 20)
    await first.flush()
    disconnect(killed)
    database = Database(address)
    ledger = open_ledger(database)
    ledger.open("line-1", ANNA, ["echo"], 100, 20)
    await ledger.flush()
    ledger.close(ended("line-1", prompt_tokens=5, completion_tokens=2))
    await ledger.flush()
    await database.write(lambda connection: connection.execute(delete(servers)).rowcount)
    await ledger.close_lost()
    found = sorted((entry.status, entry.prompt) for entry in await entries_in(database))
    assert found == [(LOST, 100), (200, 5)]
    assert list((await sums_in(database)).values()) == [[2, 105, 0, 22, 0, 0]]
    database.close()


async def test_job_that_runs_again_at_once_has_an_entry_of_its_own(database: Database) -> None:
    ledger = open_ledger(database)
    for tokens in (3, 4):
        ledger.open("line-1", ANNA, ["echo"], 100, 20)
        ledger.close(ended("line-1", prompt_tokens=tokens))
    await ledger.stop()
    assert list((await sums_in(database)).values()) == [[2, 7, 0, 0, 0, 0]]


async def test_absurd_counts_of_an_upstream_server_are_clipped(database: Database) -> None:
    ledger = open_ledger(database, prices={"echo": Price(1e9, 1e9)})
    for number in range(3):
        ledger.open(f"req-{number}", ANNA, ["echo"], 10**30, 10**30)
        ledger.close(ended(f"req-{number}", prompt_tokens=10**30, completion_tokens=-5))
    await ledger.stop()
    assert list((await sums_in(database)).values()) == [[3, 3 * MAX_TOKENS, 0, 0, 0, 3 * 10**15]]


async def test_entry_that_cannot_be_written_does_not_take_others_with_it(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = open_ledger(database)
    for number in range(5):
        # A lone surrogate cannot be encoded.
        principal = "user:\ud800" if number == 2 else "user:anna"
        ledger.open(f"req-{number}", Owner("", principal), ["echo"], 1, 1)
        ledger.close(ended(f"req-{number}", prompt_tokens=1))
    with caplog.at_level(logging.ERROR):
        await ledger.flush()
        await ledger.stop()
    assert list((await sums_in(database)).values()) == [[4, 4, 0, 0, 0, 0]]
    assert "an entry of the ledger cannot be written" in caplog.text
    assert "1 requests are missing in the ledger" in caplog.text


@pytest.fixture
def locked(tmp_path: Path) -> sqlite3.Connection:
    """A connection that locks the database of the test with BEGIN IMMEDIATE."""
    Database(str(tmp_path / "dragoman.db")).close()
    return sqlite3.connect(tmp_path / "dragoman.db", isolation_level=None)


async def test_requests_run_while_the_database_is_locked_and_are_written_later(
    tmp_path: Path, locked: sqlite3.Connection
) -> None:
    database = Database(str(tmp_path / "dragoman.db"))
    database.open()
    plain, limited = open_ledger(database), open_ledger(database, budgets=REFUSING.budgets)
    locked.execute("BEGIN IMMEDIATE")
    assert plain.open("free", ANNA, ["echo"], 10, 10) is None
    reservation = limited.open("limited", ANNA, ["echo"], 10, 10)
    assert reservation is not None
    with pytest.raises(StorageUnavailable) as failure:
        await reservation
    assert failure.value.retry_after
    limited.close(ended("limited", status=503, model=None))
    plain.close(ended("free", prompt_tokens=3))
    await plain.flush()
    await limited.flush()
    assert not await entries_in(database)
    locked.execute("ROLLBACK")
    locked.close()
    again = limited.open("again", ANNA, ["echo"], 10, 10)
    assert again is not None
    await again
    limited.close(ended("again", prompt_tokens=4))
    await plain.stop()
    await limited.stop()
    found = {entry.id: (entry.status, entry.prompt) for entry in await entries_in(database)}
    assert found == {"free": (200, 3), "limited": (503, 0), "again": (200, 4)}
    database.close()


async def test_write_that_failed_after_its_commit_is_not_repeated(database: Database) -> None:
    """As if the connection broke between the commit and its confirmation."""
    ledger = open_ledger(database)
    real = database.submit

    def submit(change: Callable[[Connection], T], *, is_alone: bool = False) -> Any:
        real(change, is_alone=is_alone).result()
        failed: Any = real(lambda _: None)
        failed.result()
        failed = type(failed)()
        failed.set_exception(StorageUnavailable("broken", retry_after=1))
        return failed

    ledger.open("req-1", ANNA, ["echo"], 10, 10)
    database.submit = submit  # type: ignore[method-assign]
    await ledger.flush()
    ledger.close(ended("req-1", prompt_tokens=3))
    if database.address != "memory":
        # A database in memory has no entry that says so; it cannot lose a confirmation either.
        await ledger.flush()
    database.submit = real  # type: ignore[method-assign]
    await ledger.stop()
    assert list((await sums_in(database)).values()) == [[1, 3, 0, 0, 0, 0]]


async def test_expired_entries_are_deleted_and_their_sums_are_kept(database: Database) -> None:
    ledger = open_ledger(database, storage=Storage(database.address, keep=Keep(usage=3600.0)))
    for number in range(3):
        ledger.open(f"req-{number}", ANNA, ["echo"], 1, 1)
        ledger.close(ended(f"req-{number}", prompt_tokens=1))
    ledger.open("running", ANNA, ["echo"], 1, 1)
    await ledger.flush()
    old = text("UPDATE ledger SET opened = opened - 7200 WHERE id <> 'req-2'")
    await database.write(lambda connection: connection.execute(old).rowcount)
    await ledger.delete_expired()
    if database.address != "memory":
        assert [entry.id for entry in await entries_in(database)] == ["req-2", "running"]
    assert [sums[0] for sums in (await sums_in(database)).values()] == [3]


async def test_recent_use_begins_with_the_latest_and_ignores_the_future(address: str) -> None:
    if address == "memory":
        return
    before, now = Database(address), time.time()
    times = [now - 70, now - 40.2, now - 40.1, now - 10, now + 86400]
    entries = tuple(
        Entry(f"req-{number}", before.server, at, at + 1, "k1", "user:anna", "echo", 200, 10, 0, number, 0, 0)
        for number, at in enumerate(times)
    )
    await before.write(lambda c: ledger_sql.write_group(c, EntryGroup(entries), (), keeps_closed=True))
    before.close()
    database = Database(address)
    recent = await open_ledger(database).read_recent()
    database.close()
    assert [use.at for use in recent] == sorted((use.at for use in recent), reverse=True)
    assert sum(use.requests for use in recent) == 3
    assert sum(use.tokens for use in recent) == 30 + 1 + 2 + 3


async def test_budget_that_warns_is_logged_once(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(per="week", tokens=25, action="warn", principal="user:anna")
    ledger = open_ledger(database, budgets=(budget,))
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            assert ledger.open(f"req-{number}", ANNA, ["echo"], 1, 1) is None
            assert (ledger.find_warning(ANNA) is not None) == (number >= 3)
            ledger.close(ended(f"req-{number}", prompt_tokens=10))
            await ledger.flush()
    [message] = [record.message for record in caplog.records]
    assert message.startswith("budget exhausted: 30 of 25 tokens per week of user:anna; resets on 20")
    warning = ledger.find_warning(ANNA)
    assert warning is not None
    assert warning.startswith("40 of 25 tokens per week of user:anna; resets on 20")
    await ledger.stop()


async def test_budget_that_warns_does_so_from_the_first_request_after_a_restart(address: str) -> None:
    if address == "memory":
        return
    owner = msgspec.structs.replace(ANNA, budgets=())
    settings: dict[str, Any] = {"budgets": (Budget(per="day", cost=0.001, action="warn", key="k1"),), "prices": PRICES}
    first = Database(address)
    ledger = open_ledger(first, **settings)
    ledger.open("req-1", owner, ["echo"], 1, 1)
    ledger.close(ended("req-1", completion_tokens=200))
    await ledger.stop()
    first.close()
    database = Database(address)
    ledger = open_ledger(database, **settings)
    assert ledger.find_warning(owner) is None
    today = day_of(time.time())
    await ledger.restore_warnings(lambda found: [Owner(*pair) for pair in ledger_sql.read_owners(found, today)])
    warning = ledger.find_warning(owner)
    assert warning is not None
    assert warning.startswith("0.002 of 0.001 per day of key k1")
    database.close()


async def test_own_budgets_of_a_key_count(database: Database) -> None:

    limits = KeyLimits(budgets=(BudgetLimit(per="day", tokens=10, action="warn"),))
    owner = Owner("k1", "user:anna", own_budgets(limits, "key", "k1"))
    ledger = open_ledger(database)
    ledger.open("req-1", owner, ["echo"], 1, 1)
    ledger.close(ended("req-1", prompt_tokens=11))
    await ledger.flush()
    assert ledger.find_warning(owner)
    assert ledger.find_warning(ANNA) is None
    await ledger.stop()

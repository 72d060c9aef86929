"""Reads and writes the ledger in the database. The rules are in `ledger_entries` and `budgets`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Executable,
    Select,
    bindparam,
    cast,
    delete,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from dragoman.protocols.usage import DAY, UsageColumn
from dragoman.storage.budgets import BudgetPeriod, BudgetUse, OwnerColumn, Refusal, Unit, find_refusal
from dragoman.storage.ledger_entries import (
    Entry,
    EntryGroup,
    UsageKey,
    UsageSums,
    plan_changes,
    plan_lost,
)
from dragoman.storage.servers import is_dead
from dragoman.storage.tables import ledger, usage

LEDGER_LOCK = 7262035182
"""The key of Postgres' lock that lets one server at a time write the ledger."""
ROWS = 32
"""Rows of one statement: the fewer statements, the less often the thread that writes waits for the event loop."""
MAX_IDS = 500
MAX_LOST = 500
"""Entries of dead servers that are closed in one transaction."""
MAX_EXPIRED = 1000
CLOSED_COLUMNS = ("closed", "model", "status", "prompt", "cached", "completion", "reasoning", "cost")
"""What changes when an entry is closed."""
POSTGRES = "postgresql"


class WrittenGroup(NamedTuple):
    """What closed entries had spent of each budget before and after a group was written."""

    before: list[int]
    after: list[int]


class RecentUse(NamedTuple):
    """What a key used in about one second. `at` is a Unix time."""

    key: str
    principal: str
    at: float
    requests: int
    tokens: int


def write_group(
    connection: Connection, group: EntryGroup, periods: Sequence[BudgetPeriod], *, keeps_closed: bool
) -> WrittenGroup:
    """Write entries. If `keeps_closed` is false, closed entries are only counted in the sums."""
    _lock(connection)
    before = [read_spent(connection, period) for period in periods]
    changes = plan_changes(group, _read_states(connection, group))
    if keeps_closed:
        _insert(connection, changes.inserted)
        _close(connection, changes.closed)
    else:
        _insert(connection, [entry for entry in changes.inserted if entry.closed is None])
        _delete(connection, changes.closed)
    _add_usage(connection, changes.usage)
    return WrittenGroup(before, [read_spent(connection, period) for period in periods])


def reserve(connection: Connection, entry: Entry, periods: Sequence[BudgetPeriod]) -> Refusal | None:
    """Write an open entry, unless a budget has no room for it."""
    _lock(connection)
    refusal = find_refusal(periods, [read_use(connection, period) for period in periods], entry)
    if refusal is None:
        _insert(connection, [entry])
    return refusal


def close_lost(connection: Connection, server: str, now: float) -> int:
    """Close open entries of servers that died; return their number."""
    _lock(connection)
    is_lost = (ledger.c.closed.is_(None), ledger.c.server != server, is_dead(ledger.c.server, now))
    found = connection.execute(select(ledger).where(*is_lost).limit(MAX_LOST))
    changes = plan_lost([Entry(*row) for row in found], now)
    _close(connection, changes.closed)
    _add_usage(connection, changes.usage)
    return len(changes.closed)


def delete_expired(connection: Connection, before: float) -> int:
    """Delete the oldest closed entries that were opened before this time; return their number."""
    is_expired = (ledger.c.closed.is_not(None), ledger.c.opened < before)
    oldest = select(ledger.c.opened).where(*is_expired).order_by(ledger.c.opened).limit(MAX_EXPIRED).subquery()
    last = connection.execute(select(func.max(oldest.c.opened))).scalar_one()
    return (
        0 if last is None else connection.execute(delete(ledger).where(*is_expired, ledger.c.opened <= last)).rowcount
    )


def read_use(connection: Connection, period: BudgetPeriod) -> BudgetUse:
    """What is used and reserved of a budget."""
    budget = period.budget
    values = {"value": budget.value, "first": period.start * DAY, "end": period.end * DAY}
    reserved = connection.execute(_reserved_statement(budget.column, budget.unit), values).scalar_one()
    return BudgetUse(read_spent(connection, period), int(reserved))


def read_spent(connection: Connection, period: BudgetPeriod) -> int:
    budget = period.budget
    values = {"value": budget.value, "first": period.start, "end": period.end}
    return int(connection.execute(_spent_statement(budget.column, budget.unit), values).scalar_one())


def read_recent(connection: Connection, server: str, since: float, now: float) -> list[RecentUse]:
    """What each key used since this time on servers that are dead now, the latest first."""
    second = cast(ledger.c.opened, BigInteger)
    tokens = func.sum(ledger.c.prompt + ledger.c.completion)
    statement = (
        select(ledger.c.key, ledger.c.principal, func.max(ledger.c.opened), func.count(), tokens)
        .where(ledger.c.opened.between(since, now), ledger.c.server != server, is_dead(ledger.c.server, now))
        .group_by(ledger.c.key, ledger.c.principal, second)
        .order_by(second.desc())
    )
    rows = connection.execute(statement)
    return [RecentUse(key, principal, at, requests, int(total)) for key, principal, at, requests, total in rows]


def read_sums(
    connection: Connection, first: int, end: int, by: Sequence[UsageColumn], where: Mapping[UsageColumn, Sequence[str]]
) -> list[tuple[tuple[Any, ...], UsageSums]]:
    """The usage from the day `first` up to the day `end`, summed by columns, in their order."""
    groups = [usage.c[name] for name in by]
    conditions = [usage.c[name].in_(values) for name, values in where.items()]
    sums = [func.sum(column) for column in _counts()]
    is_within = (usage.c.day >= first, usage.c.day < end)
    statement = select(*groups, *sums).where(*is_within, *conditions).group_by(*groups).order_by(*groups)
    return [(tuple(row[: len(by)]), [int(total) for total in row[len(by) :]]) for row in connection.execute(statement)]


def read_owners(connection: Connection, first: int) -> list[tuple[str, str]]:
    """Key and principal of those who used or reserved tokens since the day `first`."""
    closed = select(usage.c.key, usage.c.principal).where(usage.c.day >= first)
    opened = select(ledger.c.key, ledger.c.principal).where(ledger.c.closed.is_(None))
    return [(key, principal) for key, principal in connection.execute(closed.union(opened))]


def _counts() -> list[Column[int]]:
    return [column for column in usage.columns if not column.primary_key]


@cache
def _reserved_statement(column: OwnerColumn, unit: Unit) -> Select[Any]:
    is_within = (ledger.c.opened >= bindparam("first"), ledger.c.opened < bindparam("end"))
    amount = ledger.c.cost if unit == "cost" else ledger.c.prompt + ledger.c.completion
    is_reserved = (ledger.c.closed.is_(None), ledger.c[column] == bindparam("value"))
    return select(_total(amount)).where(*is_reserved, *is_within)


@cache
def _spent_statement(column: OwnerColumn, unit: Unit) -> Select[Any]:
    is_within = (usage.c.day >= bindparam("first"), usage.c.day < bindparam("end"))
    amount = usage.c.cost if unit == "cost" else usage.c.prompt + usage.c.completion
    return select(_total(amount)).where(usage.c[column] == bindparam("value"), *is_within)


def _total(amount: ColumnElement[int]) -> ColumnElement[int]:
    return func.coalesce(func.sum(amount), 0)


def _lock(connection: Connection) -> None:
    """Make other servers wait until this transaction has ended. The other order of locks could be a deadlock."""
    if connection.dialect.name == POSTGRES:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({LEDGER_LOCK})"))


def _read_states(connection: Connection, group: EntryGroup) -> dict[str, bool]:
    """Whether the entries of a group that the database has are closed there."""
    states: dict[str, bool] = {}
    is_own = ledger.c.server == group.entries[0].server
    for ids in _chunks(group.open_ids):
        found = connection.execute(select(ledger.c.id).where(ledger.c.id.in_(ids), ledger.c.closed.is_(None), is_own))
        states |= dict.fromkeys(found.scalars(), False)
    if group.unknown_ids:
        times = {entry.id: entry.opened for entry in group.entries if entry.id in group.unknown_ids}
        is_recent = ledger.c.opened.between(min(times.values()), max(times.values()))
        columns = (ledger.c.id, ledger.c.opened, ledger.c.closed)
        for ids in _chunks(group.unknown_ids):
            rows = connection.execute(select(*columns).where(ledger.c.id.in_(ids), is_recent, is_own))
            states |= {entry_id: closed is not None for entry_id, opened, closed in rows if opened == times[entry_id]}
    return states


def _chunks(ids: Iterable[str]) -> Iterator[list[str]]:
    in_order = sorted(ids)
    return (in_order[at : at + MAX_IDS] for at in range(0, len(in_order), MAX_IDS))


def _insert(connection: Connection, entries: Sequence[Entry]) -> None:
    for at in range(0, len(entries), ROWS):
        rows = [msgspec.structs.astuple(entry) for entry in entries[at : at + ROWS]]
        # A prepared text: SQLAlchemy would take longer for the rows than the database.
        connection.exec_driver_sql(_insert_text(connection.dialect.name, len(rows)), tuple(chain.from_iterable(rows)))


@cache
def _insert_text(dialect: str, rows: int) -> str:
    columns = ledger.columns.keys()
    row = f"({', '.join(['%s' if dialect == POSTGRES else '?'] * len(columns))})"
    return f"INSERT INTO {ledger.name} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"  # noqa: S608


def _close(connection: Connection, entries: Sequence[Entry]) -> None:
    """Replace entries that the database has as open."""
    if entries:
        # A job that runs again on another server has the same id there.
        is_entry = (ledger.c.id == bindparam("entry"), ledger.c.server == bindparam("owner"))
        rows = [
            {"entry": entry.id, "owner": entry.server, **{name: getattr(entry, name) for name in CLOSED_COLUMNS}}
            for entry in entries
        ]
        connection.execute(update(ledger).where(*is_entry, ledger.c.closed.is_(None)), rows)


def _delete(connection: Connection, entries: Sequence[Entry]) -> None:
    for ids in _chunks(entry.id for entry in entries):
        connection.execute(delete(ledger).where(ledger.c.id.in_(ids), ledger.c.closed.is_(None)))


def _add_usage(connection: Connection, sums: Mapping[UsageKey, UsageSums]) -> None:
    if sums:
        names = usage.columns.keys()
        rows = [dict(zip(names, (*key, *values), strict=True)) for key, values in sums.items()]
        connection.execute(_usage_statement(connection.dialect.name), rows)


@cache
def _usage_statement(dialect: str) -> Executable:
    statement = postgresql.insert(usage) if dialect == POSTGRES else sqlite.insert(usage)
    added = {column.name: column + statement.excluded[column.name] for column in _counts()}
    return statement.on_conflict_do_update(index_elements=list(usage.primary_key), set_=added)

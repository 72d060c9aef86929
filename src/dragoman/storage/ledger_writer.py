"""Writes the entries of the ledger, and makes reservations.

Rules
1. Entries are collected and written in groups, every `WRITE_SECONDS`. After kill -9, entries of the last
   `2 * WRITE_SECONDS` are missing at most, except for those with reservations: they were written before their requests
   ran.
2. While the database is not available, requests run and their entries wait. Owners with a refusing budget get 503.
3. If the database does not accept a group, its entries are written one by one. Those that it refuses are lost.
4. A reservation that fits beside what the database has as used or reserved is made at once. What waits is written first
   if it counts more than was reserved; and before a reservation is refused, as it may free what was not used.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from dragoman.config.sections import MEMORY
from dragoman.core.errors import StorageUnavailable
from dragoman.storage import ledger_sql
from dragoman.storage.budget_warnings import BudgetWarnings
from dragoman.storage.budgets import BudgetPeriod, Refusal
from dragoman.storage.database import Database
from dragoman.storage.ledger_entries import Entry, EntryGroup, Journal
from dragoman.storage.ledger_sql import WrittenGroup

log = logging.getLogger("dragoman.ledger")

WRITE_SECONDS = 0.25
RETRY_SECONDS = 2.0
MAX_WRITTEN = 1000
"""Entries of one group."""

T = TypeVar("T")


class LedgerWriter:
    """`new` are the requests that have no entries yet; `open_new` opens those of requests that have run this long."""

    def __init__(
        self, database: Database, warnings: BudgetWarnings, new: Sized, open_new: Callable[[float], None]
    ) -> None:
        self.journal = Journal()
        self.keeps_closed = database.address != MEMORY
        self.writes_first = True
        """Whether more may be used than the database knows: then what waits is written before the next reservation."""
        self._database = database
        self._warnings = warnings
        self._new = new
        self._open_new = open_new
        self._writes: set[asyncio.Future[Any]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._submitted = 0
        """The number of groups that were submitted."""
        self._is_failing = False
        """Whether the last write failed because the database is not available."""

    def start(self) -> None:
        """Write regularly, until nothing is waiting."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_regularly())

    def add(self, entry: Entry) -> None:
        """Add a closed entry that was never put."""
        if not self.journal.add(entry):
            self._note_full()

    def put(self, entry: Entry) -> None:
        """Add an entry that was opened or closed."""
        if not self.journal.put(entry):
            self._warnings.discard(entry.id)
            self._note_full()
        self.start()

    def _note_full(self) -> None:
        if self.journal.lost == 1:
            log.error("%d entries of the ledger wait for the storage; further ones are lost", len(self.journal))

    async def flush(self) -> None:
        """Write what is waiting now. Returns without an error if the database is not available."""
        self._open_new(0.0)
        await self._write_waiting()
        for _ in range(2):
            # Entries of requests that ended while their begin was written, or while they asked twice for a reservation.
            if len(self.journal) and not self._is_failing:
                await self._write_waiting()

    async def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        await self.flush()
        if len(self.journal):
            log.error("the storage is not available: %d entries of the ledger are lost", len(self.journal))

    async def reserve(self, entry: Entry, periods: Sequence[BudgetPeriod]) -> Refusal | None:
        """Write an entry if what it needs fits into these budgets."""
        group = self.journal.hold(entry)
        if self.writes_first and not self._is_failing:
            self._submit_waiting()
        submitted = self._submitted
        try:
            refusal = await self._submit_reservation(entry, periods)
            if refusal is not None:
                # Requests that have ended count with their true tokens, once they are written.
                self._submit_waiting()
                if self._submitted > submitted:
                    refusal = await self._submit_reservation(entry, periods)
        except BaseException:
            self.journal.note_failed(group)
            raise
        if refusal is None:
            self.journal.note_written(group)
        else:
            self.journal.refuse(group)
        return refusal

    def _submit_reservation(self, entry: Entry, periods: Sequence[BudgetPeriod]) -> "asyncio.Future[Refusal | None]":
        return self._submit(partial(ledger_sql.reserve, entry=entry, periods=periods), self._note_reserved)

    def _note_reserved(self, reserved: "asyncio.Future[Refusal | None]") -> None:
        self._is_failing = _is_unavailable(reserved)

    async def _write_regularly(self) -> None:
        while len(self._new) or len(self.journal):
            await asyncio.sleep(WRITE_SECONDS)
            self._open_new(WRITE_SECONDS)
            # What begins to wait meanwhile is written with the next groups: each group costs as much as 500 entries.
            due = len(self.journal)
            while due > 0 and (group := self.journal.take(MAX_WRITTEN)) is not None:
                due -= len(group.entries)
                written = self._submit_group(group)
                await asyncio.wait([written])
                if written.cancelled() or written.exception() is not None:
                    await asyncio.sleep(RETRY_SECONDS)

    async def _write_waiting(self) -> None:
        self._submit_waiting()
        if self._writes:
            await asyncio.wait(self._writes)

    def _submit_waiting(self) -> None:
        self.writes_first = False
        while (group := self.journal.take(MAX_WRITTEN)) is not None:
            self._submit_group(group)

    def _submit_group(self, group: EntryGroup) -> "asyncio.Future[WrittenGroup]":
        self._submitted += 1
        periods = self._warnings.periods_of(group)
        change = partial(ledger_sql.write_group, group=group, periods=periods, keeps_closed=self.keeps_closed)
        return self._submit(change, partial(self._note_written, group, periods))

    def _submit(
        self, change: Callable[[Connection], T], note: "Callable[[asyncio.Future[T]], None]"
    ) -> "asyncio.Future[T]":
        """Begin a write. `note` is called with its result, even if the caller no longer waits for it."""
        written = asyncio.wrap_future(self._database.submit(change))
        self._writes.add(written)
        written.add_done_callback(self._writes.discard)
        written.add_done_callback(note)
        return written

    def _note_written(
        self, group: EntryGroup, periods: Sequence[BudgetPeriod], written: "asyncio.Future[WrittenGroup]"
    ) -> None:
        self._is_failing = _is_unavailable(written)
        if self._is_failing:
            self.journal.note_failed(group)
            self.writes_first = True
            return
        if (error := written.exception()) is not None:
            if len(group.entries) > 1:
                # One of them is the reason.
                for part in group.split():
                    self._submit_group(part)
                return
            log.error("an entry of the ledger cannot be written", exc_info=error)
            self.journal.drop(group)
        else:
            self.journal.note_written(group)
            self._warnings.note_spent(periods, written.result())
        if self.journal.lost:
            log.error("%d requests are missing in the ledger", self.journal.lost)
            self.journal.lost = 0
        self._warnings.note_closed(group)


def _is_unavailable(written: "asyncio.Future[Any]") -> bool:
    return written.cancelled() or isinstance(written.exception(), StorageUnavailable)

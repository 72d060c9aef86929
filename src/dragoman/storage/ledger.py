"""The ledger: which tokens each request to a model reserves and uses, and which key and principal they belong to.

    open      a request begins; it waits for the database only if a budget of its owner may refuse it
    close     the request has ended, with the tokens that it used
    abandon   the front end of the request died, so it is unknown what it used

Rules
1. Entries are collected and written in groups, every `WRITE_SECONDS`; the begin of a request only if it has run that
   long, because most end before. After kill -9, entries of the last `2 * WRITE_SECONDS` are missing at most, except for
   those with reservations: they were written before their requests ran.
2. While the database is not available, requests run and their entries wait. Owners with a refusing budget get 503.
3. Open entries of a server that died are closed as lost: by its next start, or by another server that shares the
   database (see `servers`).
4. A database in memory keeps no closed entries, only their sums.
5. A reservation that fits beside what the database has as used or reserved is made at once. What waits is written first
   if it counts more than was reserved; and before a reservation is refused, as it may free what was not used.
6. All methods are called in the event loop.

`ledger_entries` and `budgets` have the rules of entries and budgets, `ledger_sql` the statements.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import msgspec
from sqlalchemy import Connection

from dragoman.config.sections import MEMORY
from dragoman.config.settings import Settings
from dragoman.core.errors import QuotaExhausted, StorageUnavailable
from dragoman.protocols.usage import day_of
from dragoman.storage import ledger_sql
from dragoman.storage.budgets import BudgetPeriod, BudgetTable, Owner, Refusal, periods_at
from dragoman.storage.database import Database
from dragoman.storage.ledger_entries import MAX_TOKENS, Entry, EntryGroup, Journal, clip_tokens
from dragoman.storage.ledger_sql import RecentUse, WrittenGroup
from dragoman.storage.prices import PriceTable

log = logging.getLogger("dragoman.ledger")

WRITE_SECONDS = 0.25
RETRY_SECONDS = 2.0
MAX_WRITTEN = 1000
"""Entries of one group."""
MAX_KNOWN = 10_000
"""Budgets of which the spent amount is kept in memory."""
RECENT_SECONDS = 60.0

T = TypeVar("T")


class _NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that began since the last write. Most end before the next one: then it needs only one entry."""

    opened: float
    owner: Owner
    models: Sequence[str]
    prompt: int
    completion: int


class EndedRequest(Protocol):
    """What the ledger needs to know of a request that has ended. `model` is the one that answered."""

    id: str
    model: str | None
    status: int
    cached_tokens: int
    reasoning_tokens: int

    @property
    def used_prompt(self) -> int: ...

    @property
    def used_completion(self) -> int: ...


class Ledger:
    """`refusals` counts the requests that budgets refused."""

    def __init__(self, database: Database, settings: Settings, refusals: Counter[str]) -> None:
        self._database = database
        self._keeps_closed = database.address != MEMORY
        self._refusals = refusals
        self._new: dict[str, _NewRequest] = {}
        self._open: dict[str, Entry] = {}
        """The entries of the other requests. Both are by the ids of requests."""
        self._journal = Journal()
        self._warning: dict[str, list[BudgetPeriod]] = {}
        """Budgets that warn, by the entries that count for them and are not closed in the database."""
        self._spent: dict[BudgetPeriod, int] = {}
        """What was spent of budgets that warn, as far as known."""
        self._writes: set[asyncio.Future[Any]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._submitted = 0
        """The number of groups that were submitted."""
        self._is_failing = False
        """Whether the last write failed because the database is not available."""
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply prices, budgets and the retention. Open entries keep the costs that they reserve."""
        self._put_new()
        self._prices = PriceTable(settings.prices)
        self._keep_seconds = settings.storage.keep.usage
        self.budgets = BudgetTable(settings.budgets)
        self._writes_first = True
        """Whether more may be used than the database knows: then what waits is written before the next reservation."""

    def open(
        self, request_id: str, owner: Owner, models: Sequence[str], prompt: int, completion: int
    ) -> Awaitable[None] | None:
        """Open the entry of a request that may need this many tokens. A result must be awaited before the request runs;
        it raises `QuotaExhausted` or `StorageUnavailable`.

        The first of `models` is requested; the others may answer instead, so the highest of their prices is reserved.
        """
        new = _NewRequest(time.time(), owner, models, prompt, completion)
        budgets = self.budgets.budgets_of(owner)
        if not budgets:
            self._new[request_id] = new
            if self._writing is None or self._writing.done():
                self._start_writing()
            return None
        entry = self._open_entry(request_id, new)
        periods = periods_at(budgets, day_of(entry.opened))
        if warning := [period for period in periods if period.budget.action == "warn"]:
            self._warning[entry.id] = warning
        if refusing := [period for period in periods if period.budget.action == "refuse"]:
            return self._reserve(request_id, entry, refusing)
        self._put(entry)
        return None

    def _open_entry(self, request_id: str, new: _NewRequest) -> Entry:
        prompt, completion, owner = clip_tokens(new.prompt), clip_tokens(new.completion), new.owner
        cost = max([self._prices.price_of(model).cost(prompt, 0, completion) for model in new.models])
        # A job may run twice with the same id, and its first entry may not be written yet.
        entry_id = f"{request_id}.{new.opened}" if self._journal.knows(request_id) else request_id
        self._open[request_id] = entry = Entry(
            *(entry_id, self._database.server, new.opened, None, owner.key, owner.principal, new.models[0], None),
            *(prompt, 0, completion, 0, cost),
        )
        return entry

    def find_warning(self, owner: Owner) -> str | None:
        """Describe the first exhausted budget of an owner that only warns."""
        budgets = self.budgets.budgets_of(owner)
        if not budgets:
            return None
        for period in periods_at(budgets, day_of(time.time())):
            budget, spent = period.budget, self._spent.get(period, 0)
            if budget.action == "warn" and spent >= budget.limit:
                return f"{budget.describe(spent)}; resets on {period.end_text}"
        return None

    def close(self, ended: EndedRequest) -> None:
        """Close the entry of a request, if it has one."""
        new = self._new.pop(ended.id, None)
        if new is not None:
            if not self._journal.add(self._closed(ended, ended.id, new.opened, new.owner, new.models[0])):
                self._note_full()
            return
        opened = self._open.pop(ended.id, None)
        if opened is not None:
            entry = self._closed(ended, opened.id, opened.opened, opened, opened.model)
            if entry.cost > opened.cost or entry.prompt + entry.completion > opened.prompt + opened.completion:
                self._writes_first = True
            self._put(entry)

    def _closed(self, ended: EndedRequest, entry_id: str, opened: float, owner: Owner | Entry, model: str) -> Entry:
        model = ended.model or model
        prompt, cached = ended.used_prompt, ended.cached_tokens
        completion, reasoning = ended.used_completion, ended.reasoning_tokens
        # One comparison for all: this runs for each request.
        if not 0 <= prompt | cached | completion | reasoning <= MAX_TOKENS:
            prompt, cached, completion, reasoning = map(clip_tokens, (prompt, cached, completion, reasoning))
        cost = self._prices.price_of(model).cost(prompt, cached, completion)
        server, now, key, principal = self._database.server, time.time(), owner.key, owner.principal
        counts = (prompt, cached, completion, reasoning)
        return Entry(entry_id, server, opened, now, key, principal, model, ended.status, *counts, cost)

    def abandon(self, request_id: str) -> None:
        """Close the entry of a request whose result is unknown."""
        new = self._new.pop(request_id, None)
        if new is not None:
            self._open_entry(request_id, new)
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._put(entry.as_lost(time.time()))

    async def flush(self) -> None:
        """Write what is waiting now. Returns without an error if the database is not available."""
        self._put_new()
        await self._write_waiting()
        for _ in range(2):
            # Entries of requests that ended while their begin was written, or while they asked twice for a reservation.
            if len(self._journal) and not self._is_failing:
                await self._write_waiting()

    async def _write_waiting(self) -> None:
        self._submit_waiting()
        if self._writes:
            await asyncio.wait(self._writes)

    async def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        await self.flush()
        if len(self._journal):
            log.error("the storage is not available: %d entries of the ledger are lost", len(self._journal))

    async def close_lost(self) -> None:
        """Close the entries of servers that died."""
        if not self._keeps_closed:
            return
        count = found = await self._close_some_lost()
        while found:
            found = await self._close_some_lost()
            count += found
        if count:
            log.warning("requests that ended with their server: %d; what they had reserved counts as used", count)

    async def _close_some_lost(self) -> int:
        server, now = self._database.server, time.time()
        return await self._database.write(lambda connection: ledger_sql.close_lost(connection, server, now))

    async def delete_expired(self) -> None:
        """Delete entries that are older than `storage.keep.usage`."""
        if not self._keeps_closed:
            return
        before = time.time() - self._keep_seconds
        while await self._database.write(lambda connection: ledger_sql.delete_expired(connection, before)):
            pass

    async def read_recent(self) -> list[RecentUse]:
        """What keys used in the last minute on servers that run no more, such as this one before its restart."""
        if not self._keeps_closed:
            return []
        now, server = time.time(), self._database.server
        since = now - RECENT_SECONDS
        return await self._database.read(lambda connection: ledger_sql.read_recent(connection, server, since, now))

    async def restore_warnings(self, find_owners: Callable[[Connection], Iterable[Owner]]) -> None:
        """Read what is spent of budgets that warn, so that they do so from the first request of this server on."""
        if not self._keeps_closed:
            return
        today = day_of(time.time())

        def read(connection: Connection) -> dict[BudgetPeriod, int]:
            budgets = {budget for owner in find_owners(connection) for budget in self.budgets.budgets_of(owner)}
            warning = [budget for budget in budgets if budget.action == "warn"]
            return {period: ledger_sql.read_spent(connection, period) for period in periods_at(warning, today)}

        # What was noted meanwhile is newer.
        self._spent = await self._database.read(read) | self._spent

    def _put(self, entry: Entry) -> None:
        if not self._journal.put(entry):
            self._warning.pop(entry.id, None)
            self._note_full()
        if self._writing is None or self._writing.done():
            self._start_writing()

    def _note_full(self) -> None:
        if self._journal.lost == 1:
            log.error("%d entries of the ledger wait for the storage; further ones are lost", len(self._journal))

    def _start_writing(self) -> None:
        self._writing = asyncio.get_running_loop().create_task(self._write_regularly())

    def _put_new(self, seconds: float = 0.0) -> None:
        """Open the entries of requests that have run this long."""
        now = time.time()
        # A clock that was set back delays no entry.
        found = list(takewhile(lambda new: not 0 <= now - new[1].opened < seconds, self._new.items()))
        for request_id, new in found:
            del self._new[request_id]
            self._journal.put(self._open_entry(request_id, new))

    async def _write_regularly(self) -> None:
        """Write groups until nothing is waiting."""
        while self._new or len(self._journal):
            await asyncio.sleep(WRITE_SECONDS)
            self._put_new(WRITE_SECONDS)
            # What begins to wait meanwhile is written with the next groups: each group costs as much as 500 entries.
            due = len(self._journal)
            while due > 0 and (group := self._journal.take(MAX_WRITTEN)) is not None:
                due -= len(group.entries)
                written = self._submit_group(group)
                await asyncio.wait([written])
                if written.cancelled() or written.exception() is not None:
                    await asyncio.sleep(RETRY_SECONDS)

    def _submit_waiting(self) -> None:
        self._writes_first = False
        while (group := self._journal.take(MAX_WRITTEN)) is not None:
            self._submit_group(group)

    def _submit_group(self, group: EntryGroup) -> "asyncio.Future[WrittenGroup]":
        self._submitted += 1
        periods: tuple[BudgetPeriod, ...] = ()
        if self._warning:
            periods = tuple({period for entry in group.entries for period in self._warning.get(entry.id, ())})
        change = partial(ledger_sql.write_group, group=group, periods=periods, keeps_closed=self._keeps_closed)
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
            self._journal.note_failed(group)
            self._writes_first = True
            return
        if (error := written.exception()) is not None:
            if len(group.entries) > 1:
                # One of them is the reason.
                for part in group.split():
                    self._submit_group(part)
                return
            log.error("an entry of the ledger cannot be written", exc_info=error)
            self._journal.drop(group)
        else:
            self._journal.note_written(group)
            self._note_spent(periods, written.result())
        if self._journal.lost:
            log.error("%d requests are missing in the ledger", self._journal.lost)
            self._journal.lost = 0
        if self._warning:
            for entry in group.entries:
                if entry.closed is not None:
                    self._warning.pop(entry.id, None)

    def _note_spent(self, periods: Sequence[BudgetPeriod], written: WrittenGroup) -> None:
        """Log the budgets that this group has exhausted. Of all groups, of all servers, only one exhausts a budget."""
        if len(self._spent) > MAX_KNOWN:
            self._spent.clear()
        for period, before, after in zip(periods, written.before, written.after, strict=True):
            budget = period.budget
            self._spent[period] = after
            if before < budget.limit <= after:
                log.warning("budget exhausted: %s; resets on %s", budget.describe(after), period.end_text)

    async def _reserve(self, request_id: str, entry: Entry, periods: Sequence[BudgetPeriod]) -> None:
        # A request that is cancelled meanwhile may have a reservation all the same.
        refusal = await asyncio.shield(self._find_refusal(request_id, entry, periods))
        if refusal is not None:
            self._refusals[QuotaExhausted.type] += 1
            raise QuotaExhausted(refusal.message)

    async def _find_refusal(self, request_id: str, entry: Entry, periods: Sequence[BudgetPeriod]) -> Refusal | None:
        """Reserve what an entry needs."""
        group = self._journal.hold(entry)
        if self._writes_first and not self._is_failing:
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
            self._journal.note_failed(group)
            raise
        if refusal is None:
            self._journal.note_written(group)
        else:
            self._journal.refuse(group)
            self._open.pop(request_id, None)
            self._warning.pop(entry.id, None)
        return refusal

    def _submit_reservation(self, entry: Entry, periods: Sequence[BudgetPeriod]) -> "asyncio.Future[Refusal | None]":
        return self._submit(partial(ledger_sql.reserve, entry=entry, periods=periods), self._note_reserved)

    def _note_reserved(self, reserved: "asyncio.Future[Refusal | None]") -> None:
        self._is_failing = _is_unavailable(reserved)


def _is_unavailable(written: "asyncio.Future[Any]") -> bool:
    return written.cancelled() or isinstance(written.exception(), StorageUnavailable)

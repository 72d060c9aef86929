"""The ledger: which tokens each request to a model reserves and uses, and which key and principal they belong to.

    open      a request begins; it waits for the database only if a budget of its owner may refuse it
    close     the request has ended, with the tokens that it used
    abandon   the front end of the request died, so it is unknown what it used

Rules
1. A request gets its entry at once if its owner has budgets; otherwise with the first group that is written after it
   has run for `WRITE_SECONDS`. Most requests end before, so they are written once.
2. Open entries of a server that died are closed as lost: by its next start, or by another server that shares the
   database (see `servers`).
3. A database in memory keeps no closed entries, only their sums.
4. All methods are called in the event loop.

`ledger_entries` and `budgets` have the rules of entries and budgets, `ledger_writer` those of writing them and
`budget_warnings` those of budgets that only warn; `ledger_sql` has the statements.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

import msgspec
from sqlalchemy import Connection

from dragoman.config.settings import Settings
from dragoman.core.errors import QuotaExhausted
from dragoman.protocols.usage import day_of
from dragoman.storage import ledger_sql
from dragoman.storage.budget_warnings import BudgetWarnings
from dragoman.storage.budgets import BudgetPeriod, BudgetTable, Owner, Refusal, periods_at
from dragoman.storage.database import Database
from dragoman.storage.ledger_entries import MAX_TOKENS, Entry, clip_tokens
from dragoman.storage.ledger_sql import RecentUse
from dragoman.storage.ledger_writer import LedgerWriter
from dragoman.storage.prices import PriceTable

log = logging.getLogger("dragoman.ledger")

RECENT_SECONDS = 60.0


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
        self._refusals = refusals
        self._new: dict[str, _NewRequest] = {}
        self._open: dict[str, Entry] = {}
        """The entries of the other requests. Both are by the ids of requests."""
        self._warnings = BudgetWarnings()
        self._writer = LedgerWriter(database, self._warnings, self._new, self._open_new)
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply prices, budgets and the retention. Open entries keep the costs that they reserve."""
        self._open_new(0.0)
        self._prices = PriceTable(settings.prices)
        self._keep_seconds = settings.storage.keep.usage
        self.budgets = BudgetTable(settings.budgets)
        self._writer.writes_first = True

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
            self._writer.start()
            return None
        entry = self._open_entry(request_id, new)
        periods = periods_at(budgets, day_of(entry.opened))
        if warning := [period for period in periods if period.budget.action == "warn"]:
            self._warnings.add(entry.id, warning)
        if refusing := [period for period in periods if period.budget.action == "refuse"]:
            return self._reserve(request_id, entry, refusing)
        self._writer.put(entry)
        return None

    def _open_entry(self, request_id: str, new: _NewRequest) -> Entry:
        prompt, completion, owner = clip_tokens(new.prompt), clip_tokens(new.completion), new.owner
        cost = max([self._prices.price_of(model).cost(prompt, 0, completion) for model in new.models])
        # A job may run twice with the same id, and its first entry may not be written yet.
        entry_id = f"{request_id}.{new.opened}" if self._writer.journal.knows(request_id) else request_id
        self._open[request_id] = entry = Entry(
            *(entry_id, self._database.server, new.opened, None, owner.key, owner.principal, new.models[0], None),
            *(prompt, 0, completion, 0, cost),
        )
        return entry

    def find_warning(self, owner: Owner) -> str | None:
        """Describe the first exhausted budget of an owner that only warns."""
        budgets = self.budgets.budgets_of(owner)
        return self._warnings.find(periods_at(budgets, day_of(time.time()))) if budgets else None

    def close(self, ended: EndedRequest) -> None:
        """Close the entry of a request, if it has one."""
        new = self._new.pop(ended.id, None)
        if new is not None:
            self._writer.add(self._closed(ended, ended.id, new.opened, new.owner, new.models[0]))
            return
        opened = self._open.pop(ended.id, None)
        if opened is not None:
            entry = self._closed(ended, opened.id, opened.opened, opened, opened.model)
            if entry.cost > opened.cost or entry.prompt + entry.completion > opened.prompt + opened.completion:
                self._writer.writes_first = True
            self._writer.put(entry)

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
            self._writer.put(entry.as_lost(time.time()))

    async def flush(self) -> None:
        """Write what is waiting now. Returns without an error if the database is not available."""
        await self._writer.flush()

    async def stop(self) -> None:
        await self._writer.stop()

    async def close_lost(self) -> None:
        """Close the entries of servers that died."""
        if not self._writer.keeps_closed:
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
        if not self._writer.keeps_closed:
            return
        before = time.time() - self._keep_seconds
        while await self._database.write(lambda connection: ledger_sql.delete_expired(connection, before)):
            pass

    async def read_recent(self) -> list[RecentUse]:
        """What keys used in the last minute on servers that run no more, such as this one before its restart."""
        if not self._writer.keeps_closed:
            return []
        now, server = time.time(), self._database.server
        since = now - RECENT_SECONDS
        return await self._database.read(lambda connection: ledger_sql.read_recent(connection, server, since, now))

    async def restore_warnings(self, find_owners: Callable[[Connection], Iterable[Owner]]) -> None:
        """Read what is spent of budgets that warn, so that they do so from the first request of this server on."""
        if not self._writer.keeps_closed:
            return
        today = day_of(time.time())

        def read(connection: Connection) -> dict[BudgetPeriod, int]:
            budgets = {budget for owner in find_owners(connection) for budget in self.budgets.budgets_of(owner)}
            warning = [budget for budget in budgets if budget.action == "warn"]
            return {period: ledger_sql.read_spent(connection, period) for period in periods_at(warning, today)}

        self._warnings.restore(await self._database.read(read))

    def _open_new(self, seconds: float) -> None:
        """Open the entries of requests that have run this long."""
        now = time.time()
        # A clock that was set back delays no entry.
        found = list(takewhile(lambda new: not 0 <= now - new[1].opened < seconds, self._new.items()))
        for request_id, new in found:
            del self._new[request_id]
            self._writer.journal.put(self._open_entry(request_id, new))

    async def _reserve(self, request_id: str, entry: Entry, periods: Sequence[BudgetPeriod]) -> None:
        # A request that is cancelled meanwhile may have a reservation all the same.
        refusal = await asyncio.shield(self._find_refusal(request_id, entry, periods))
        if refusal is not None:
            self._refusals[QuotaExhausted.type] += 1
            raise QuotaExhausted(refusal.message)

    async def _find_refusal(self, request_id: str, entry: Entry, periods: Sequence[BudgetPeriod]) -> Refusal | None:
        refusal = await self._writer.reserve(entry, periods)
        if refusal is not None:
            self._open.pop(request_id, None)
            self._warnings.discard(entry.id)
        return refusal

"""Budgets that only warn: which entries count for them, and what is known to be spent.

Rules
1. A budget warns when the closed entries, which the database has summed, reach its limit.
2. The spent amount is read with each group of entries that counts for the budget, in the transaction that writes it.
3. An entry counts until it is closed in the database, or lost.
4. Of all groups, of all servers, only one exhausts a budget. It is logged then.
"""

import logging
from collections.abc import Mapping, Sequence

from dragoman.storage.budgets import BudgetPeriod
from dragoman.storage.ledger_entries import EntryGroup
from dragoman.storage.ledger_sql import WrittenGroup

log = logging.getLogger("dragoman.ledger")

MAX_KNOWN = 10_000
"""Budgets of which the spent amount is kept in memory."""


class BudgetWarnings:
    def __init__(self) -> None:
        self._periods: dict[str, list[BudgetPeriod]] = {}
        """Budgets that warn, by the entries that count for them and are not closed in the database."""
        self._spent: dict[BudgetPeriod, int] = {}
        """What was spent of budgets that warn, as far as known."""

    def add(self, entry_id: str, periods: list[BudgetPeriod]) -> None:
        self._periods[entry_id] = periods

    def discard(self, entry_id: str) -> None:
        self._periods.pop(entry_id, None)

    def find(self, periods: Sequence[BudgetPeriod]) -> str | None:
        """Describe the first exhausted budget that only warns."""
        for period in periods:
            budget, spent = period.budget, self._spent.get(period, 0)
            if budget.action == "warn" and spent >= budget.limit:
                return f"{budget.describe(spent)}; resets on {period.end_text}"
        return None

    def restore(self, spent: Mapping[BudgetPeriod, int]) -> None:
        # What was noted meanwhile is newer.
        self._spent = {**spent, **self._spent}

    def periods_of(self, group: EntryGroup) -> tuple[BudgetPeriod, ...]:
        """The budgets that a group counts for."""
        if not self._periods:
            return ()
        return tuple({period for entry in group.entries for period in self._periods.get(entry.id, ())})

    def note_closed(self, group: EntryGroup) -> None:
        if self._periods:
            for entry in group.entries:
                if entry.closed is not None:
                    self.discard(entry.id)

    def note_spent(self, periods: Sequence[BudgetPeriod], written: WrittenGroup) -> None:
        """Log the budgets that a group has exhausted."""
        if len(self._spent) > MAX_KNOWN:
            self._spent.clear()
        for period, before, after in zip(periods, written.before, written.after, strict=True):
            budget = period.budget
            self._spent[period] = after
            if before < budget.limit <= after:
                log.warning("budget exhausted: %s; resets on %s", budget.describe(after), period.end_text)

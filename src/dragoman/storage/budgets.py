"""Budgets: how many tokens, or how much money, a principal or a key may use per day, week or month.

Rules
1. Periods begin at midnight UTC, weeks on Monday, months on the first day. A request belongs to the period in which it
   began.
2. A pattern gives each principal or key that matches it a budget of its own.
3. The use of a budget is read from the ledger: the sums of closed entries, and what open entries reserve. So a new
   budget counts what was used before it existed, and no second record can disagree with the ledger.
4. A request runs if what it reserves fits into every refusing budget of its owner, beside what is used and reserved
   already. The check and the reservation are one transaction, and such transactions run one after the other.
5. A budget that only warns refuses nothing. It is exhausted when what was used reaches its limit.
"""

import datetime
import fnmatch
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from dragoman.config.quantities import format_cost, to_nano_units
from dragoman.config.sections import Budget, BudgetAction, BudgetLimit, Period
from dragoman.protocols.usage import EPOCH
from dragoman.storage.ledger_entries import Entry

CACHE_SIZE = 4096
OwnerColumn = Literal["principal", "key"]
Unit = Literal["tokens", "cost"]


class OwnedBudget(msgspec.Struct, frozen=True, array_like=True):
    """A budget of one principal or one key. The limit of a cost is in nano-units."""

    column: OwnerColumn
    value: str
    per: Period
    unit: Unit
    limit: int
    action: BudgetAction = "refuse"

    @classmethod
    def of(cls, limit: BudgetLimit, column: OwnerColumn, value: str) -> "OwnedBudget":
        if limit.tokens is not None:
            return cls(column, value, limit.per, "tokens", limit.tokens, limit.action)
        assert limit.cost is not None
        return cls(column, value, limit.per, "cost", to_nano_units(limit.cost), limit.action)

    def amount(self, entry: Entry) -> int:
        """What an entry uses or reserves of the budget."""
        return entry.cost if self.unit == "cost" else entry.prompt + entry.completion

    def format_amount(self, amount: int) -> str:
        return format_cost(amount) if self.unit == "cost" else str(amount)

    def describe(self, used: int) -> str:
        """Such as `120 of 100 tokens per day of user:anna`."""
        unit = "" if self.unit == "cost" else " tokens"
        owner = self.value if self.column == "principal" else f"key {self.value or 'none'}"
        return f"{self.format_amount(used)} of {self.format_amount(self.limit)}{unit} per {self.per} of {owner}"


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Whose tokens an entry counts. `budgets` are those of the key itself."""

    key: str
    principal: str
    budgets: tuple[OwnedBudget, ...] = ()


class BudgetPeriod(NamedTuple):
    """A budget in the period that begins on the day `start`. Days are counted since 1970-01-01."""

    budget: OwnedBudget
    start: int

    @property
    def end(self) -> int:
        """The first day of the next period."""
        if self.budget.per == "month":
            return period_start("month", self.start + 31)
        return self.start + (7 if self.budget.per == "week" else 1)

    @property
    def end_text(self) -> str:
        return f"{EPOCH + datetime.timedelta(self.end)} 00:00 UTC"


class BudgetUse(NamedTuple):
    """What closed entries used of a budget, and what open ones reserve."""

    spent: int
    reserved: int


def period_start(per: Period, day: int) -> int:
    """The first day of the period that contains a day."""
    if per == "day":
        return day
    if per == "week":
        # 1970-01-01 was a Thursday.
        return day - (day + 3) % 7
    return (EPOCH + datetime.timedelta(day)).replace(day=1).toordinal() - EPOCH.toordinal()


def first_day(day: int) -> int:
    """The first day of all periods that contain a day."""
    return min(period_start("month", day), period_start("week", day))


def periods_at(budgets: Sequence[OwnedBudget], day: int) -> list[BudgetPeriod]:
    return [BudgetPeriod(budget, period_start(budget.per, day)) for budget in budgets]


class Refusal(NamedTuple):
    period: BudgetPeriod
    used: int
    """Reservations included."""
    needed: int

    @property
    def message(self) -> str:
        budget = self.period.budget
        needed = budget.format_amount(self.needed)
        return (
            f"budget exhausted: {budget.describe(self.used)} used or reserved, and this request may need {needed}. "
            f"The budget resets on {self.period.end_text}; until then, a smaller max_tokens needs less"
        )


def find_refusal(periods: Sequence[BudgetPeriod], uses: Sequence[BudgetUse], entry: Entry) -> Refusal | None:
    """Return the first budget that has no room for an entry."""
    for period, use in zip(periods, uses, strict=True):
        needed, used = period.budget.amount(entry), use.spent + use.reserved
        if used + needed > period.budget.limit:
            return Refusal(period, used, needed)
    return None


class BudgetTable:
    """The budgets of the configuration, with patterns."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = budgets
        self._find = lru_cache(CACHE_SIZE)(self._match)

    def budgets_of(self, owner: Owner) -> tuple[OwnedBudget, ...]:
        """Return the budgets that count the tokens of this owner."""
        return self._find(owner) if self._budgets else owner.budgets

    def _match(self, owner: Owner) -> tuple[OwnedBudget, ...]:
        found = list(owner.budgets)
        for budget in self._budgets:
            if budget.principal is not None and fnmatch.fnmatchcase(owner.principal, budget.principal):
                found.append(OwnedBudget.of(budget, "principal", owner.principal))
            elif budget.key is not None and owner.key and fnmatch.fnmatchcase(owner.key, budget.key):
                found.append(OwnedBudget.of(budget, "key", owner.key))
        return tuple(dict.fromkeys(found))

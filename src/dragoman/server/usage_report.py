"""Builds reports of usage and budgets, for the server's routes and for `dragoman usage`."""

from collections.abc import Iterator

from msgspec import UNSET
from sqlalchemy import Connection

from dragoman.config.quantities import NANO
from dragoman.protocols.usage import BudgetEntry, UsageEntry, UsageQuery, UsageReport, show_day
from dragoman.server.auth.access import Authenticator
from dragoman.storage.budgets import BudgetPeriod, BudgetTable, BudgetUse, OwnedBudget, first_day, periods_at
from dragoman.storage.ledger_sql import read_owners, read_sums, read_use


def read_report(
    connection: Connection, query: UsageQuery, table: BudgetTable, authenticator: Authenticator, today: int
) -> UsageReport:
    periods = periods_at(list(_find_budgets(connection, table, authenticator, today)), today)
    budgets = tuple([_describe(period, read_use(connection, period)) for period in periods])
    return UsageReport(show_day(query.first), query.by, tuple(read_entries(connection, query)), budgets)


def read_entries(connection: Connection, query: UsageQuery) -> list[UsageEntry]:
    found = []
    for group, (requests, prompt, cached, completion, reasoning, cost) in read_sums(
        connection, query.first, query.end, query.by, query.where
    ):
        columns = dict(zip(query.by, group, strict=True))
        if "day" in columns:
            columns["day"] = show_day(columns["day"])
        found.append(UsageEntry(requests, prompt, cached, completion, reasoning, cost / NANO, **columns))
    return found


def _find_budgets(
    connection: Connection, table: BudgetTable, authenticator: Authenticator, today: int
) -> Iterator[OwnedBudget]:
    """Yield the budgets of all known keys, and of all principals that used tokens since the month or the week began."""
    owners = authenticator.owners(read_owners(connection, first_day(today)))
    yield from sorted({budget for owner in owners for budget in table.budgets_of(owner)}, key=_order)


def _order(budget: OwnedBudget) -> tuple[str, str, str, str, int]:
    return budget.column, budget.value, budget.per, budget.unit, budget.limit


def _describe(period: BudgetPeriod, use: BudgetUse) -> BudgetEntry:
    budget = period.budget
    is_cost = budget.unit == "cost"
    limit, used, reserved, remaining = (
        amount / NANO if is_cost else amount
        for amount in (budget.limit, use.spent, use.reserved, max(0, budget.limit - use.spent - use.reserved))
    )
    return BudgetEntry(
        budget.per,
        budget.action,
        used,
        reserved,
        remaining,
        show_day(period.end),
        principal=budget.value if budget.column == "principal" else UNSET,
        key=budget.value if budget.column == "key" else UNSET,
        tokens=UNSET if is_cost else budget.limit,
        cost=limit if is_cost else UNSET,
    )

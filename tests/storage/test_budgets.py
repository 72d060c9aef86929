"""Budgets: periods, patterns, and how exact they are when many requests run at once."""

import asyncio
import datetime
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.config.sections import Budget, Price
from dragoman.config.settings import Settings
from dragoman.core.errors import QuotaExhausted
from dragoman.protocols.usage import EPOCH, day_of, show_day
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage import ledger_sql
from dragoman.storage.budgets import BudgetPeriod, BudgetTable, OwnedBudget, Owner, first_day, period_start, periods_at
from dragoman.storage.database import Database
from dragoman.storage.ledger import Ledger
from dragoman.storage.prices import FREE, PriceTable, TokenPrice

ANNA = Owner("k1", "user:anna")
BUDGET = Budget(per="day", tokens=1000, principal="user:*")


def ended(request_id: str, tokens: int) -> RequestRecord:
    return RequestRecord(request_id, "POST /v1/chat/completions", model="echo", status=200, prompt_tokens=tokens)


async def reserve(ledger: Ledger, request_id: str, tokens: int, owner: Owner = ANNA) -> bool:
    """Whether the request may run."""
    try:
        opened = ledger.open(request_id, owner, ["echo"], tokens // 2, tokens - tokens // 2)
        assert opened is not None
        await opened
    except QuotaExhausted:
        return False
    return True


def open_ledger(database: Database, *budgets: Budget, **settings: Any) -> Ledger:
    return Ledger(database, Settings(budgets=budgets or (BUDGET,), **settings), Counter())


@pytest.fixture
def ledgers(database: Database) -> Iterator[list[Ledger]]:
    """The ledgers of one server, or of two that share a database."""
    if not database.is_shared:
        yield [open_ledger(database)]
        return
    other = Database(database.address)
    yield [open_ledger(database), open_ledger(other)]
    other.close()


async def test_parallel_requests_overspend_by_nothing(database: Database, ledgers: list[Ledger]) -> None:
    """64 requests of 100 tokens and a budget of 1,000."""
    asked = [reserve(ledgers[number % len(ledgers)], f"req-{number}", 100) for number in range(64)]
    may_run = await asyncio.gather(*asked)
    assert may_run.count(True) == 10
    [period] = periods_at(ledgers[0].budgets.budgets_of(ANNA), day_of(time.time()))
    assert await database.read(lambda connection: ledger_sql.read_use(connection, period)) == (0, 1000)
    for number, runs in enumerate(may_run):
        if runs:
            ledgers[number % len(ledgers)].close(ended(f"req-{number}", 60))
    for ledger in ledgers:
        await ledger.flush()
    assert await database.read(lambda connection: ledger_sql.read_use(connection, period)) == (600, 0)
    # What was reserved and not used may be used again.
    again = await asyncio.gather(*(reserve(ledgers[0], f"again-{number}", 100) for number in range(8)))
    assert again.count(True) == 4
    for ledger in ledgers:
        await ledger.stop()


async def test_tokens_that_were_reserved_and_not_used_can_be_reserved_at_once(database: Database) -> None:
    ledger = open_ledger(database)
    assert await reserve(ledger, "req-1", 1000)
    ledger.close(ended("req-1", 100))
    asked = [reserve(ledger, f"again-{number}", 300) for number in range(8)]
    assert (await asyncio.gather(*asked)).count(True) == 3
    assert not await reserve(ledger, "req-2", 1)
    await ledger.stop()


async def test_tokens_beyond_the_reservation_count_at_once(database: Database) -> None:
    ledger = open_ledger(database)
    assert await reserve(ledger, "req-1", 10)
    ledger.close(ended("req-1", 950))
    assert [await reserve(ledger, f"req-{tokens}", tokens) for tokens in (51, 50)] == [False, True]
    await ledger.stop()


async def test_new_budget_counts_requests_that_are_not_written_yet(database: Database) -> None:
    ledger = open_ledger(database, Budget(per="day", tokens=1, principal="user:other"))
    for request_id in ("ended", "running"):
        assert ledger.open(request_id, ANNA, ["echo"], 300, 0) is None
    ledger.close(ended("ended", 200))
    ledger.configure(Settings(budgets=(BUDGET,)))
    assert [await reserve(ledger, f"req-{tokens}", tokens) for tokens in (501, 500)] == [False, True]
    ledger.close(ended("running", 100))
    assert [await reserve(ledger, f"req-{tokens}", tokens) for tokens in (201, 200)] == [False, True]
    await ledger.stop()


async def test_refused_request_has_no_entry_even_if_it_is_closed(database: Database) -> None:
    ledger = open_ledger(database)
    assert await reserve(ledger, "req-1", 1000)
    ledger.close(ended("req-1", 950))
    assert not await reserve(ledger, "req-2", 51)
    ledger.close(ended("req-2", 0))
    ledger.abandon("req-2")
    await ledger.stop()
    sums = await database.read(lambda c: ledger_sql.read_sums(c, 0, day_of(time.time()) + 1, (), {}))
    assert [(requests, prompt) for _, (requests, prompt, *_) in sums] == [(1, 950)]


async def test_budget_survives_a_restart_and_a_crash(address: str) -> None:
    if address == "memory":
        return
    before = Database(address)
    ledger = open_ledger(before)
    assert await reserve(ledger, "closed", 600)
    ledger.close(ended("closed", 500))
    assert await reserve(ledger, "running", 400)
    await ledger.flush()
    # As after kill -9: no row is removed and no request is closed.
    before._disconnect()
    database = Database(address)
    ledger = open_ledger(database)
    assert [await reserve(ledger, f"req-{tokens}", tokens) for tokens in (101, 100, 1)] == [False, True, False]
    await ledger.stop()
    database.close()


async def test_refusal_names_the_budget_and_is_counted(database: Database) -> None:
    refusals: Counter[str] = Counter()
    ledger = Ledger(database, Settings(budgets=(BUDGET,)), refusals)
    assert await reserve(ledger, "req-1", 900)
    opened = ledger.open("req-2", ANNA, ["echo"], 100, 50)
    assert opened is not None
    with pytest.raises(QuotaExhausted) as refusal:
        await opened
    tomorrow = show_day(day_of(time.time()) + 1)
    assert refusal.value.message == (
        "budget exhausted: 900 of 1000 tokens per day of user:anna used or reserved, and this request may need 150. "
        f"The budget resets on {tomorrow} 00:00 UTC; until then, a smaller max_tokens needs less"
    )
    assert refusal.value.retry_after is None
    assert refusals == {"insufficient_quota": 1}
    # It is as if it had never been there.
    ledger.close(ended("req-2", 0))
    await ledger.flush()
    sums = await database.read(lambda c: ledger_sql.read_sums(c, 0, day_of(time.time()) + 1, ("model",), {}))
    assert sums == []
    await ledger.stop()


async def test_each_principal_and_each_key_has_its_own_budget(database: Database) -> None:
    ledger = open_ledger(database, Budget(per="day", tokens=100, principal="*"), Budget(per="day", tokens=50, key="k*"))
    assert await reserve(ledger, "1", 50, Owner("k1", "user:anna"))
    assert not await reserve(ledger, "2", 1, Owner("k1", "user:anna"))
    assert await reserve(ledger, "3", 50, Owner("k2", "user:anna"))
    assert not await reserve(ledger, "4", 1, Owner("k3", "user:anna"))
    assert await reserve(ledger, "5", 100, Owner("", "user:berta"))
    await ledger.stop()


async def test_budget_of_a_cost(database: Database) -> None:
    prices = {"echo": Price(input=2.0, output=2.0)}
    ledger = open_ledger(database, Budget(per="month", cost=0.002, principal="*"), prices=prices)
    assert await reserve(ledger, "1", 999)
    assert not await reserve(ledger, "2", 2)
    assert await reserve(ledger, "3", 1)
    await ledger.stop()


async def test_cancelled_reservation_is_settled(database: Database) -> None:
    ledger = open_ledger(database)
    waiting = asyncio.create_task(reserve(ledger, "req-1", 1000))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    ledger.close(ended("req-1", 0))
    await ledger.flush()
    await ledger.flush()
    assert await reserve(ledger, "req-2", 1000)
    await ledger.stop()


async def test_new_prices_and_budgets_apply_after_a_reload(database: Database) -> None:
    ledger = open_ledger(database)
    assert await reserve(ledger, "1", 1000)
    ledger.configure(Settings(budgets=(Budget(per="day", tokens=1500, principal="*"),)))
    assert await reserve(ledger, "2", 500)
    assert not await reserve(ledger, "3", 1)
    ledger.configure(Settings())
    assert ledger.open("4", ANNA, ["echo"], 1, 1) is None
    await ledger.stop()


@given(st.integers(0, 40_000))
def test_periods_are_days_weeks_from_monday_and_months(day: int) -> None:
    date = EPOCH + datetime.timedelta(day)
    starts = {per: EPOCH + datetime.timedelta(period_start(per, day)) for per in ("day", "week", "month")}
    assert starts["day"] == date
    assert starts["week"] == date - datetime.timedelta(date.weekday())
    assert starts["month"] == date.replace(day=1)
    assert first_day(day) == min(starts["week"], starts["month"]).toordinal() - EPOCH.toordinal()
    for per in starts:
        budget = OwnedBudget("principal", "user:anna", per, "tokens", 1)  # type: ignore[arg-type]
        [period] = periods_at([budget], day)
        assert period.start <= day < period.end
        assert periods_at([budget], period.end) == [BudgetPeriod(budget, period.end)]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Auckland"])
def test_days_begin_at_midnight_utc_whatever_the_zone_of_the_server(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        # The night in which summer time begins in New York, and the one in which it ends.
        for text in ("2026-03-08", "2026-11-01"):
            midnight = datetime.datetime.fromisoformat(f"{text}T00:00:00+00:00").timestamp()
            assert [show_day(day_of(midnight + seconds)) for seconds in (0, 86399.9)] == [text, text]
            assert show_day(day_of(midnight - 0.1)) < text < show_day(day_of(midnight + 86400))
    finally:
        monkeypatch.undo()
        time.tzset()


def test_budgets_are_found_by_pattern_without_duplicates() -> None:
    table = BudgetTable([BUDGET, BUDGET, Budget(per="week", cost=1.5, key="k*")])
    assert table.budgets_of(ANNA) == (
        OwnedBudget("principal", "user:anna", "day", "tokens", 1000),
        OwnedBudget("key", "k1", "week", "cost", 1_500_000_000),
    )
    assert table.budgets_of(Owner("", "jwt:anna")) == ()
    assert BudgetTable([Budget(per="day", tokens=1, key="*")]).budgets_of(Owner("", "anonymous")) == ()


def test_exact_name_and_then_the_longest_pattern_decide_the_price() -> None:
    table = PriceTable({"gpt-*": Price(1.0), "gpt-4*": Price(2.0), "GPT-4o": Price(3.0, 9.0, 0.5)})
    assert [table.price_of(name).input // 10**9 for name in ("gpt-3", "gpt-4.1", "gpt-4o", "Gpt-4O")] == [1, 2, 3, 3]
    assert table.price_of("llama") == FREE
    assert table.price_of("gpt-4o") == TokenPrice(3 * 10**9, 10**9 // 2, 9 * 10**9)
    assert table.price_of("gpt-3").cached_input == 10**9


def test_only_the_cost_of_a_whole_request_is_rounded() -> None:
    price = TokenPrice(1, 0, 1)
    assert [price.cost(count, 0, 0) for count in (0, 499_999, 500_000, 1_499_999)] == [0, 0, 1, 1]
    assert price.cost(250_000, 0, 250_000) == 1
    assert TokenPrice(10**6, 1, 0).cost(5, 10**6, 0) == 0

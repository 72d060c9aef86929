"""Quotas of a key: no minute exceeds a limit."""

import copy
import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.config.sections import KeyLimits
from dragoman.core.errors import RateLimited, TokensLimited
from dragoman.server.auth.callers import Quota, QuotaLease, RateWindow
from dragoman.server.telemetry.metrics import MINUTE


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quota(clock: Clock | None = None, **limits: int) -> Quota:
    return Quota(msgspec.convert(limits, KeyLimits), clock or Clock())


def entered(of: Quota) -> QuotaLease:
    lease = QuotaLease(of, Counter())
    lease.enter()
    return lease


def test_requests_per_minute() -> None:
    clock = Clock()
    limited = quota(clock, requests_per_minute=3)
    for _ in range(3):
        entered(limited).settle(0)
        clock.now += 10.25
    with pytest.raises(RateLimited, match="3 requests per minute") as caught:
        entered(limited)
    assert caught.value.retry_after == pytest.approx(1000 + MINUTE - clock.now)
    clock.now += caught.value.retry_after or 0
    entered(limited)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(1, 8)), max_size=60))
def test_no_minute_has_more_than_the_limit(steps: list[tuple[float, int]]) -> None:
    window, now = RateWindow(10), 0.0
    taken: list[tuple[float, int]] = []
    for pause, amount in steps:
        now += pause
        if window.left(now) >= amount:
            window.take(amount, now)
            taken.append((now, amount))
        else:
            wait = window.wait(amount, now)
            assert 0 < wait <= MINUTE + 1e-6
            assert copy.deepcopy(window).left(now + wait) >= amount
    for (begin, _), upto in itertools.product(taken, range(len(taken))):
        within = [amount for at, amount in taken[: upto + 1] if begin <= at < begin + MINUTE]
        assert sum(within) <= 10


def test_concurrency() -> None:
    limited = quota(concurrency=2)
    first, second = entered(limited), entered(limited)
    with pytest.raises(RateLimited, match="2 requests at a time"):
        entered(limited)
    first.settle(5)
    first.settle(5)
    third = entered(limited)
    with pytest.raises(RateLimited):
        entered(limited)
    second.settle(0)
    third.settle(0)
    assert limited.running == 0


def test_refused_request_returns_nothing() -> None:
    limited = quota(concurrency=1, tokens_per_minute=100)
    held = entered(limited)
    kept_out: Counter[str] = Counter()
    refused = QuotaLease(limited, kept_out)
    with pytest.raises(RateLimited):
        refused.enter()
    assert kept_out == {"requests": 1}
    refused.settle(0)
    assert limited.running == 1
    held.settle(0)
    assert limited.running == 0


def remaining(lease: QuotaLease) -> dict[str, int]:
    return {rate.what: rate.remaining for rate in lease.rates()}


def test_tokens_are_reserved_and_settled() -> None:
    limited = quota(tokens_per_minute=100)
    lease = entered(limited)
    lease.reserve(60)
    assert remaining(lease) == {"tokens": 40}
    other = entered(limited)
    with pytest.raises(TokensLimited, match="may need 50"):
        other.reserve(50)
    other.settle(0)
    lease.settle(10)
    assert remaining(lease) == {"tokens": 90}
    more = entered(limited)
    more.reserve(20)
    more.settle(70)
    assert remaining(lease) == {"tokens": 20}


def test_abandoned_reservation_counts_as_used() -> None:
    limited = quota(tokens_per_minute=100, concurrency=1)
    lease = entered(limited)
    lease.reserve(60)
    lease.abandon()
    assert remaining(lease) == {"tokens": 40}
    entered(limited)


def test_shortfall_blocks_next_request() -> None:
    limited = quota(tokens_per_minute=100)
    lease = entered(limited)
    lease.reserve(10)
    lease.settle(250)
    assert remaining(lease) == {"tokens": 0}
    with pytest.raises(TokensLimited):
        entered(limited).reserve(1)


def test_request_above_limit_runs_alone() -> None:
    clock = Clock()
    limited = quota(clock, tokens_per_minute=100)
    first = entered(limited)
    first.reserve(5000)
    with pytest.raises(TokensLimited) as caught:
        entered(limited).reserve(5000)
    clock.now += caught.value.retry_after or 0
    entered(limited).reserve(5000)


def test_expired_reservation_is_settled() -> None:
    clock = Clock()
    limited = quota(clock, tokens_per_minute=100)
    lease = entered(limited)
    lease.reserve(80)
    clock.now += 5 * MINUTE
    lease.settle(30)
    assert remaining(lease) == {"tokens": 100}


def test_changed_limits() -> None:
    limited = quota(requests_per_minute=2, concurrency=5)
    for _ in range(2):
        entered(limited)
    limited.change(KeyLimits(requests_per_minute=3, tokens_per_minute=10))
    lease = entered(limited)
    assert remaining(lease) == {"requests": 0, "tokens": 10}
    limited.change(KeyLimits())
    assert lease.rates() == []
    lease.settle(5)
    assert limited.running == 2


def test_idle_quota() -> None:
    clock = Clock()
    limited = quota(clock, requests_per_minute=2)
    assert limited.is_idle
    lease = entered(limited)
    clock.now += 2 * MINUTE
    assert not limited.is_idle
    lease.settle(0)
    assert limited.is_idle

"""The division of a step's rows between jobs and principals."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.scheduler import share, share_between, shortest_first


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_share_uses_the_budget_and_exceeds_no_demand(wants: list[int], budget: int) -> None:
    shares = share(wants, budget)
    assert all(got <= want for got, want in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(wants))


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_shortest_first_uses_the_budget(wants: list[int], budget: int) -> None:
    shares = shortest_first(wants, budget)
    assert all(got <= want for got, want in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(wants))


def test_oldest_gets_half_and_others_equal_parts() -> None:
    assert share([1000, 1000, 1000], 128) == [64, 32, 32]
    assert share([1000, 1000, 10], 128) == [64, 54, 10]
    assert share([10, 1000], 128) == [10, 118]
    assert share([1000], 128) == [128]


def test_oldest_gets_half_and_short_prompts_come_next() -> None:
    assert shortest_first([1000, 900, 10], 128) == [64, 54, 10]
    assert shortest_first([1000], 128) == [128]


def test_equal_prompts_are_processed_in_order() -> None:
    assert shortest_first([20, 20, 20, 20], 32) == [20, 12, 0, 0]


@given(wants=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=12), budget=st.integers(1, 512))
def test_share_between_principals_uses_the_budget(wants: list[tuple[str, int]], budget: int) -> None:
    shares = share_between([owner for owner, _ in wants], [rows for _, rows in wants], budget)
    assert all(got <= want for got, (_, want) in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(rows for _, rows in wants))


def test_more_requests_do_not_get_more_rows() -> None:
    assert share_between(["ann", "ann", "ann", "bob"], [1000] * 4, 120) == [60, 0, 0, 60]

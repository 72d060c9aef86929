"""How the rows of a step are shared between those who want some."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.scheduler import REST_ROWS, cap_beside_finished, share, share_between, shortest_first


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_share_gives_out_all_that_is_wanted_and_no_more(wants: list[int], budget: int) -> None:
    given_out = share(wants, budget)
    assert all(got <= want for got, want in zip(given_out, wants, strict=True))
    assert sum(given_out) == min(budget, sum(wants))


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_shortest_first_gives_out_as_much(wants: list[int], budget: int) -> None:
    given_out = shortest_first(wants, budget)
    assert all(got <= want for got, want in zip(given_out, wants, strict=True))
    assert sum(given_out) == min(budget, sum(wants))


def test_the_oldest_has_half_and_the_rest_is_shared_evenly() -> None:
    assert share([1000, 1000, 1000], 128) == [64, 32, 32]
    assert share([1000, 1000, 10], 128) == [64, 54, 10]
    assert share([10, 1000], 128) == [10, 118]
    assert share([1000], 128) == [128]


def test_the_oldest_has_half_and_a_short_prompt_passes() -> None:
    assert shortest_first([1000, 900, 10], 128) == [64, 54, 10]
    assert shortest_first([1000], 128) == [128]


def test_prompts_that_are_alike_are_taken_in_one_after_the_other() -> None:
    assert shortest_first([20, 20, 20, 20], 32) == [20, 12, 0, 0]


@given(wants=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=12), budget=st.integers(1, 512))
def test_sharing_between_principals_gives_out_as_much(wants: list[tuple[str, int]], budget: int) -> None:
    given_out = share_between([owner for owner, _ in wants], [rows for _, rows in wants], budget)
    assert all(got <= want for got, (_, want) in zip(given_out, wants, strict=True))
    assert sum(given_out) == min(budget, sum(rows for _, rows in wants))


def test_nobody_gets_more_by_asking_more_often() -> None:
    assert share_between(["ann", "ann", "ann", "bob"], [1000] * 4, 120) == [60, 0, 0, 60]


def test_a_step_in_which_a_prompt_of_one_principal_ends_has_few_rows_of_others() -> None:
    owners, wants = ["ann", "ann", "bob"], [1000, 1000, 10]
    assert cap_beside_finished(owners, wants, [60, 0, 10]) == [REST_ROWS, 0, 10]
    assert cap_beside_finished(owners, wants, [60, 5, 5]) == [60, 5, 5]
    assert cap_beside_finished(["ann", "ann"], [1000, 10], [100, 10]) == [100, 10]

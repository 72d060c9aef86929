from collections.abc import Callable

import pytest

from dragoman.engines.llama.pace import LEAP, LEAP_SECONDS, STEPS_BEFORE, STEPS_BETWEEN_TRIES, Pace
from dragoman.engines.llama.runner import ALONE_SECONDS, LEAST_CHUNK


@pytest.mark.parametrize(
    ("cost", "settles"),
    [
        (lambda rows: 0.1 + rows / 400, 60),
        (lambda rows: rows / 1000, 250),
        (lambda rows: rows / 10, LEAST_CHUNK),
        (lambda rows: rows / 100_000, 512),
    ],
)
def test_the_chunk_settles_where_a_step_has_the_right_length(cost: Callable[[int], float], settles: int) -> None:
    pace = Pace(ALONE_SECONDS, least=LEAST_CHUNK, most=512)
    for _ in range(40):
        pace.took(pace.chunk, cost(pace.chunk))
    assert pace.chunk == pytest.approx(settles, rel=0.03)


def test_one_slow_step_is_forgotten_soon() -> None:
    pace = Pace(ALONE_SECONDS, least=LEAST_CHUNK, most=512)
    for _ in range(20):
        pace.took(pace.chunk, pace.chunk / 1000)
    settled = pace.chunk
    pace.took(pace.chunk, 10 * ALONE_SECONDS)
    assert pace.chunk >= 0.7 * settled
    for _ in range(4):
        pace.took(pace.chunk, pace.chunk / 1000)
    assert pace.chunk >= 0.9 * settled


def test_a_step_that_is_not_full_says_nothing() -> None:
    pace = Pace(ALONE_SECONDS, least=LEAST_CHUNK, most=512)
    pace.took(1, 0.01)
    assert pace.chunk == LEAST_CHUNK


def test_the_largest_batch_may_be_smaller_than_the_least_chunk() -> None:
    pace = Pace(ALONE_SECONDS, least=LEAST_CHUNK, most=8)
    pace.took(8, 0.001)
    assert pace.chunk == 8


GAP = 0.15


def steps_of(pace: Pace, rows: int, cost: Callable[[int, int], float]) -> list[tuple[int, float]]:
    """The rows and seconds of each step in which a prompt of so many rows is taken in."""
    steps, done = [], 0
    while done < rows:
        chunk = min(pace.chunk, rows - done)
        seconds = cost(done, chunk)
        pace.took(chunk, seconds)
        steps.append((chunk, seconds))
        done += chunk
    return steps


def looking_back(position: int, rows: int) -> float:
    """As a CPU of two cores does it: what is before the rows costs a third where they are 64 or more."""
    before = position * 3e-6 * (rows if rows <= 64 else rows / 3)
    return 0.008 + rows * 0.0026 + before


def test_a_long_prompt_is_taken_in_by_leaps_once_they_pay() -> None:
    steps = steps_of(Pace(GAP, least=LEAST_CHUNK, most=512, leaps=True), 1200, looking_back)
    plain = steps_of(Pace(GAP, least=LEAST_CHUNK, most=512), 1200, looking_back)
    assert max(seconds for _, seconds in steps) <= LEAP_SECONDS * GAP
    assert sum(seconds for _, seconds in steps) < 0.85 * sum(seconds for _, seconds in plain)
    assert [rows for rows, _ in steps[-6:-1]] == [LEAP] * 5


def test_the_next_prompt_begins_without_leaps() -> None:
    pace = Pace(GAP, least=LEAST_CHUNK, most=512, leaps=True)
    steps_of(pace, 1200, looking_back)
    assert [rows < LEAP for rows, _ in steps_of(pace, 200, looking_back)[:4]] == [True] * 4


def test_tries_come_after_as_many_steps_as_they_should() -> None:
    pace = Pace(GAP, least=LEAST_CHUNK, most=512, leaps=True)
    steps = [rows for rows, _ in steps_of(pace, 3000, lambda _, rows: 0.008 + rows * 0.0032)]
    first, second, *_ = [at for at, rows in enumerate(steps) if rows == LEAP]
    assert (first, second - first - 1) == (STEPS_BEFORE, STEPS_BETWEEN_TRIES)


@pytest.mark.parametrize("cost", [lambda _, rows: 0.008 + rows * 0.0032, lambda _, rows: rows * 0.02])
def test_leaps_that_do_not_pay_or_last_too_long_are_rare(cost: Callable[[int, int], float]) -> None:
    steps = steps_of(Pace(GAP, least=LEAST_CHUNK, most=512, leaps=True), 3000, cost)
    assert sum(rows == LEAP for rows, _ in steps) <= len(steps) / STEPS_BETWEEN_TRIES + 1

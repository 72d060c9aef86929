from collections.abc import Callable

import pytest

from dragoman.engines.llama.pace import Pace
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

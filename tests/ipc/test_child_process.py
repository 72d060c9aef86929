"""The pause before a restart."""

import pytest

from dragoman.ipc.child_process import YOUNG_SECONDS, RestartBackoff


@pytest.mark.parametrize(
    ("backoff", "ages", "pauses"),
    [
        (RestartBackoff(0.4, 3), [0, 1, 2, 3, 4, 5], [0, 0.4, 0.8, 1.6, 3, 3]),
        (RestartBackoff(1, 30), [0, 0, 0, YOUNG_SECONDS, 0, 0], [0, 1, 2, 0, 1, 2]),
        (RestartBackoff(5, 60, first=5), [0, 0, 0, 0, 0, 0], [5, 10, 20, 40, 60, 60]),
    ],
    ids=["grows", "long run resets it", "first pause"],
)
def test_pause_grows_with_early_failures(backoff: RestartBackoff, ages: list[float], pauses: list[float]) -> None:
    told = []
    for age in ages:
        backoff.note_failure(age)
        told.append(backoff.pause)
    assert told == pauses


def test_early_failure_threshold_can_be_set() -> None:
    backoff = RestartBackoff(1, 30)
    counts = []
    for age in (0, 100, 200):
        backoff.note_failure(age, young=200)
        counts.append(backoff.count)
    assert counts == [1, 2, 1]

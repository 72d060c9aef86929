from dragoman.ipc.restart_backoff import YOUNG_SECONDS, RestartBackoff


def pauses(backoff: RestartBackoff, *ages: float) -> list[float]:
    told = []
    for age in ages:
        backoff.note_failure(age)
        told.append(backoff.pause)
    return told


def test_pause_grows_with_early_failures() -> None:
    assert pauses(RestartBackoff(0.4, 3), 0, 1, 2, 3, 4, 5) == [0, 0.4, 0.8, 1.6, 3, 3]


def test_long_run_resets_the_pause() -> None:
    backoff = RestartBackoff(1, 30)
    assert pauses(backoff, 0, 0, 0, YOUNG_SECONDS, 0, 0) == [0, 1, 2, 0, 1, 2]
    assert backoff.count == 3


def test_pause_never_exceeds_the_longest() -> None:
    assert pauses(RestartBackoff(1, 30), *[0.0] * 2000)[-1] == 30


def test_first_pause_can_be_set() -> None:
    assert pauses(RestartBackoff(5, 60, first=5), *[0.0] * 6) == [5, 10, 20, 40, 60, 60]


def test_early_failure_threshold_can_be_set() -> None:
    backoff = RestartBackoff(1, 30)
    backoff.note_failure(0)
    backoff.note_failure(100, young=200)
    assert backoff.count == 2
    backoff.note_failure(200, young=200)
    assert backoff.count == 1

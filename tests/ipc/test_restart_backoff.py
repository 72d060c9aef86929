from dragoman.ipc.restart_backoff import YOUNG_SECONDS, Deaths


def pauses(deaths: Deaths, *ages: float) -> list[float]:
    told = []
    for age in ages:
        deaths.note(age)
        told.append(deaths.pause)
    return told


def test_a_pause_grows_with_each_that_dies_young() -> None:
    assert pauses(Deaths(0.4, 3), 0, 1, 2, 3, 4, 5) == [0, 0.4, 0.8, 1.6, 3, 3]


def test_one_that_has_grown_old_begins_anew() -> None:
    deaths = Deaths(1, 30)
    assert pauses(deaths, 0, 0, 0, YOUNG_SECONDS, 0, 0) == [0, 1, 2, 0, 1, 2]
    assert deaths.count == 3


def test_after_any_number_of_deaths_the_longest_pause_stays() -> None:
    assert pauses(Deaths(1, 30), *[0.0] * 2000)[-1] == 30


def test_the_first_pause_may_be_one_too() -> None:
    assert pauses(Deaths(5, 60, first=5), *[0.0] * 6) == [5, 10, 20, 40, 60, 60]


def test_what_is_young_is_for_each_to_say() -> None:
    deaths = Deaths(1, 30)
    deaths.note(0)
    deaths.note(100, young=200)
    assert deaths.count == 2
    deaths.note(200, young=200)
    assert deaths.count == 1

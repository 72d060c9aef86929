"""How much memory models need, and what becomes of them when that turns out to be another."""

import pytest

from dragoman.models.residency import (
    Added,
    Admit,
    Asked,
    Bounds,
    Dismissed,
    Load,
    Loaded,
    Measured,
    Passed,
    Refuse,
    Residency,
    Unload,
    Unloaded,
    Weighed,
    Wished,
)
from tests.models.residency_model import left


def test_one_that_needs_more_than_was_thought() -> None:
    residency = Residency(10, 4)
    for key in "ab":
        residency.feed(Added(key), 0)
        residency.feed(Asked(key, 0), 0)
        residency.feed(Weighed(key, 5), 0)
        residency.feed(Loaded(key, 5), 1)
        left(residency, key, 2)
    residency.feed(Added("c"), 3)
    residency.feed(Bounds(16, 4), 3)
    residency.feed(Asked("c", 1), 3)
    assert residency.feed(Weighed("c", 5), 3) == [Load("c")]
    effects = residency.feed(Loaded("c", 8), 9)
    assert effects == [Unload("a", "memory is short"), Admit("c", (1,))]
    effects = residency.feed(Bounds(4, 4), 20)
    assert effects == [Unload("b", "memory is short")]
    residency.feed(Unloaded("a"), 21)
    residency.feed(Unloaded("b"), 21)
    assert left(residency, "c", 21) == [Unload("c", "memory is short")]


def test_one_that_turns_out_larger_than_everything_is_refused() -> None:
    residency = Residency(10, 4)
    residency.feed(Added("a"), 0)
    residency.feed(Asked("a", 7), 0)
    residency.feed(Weighed("a", 5), 0)
    assert residency.feed(Loaded("a", 11), 1) == [
        Unload("a", "it needs more memory than there may be"),
        Refuse("a", (7,), 11),
    ]
    residency.feed(Unloaded("a"), 2)
    assert residency.feed(Asked("a", 8), 3) == [Refuse("a", (8,), 11)]


def test_a_measurement_that_failed_takes_nothing_from_what_was_expected() -> None:
    residency = Residency(budget=100)
    for key, need in (("a", 80), ("b", 90)):
        residency.feed(Added(key), 0)
        residency.feed(Asked(key, 0), 0)
        effects = residency.feed(Weighed(key, need), 0)
        if key == "a":
            assert effects == [Load("a")]
            residency.feed(Loaded("a", 0), 1)
    assert effects == []
    assert residency.seats["a"].weight() == 80


def test_what_it_has_grown_to_counts() -> None:
    residency = Residency(budget=100, turn=4)
    for key in ("a", "b"):
        residency.feed(Added(key), 0)
        residency.feed(Wished(key), 0)
        residency.feed(Weighed(key, 30), 0)
        residency.feed(Loaded(key, 40), 1)
    assert residency.feed(Measured("a", 70), 9) == [Unload("a", "memory is short")]
    residency.feed(Unloaded("a"), 10)
    residency.feed(Asked("a", 0), 10)
    assert residency.seats["b"].state == "leaving"
    assert residency.feed(Unloaded("b"), 11) == [Load("a")]
    residency.feed(Loaded("a", 20), 12)
    assert residency.seats["a"].weight() == 70


@pytest.mark.parametrize("grown", [101, 500])
def test_one_that_has_grown_beyond_everything_goes_on_serving(grown: int) -> None:
    residency = Residency(budget=100, turn=4)
    for key, need in (("a", 60), ("b", 30)):
        residency.feed(Added(key), 0)
        residency.feed(Wished(key), 0)
        residency.feed(Weighed(key, need), 0)
        residency.feed(Loaded(key, need), 1)
    residency.enter("a")
    # The other makes room, which is all that can be had.
    assert residency.feed(Measured("a", grown), 9) == [Unload("b", "memory is short")]
    residency.feed(Unloaded("b"), 10)
    assert left(residency, "a", 11) == []
    assert residency.feed(Passed(), 60) == []
    assert residency.seats["a"].state == "in"
    # Who wants the other has it make room, and it comes again when it is asked for, to be alone.
    assert residency.feed(Asked("b", 0), 61) == [Unload("a", "room is needed for b")]
    assert residency.feed(Unloaded("a"), 62) == [Load("b")]
    assert residency.feed(Loaded("b", 30), 63) == [Admit("b", (0,))]
    left(residency, "b", 64)
    assert residency.feed(Asked("a", 1), 70) == [Unload("b", "room is needed for a")]
    assert residency.feed(Unloaded("b"), 71) == [Load("a")]
    assert residency.feed(Loaded("a", 60), 72) == [Admit("a", (1,))]


def test_what_it_has_grown_to_refuses_nobody_under_a_lower_budget() -> None:
    residency = Residency(budget=100)
    residency.feed(Added("a"), 0)
    residency.feed(Wished("a"), 0)
    residency.feed(Weighed("a", 40), 0)
    residency.feed(Loaded("a", 40), 1)
    residency.feed(Measured("a", 90), 2)
    assert residency.feed(Bounds(50, 4), 40) == []
    residency.feed(Dismissed("a"), 41)
    residency.feed(Unloaded("a"), 42)
    assert residency.feed(Asked("a", 0), 43) == [Load("a")]
    residency.feed(Loaded("a", 40), 44)
    residency.feed(Bounds(30, 4), 45)
    assert left(residency, "a", 80) == [Unload("a", "memory is short")]
    residency.feed(Unloaded("a"), 81)
    assert residency.feed(Asked("a", 1), 82) == [Refuse("a", (1,), 40)]

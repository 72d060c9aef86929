"""Estimated and measured memory in decisions about residency."""

import pytest

from dragoman.models.residency import (
    AdmitRequests,
    LimitsChanged,
    LoadModel,
    LoadRequested,
    MemoryEstimated,
    MemoryMeasured,
    ModelAdded,
    ModelLoaded,
    ModelUnloaded,
    RefuseRequests,
    Residency,
    TimerFired,
    UnloadModel,
    UnloadRequested,
    UseRequested,
)
from tests.models.residency_model import leave


def load(residency: Residency, key: str, need: int, measured: int | None = None) -> None:
    residency.feed(ModelAdded(key), 0)
    residency.feed(LoadRequested(key), 0)
    residency.feed(MemoryEstimated(key, need), 0)
    residency.feed(ModelLoaded(key, need if measured is None else measured), 1)


def test_model_larger_than_estimated_evicts_others() -> None:
    residency = Residency(10, 4)
    for key in "ab":
        load(residency, key, 5)
        residency.enter(key)
        leave(residency, key, 2)
    residency.feed(ModelAdded("c"), 3)
    residency.feed(LimitsChanged(16, 4), 3)
    residency.feed(UseRequested("c", 1), 3)
    assert residency.feed(MemoryEstimated("c", 5), 3) == [LoadModel("c")]
    effects = residency.feed(ModelLoaded("c", 8), 9)
    assert effects == [UnloadModel("a", "memory is short"), AdmitRequests("c", (1,))]
    effects = residency.feed(LimitsChanged(4, 4), 20)
    assert effects == [UnloadModel("b", "memory is short")]
    residency.feed(ModelUnloaded("a"), 21)
    residency.feed(ModelUnloaded("b"), 21)
    assert leave(residency, "c", 21) == [UnloadModel("c", "memory is short")]


def test_model_larger_than_the_budget_is_refused() -> None:
    residency = Residency(10, 4)
    residency.feed(ModelAdded("a"), 0)
    residency.feed(UseRequested("a", 7), 0)
    residency.feed(MemoryEstimated("a", 5), 0)
    assert residency.feed(ModelLoaded("a", 11), 1) == [
        UnloadModel("a", "it needs more memory than the limit"),
        RefuseRequests("a", (7,), 11),
    ]
    residency.feed(ModelUnloaded("a"), 2)
    assert residency.feed(UseRequested("a", 8), 3) == [RefuseRequests("a", (8,), 11)]


def test_failed_measurement_keeps_the_estimate() -> None:
    residency = Residency(budget=100)
    load(residency, "a", 80, measured=0)
    residency.enter("a")
    residency.feed(ModelAdded("b"), 2)
    residency.feed(UseRequested("b", 0), 2)
    assert residency.feed(MemoryEstimated("b", 90), 2) == []
    assert residency.models["a"].current_memory() == 80


def test_growth_counts() -> None:
    residency = Residency(budget=100, turn=4)
    for key in ("a", "b"):
        load(residency, key, 30, 40)
    assert residency.feed(MemoryMeasured("a", 70), 9) == [UnloadModel("a", "memory is short")]
    residency.feed(ModelUnloaded("a"), 10)
    residency.feed(UseRequested("a", 0), 10)
    assert residency.models["b"].state == "unloading"
    assert residency.feed(ModelUnloaded("b"), 11) == [LoadModel("a")]
    residency.feed(ModelLoaded("a", 20), 12)
    assert residency.models["a"].current_memory() == 70


@pytest.mark.parametrize("grown", [101, 500])
def test_model_grown_beyond_the_budget_keeps_serving(grown: int) -> None:
    residency = Residency(budget=100, turn=4)
    load(residency, "a", 60)
    load(residency, "b", 30)
    residency.enter("a")
    # The other model is unloaded, although that is not enough.
    assert residency.feed(MemoryMeasured("a", grown), 9) == [UnloadModel("b", "memory is short")]
    residency.feed(ModelUnloaded("b"), 10)
    assert leave(residency, "a", 11) == []
    assert residency.feed(TimerFired(), 60) == []
    assert residency.models["a"].state == "loaded"
    # A request for the other model evicts it; later it is loaded again, alone.
    assert residency.feed(UseRequested("b", 0), 61) == [UnloadModel("a", "memory is needed for b")]
    assert residency.feed(ModelUnloaded("a"), 62) == [LoadModel("b")]
    assert residency.feed(ModelLoaded("b", 30), 63) == [AdmitRequests("b", (0,))]
    leave(residency, "b", 64)
    assert residency.feed(UseRequested("a", 1), 70) == [UnloadModel("b", "memory is needed for a")]
    assert residency.feed(ModelUnloaded("b"), 71) == [LoadModel("a")]
    assert residency.feed(ModelLoaded("a", 60), 72) == [AdmitRequests("a", (1,))]


def test_growth_does_not_refuse_requests_under_a_lower_budget() -> None:
    residency = Residency(budget=100)
    load(residency, "a", 40)
    residency.feed(MemoryMeasured("a", 90), 2)
    assert residency.feed(LimitsChanged(50, 4), 40) == []
    residency.feed(UnloadRequested("a"), 41)
    residency.feed(ModelUnloaded("a"), 42)
    assert residency.feed(UseRequested("a", 0), 43) == [LoadModel("a")]
    residency.feed(ModelLoaded("a", 40), 44)
    residency.feed(LimitsChanged(30, 4), 45)
    assert leave(residency, "a", 80) == [UnloadModel("a", "memory is short")]
    residency.feed(ModelUnloaded("a"), 81)
    assert residency.feed(UseRequested("a", 1), 82) == [RefuseRequests("a", (1,), 40)]

"""Decisions about residency, with random and fixed schedules, and with estimated and measured memory."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.models.residency import (
    LINGER,
    UNUSED_SECONDS,
    AdmitRequests,
    LimitsChanged,
    LoadModel,
    LoadRequested,
    MemoryEstimated,
    MemoryMeasured,
    ModelAdded,
    ModelLoaded,
    ModelLost,
    ModelRemoved,
    ModelUnloaded,
    RefuseRequests,
    Residency,
    TimerFired,
    UnloadModel,
    UnloadRequested,
    UseCancelled,
    UseRequested,
)
from tests.models.residency_model import World, leave

MODELS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 12), min_size=1)
ASKS = st.lists(st.tuples(st.integers(0, 4), st.floats(0, 5), st.floats(0.01, 6)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(needs=MODELS, budget=st.integers(1, 20) | st.none(), asks=ASKS, keep_alive=st.sampled_from([0.0, 1.0, math.inf]))
def test_budget_holds_and_every_request_is_admitted(
    needs: dict[str, int], budget: int | None, asks: list[tuple[int, float, float]], keep_alive: float
) -> None:
    world = World(needs, budget, keep_alive=keep_alive)
    names = list(needs)
    asked = {}
    for which, pause, length in asks:
        key = names[which % len(names)]
        asked[world.ask(key, length)] = (key, world.now)
        world.run(world.now + pause)
    world.run(world.now + 300)
    # For each earlier model: a turn, the longest request, an unload and a load.
    longest = 0.2 + (len(names) + 1) * (4.0 + 6.0 + 2.0)
    for ticket, (key, at) in asked.items():
        if budget is not None and needs[key] > budget:
            assert ticket in world.refused
        else:
            assert world.admitted[ticket] - at <= longest
    if keep_alive < 2:
        assert not world.inside


@settings(max_examples=100, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["ask", "cancel", "break", "lose", "load", "unload", "remove"])
        ),
        max_size=40,
    )
)
def test_any_order_of_events(asks: list[tuple[str, str]]) -> None:
    world = World({"a": 5, "b": 5, "c": 3}, 9)
    tickets: list[tuple[str, int]] = []
    for key, what in asks:
        if key in world.forgotten:
            continue
        if what == "ask":
            tickets.append((key, world.ask(key)))
        elif what == "cancel" and tickets:
            cancelled, ticket = tickets.pop()
            if cancelled not in world.forgotten and ticket not in world.admitted:
                world.feed(UseCancelled(cancelled, ticket))
        elif what == "break":
            world.broken ^= {key}
        elif what == "lose" and key in world.inside:
            del world._memory[key]
            world.feed(ModelLost(key))
        elif what == "load":
            world.feed(LoadRequested(key))
        elif what == "unload":
            world.feed(UnloadRequested(key))
        elif what == "remove":
            world.feed(ModelRemoved(key))
        world.run(world.now + 0.4)
    world.run(world.now + 200)
    # A failed load refuses its waiting requests, and so does an unload request that aborts a load.
    assert all((ticket in world.admitted) != (ticket in world.refused) for _, ticket in tickets)
    assert all(not model.running for model in world.residency.models.values())


def test_least_recently_used_model_is_unloaded() -> None:
    world = World({"a": 4, "b": 4, "c": 4}, 8)
    for key in "ab":
        world.ask(key)
        world.run(world.now + 10)
    world.ask("a")
    world.run(world.now + 10)
    world.ask("c")
    world.run(world.now + 10)
    assert (world.loads, world.unloads, world.inside) == (["a", "b", "c"], ["b"], {"a", "c"})


@pytest.mark.parametrize(("keep_alive", "at"), [(0.0, 2.1), (3.0, 5.1)])
def test_keep_alive(keep_alive: float, at: float) -> None:
    world = World({"a": 4}, 8, keep_alive=keep_alive)
    world.ask("a")
    world.run(at - 0.05)
    assert world.unloads == []
    world.run(at + 0.05)
    assert world.unloads == ["a"]


def test_alternating_models_load_once_per_turn() -> None:
    """Two clients that repeat their requests cause one load per turn, not one per request."""
    world = World({"a": 4, "b": 4}, 4, turn=10)
    world.seconds = 2
    last = {key: world.ask(key, 0.5) for key in "ab"}
    answers = 0
    while world.now < 120:
        world.run(world.now + 0.1)
        for key, ticket in last.items():
            if world.admitted.get(ticket, math.inf) + 0.5 <= world.now:
                answers += 1
                last[key] = world.ask(key, 0.5)
    # A turn of 10 s, its last request, 1 s of unloading and 2 s of loading.
    assert 120 / 14 - 2 <= len(world.loads) <= 120 / 13 + 2
    assert answers > 100


def test_idle_model_makes_room_after_linger() -> None:
    world = World({"a": 4, "b": 4}, 4, turn=10)
    world.ask("a")
    world.run(5)
    ticket = world.ask("b")
    world.run(10)
    assert world.admitted[ticket] == pytest.approx(5 + 0.1 + 0.5 + 1)
    at = world.now = 10.0
    ticket = world.ask("a")
    world.run(20)
    assert world.admitted[ticket] == pytest.approx(at + 0.5 + 1)
    assert LINGER < 1


def test_requests_after_the_turn_wait_for_the_next_turn() -> None:
    world = World({"a": 4, "b": 4}, 4, turn=3)
    world.ask("a", 5)
    world.run(2)
    other = world.ask("b", 1)
    world.run(3)
    early = world.ask("a", 1)
    world.run(5)
    late = [world.ask("a", 1) for _ in range(3)]
    world.run(30)
    assert world.admitted[early] == 3
    assert world.loads == ["a", "b", "a"]
    assert world.admitted[other] < world.admitted[late[0]]
    assert len({world.admitted[ticket] for ticket in late}) == 1


def test_load_and_unload_requests() -> None:
    world = World({"a": 4}, 8, keep_alive=0)
    world.feed(LoadRequested("a"))
    world.run(20)
    assert world.inside == {"a"}
    world.run(UNUSED_SECONDS + 5)
    assert world.inside == set()
    world.ask("a", 3)
    world.run(world.now + 2)
    world.feed(UnloadRequested("a"))
    late = world.ask("a", 1)
    assert "a" in world.inside
    world.run(world.now + 20)
    assert world.unloads == ["a", "a", "a"]
    assert late in world.admitted


def test_unload_request_aborts_a_load() -> None:
    world = World({"a": 4}, 8)
    first = world.ask("a", 3)
    world.run(0.5)
    world.feed(UnloadRequested("a"))
    assert world.refused == {first}
    late = world.ask("a", 1)
    world.run(30)
    assert (world.loads, world.aborts, world.unloads) == (["a", "a"], ["a"], [])
    assert late in world.admitted
    assert first not in world.admitted


def test_removed_model_serves_its_waiting_requests() -> None:
    world = World({"a": 4, "b": 4}, 4)
    world.ask("a", 5)
    waiting = world.ask("b")
    world.feed(ModelRemoved("a"))
    world.feed(ModelRemoved("b"))
    world.run(30)
    assert waiting in world.admitted
    assert sorted(world.forgotten) == ["a", "b"]


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

"""Which models are in memory, over schedules made by chance and by hand, in a time of their own."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.models.residency import (
    LINGER,
    UNUSED_SECONDS,
    Dismissed,
    GaveUp,
    Lost,
    Removed,
    Wished,
)
from tests.models.residency_model import World

MODELS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 12), min_size=1)
ASKS = st.lists(st.tuples(st.integers(0, 4), st.floats(0, 5), st.floats(0.01, 6)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(needs=MODELS, budget=st.integers(1, 20) | st.none(), asks=ASKS, keep_alive=st.sampled_from([0.0, 1.0, math.inf]))
def test_never_too_much_never_in_use_and_everybody_has_a_turn(
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
    # A turn, an end of the longest request, an unloading and a loading for each model that comes before.
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
        st.tuples(st.sampled_from("abc"), st.sampled_from(["ask", "give up", "lose", "wish", "dismiss", "remove"])),
        max_size=40,
    )
)
def test_any_order_of_events_is_lived_through(asks: list[tuple[str, str]]) -> None:
    world = World({"a": 5, "b": 5, "c": 3}, 9)
    tickets: list[tuple[str, int]] = []
    for key, what in asks:
        if key in world.forgotten:
            continue
        if what == "ask":
            tickets.append((key, world.ask(key)))
        elif what == "give up" and tickets:
            given_up, ticket = tickets.pop()
            if given_up not in world.forgotten and ticket not in world.admitted:
                world.feed(GaveUp(given_up, ticket))
        elif what == "lose" and key in world.inside:
            del world._memory[key]
            world.feed(Lost(key))
        elif what == "wish":
            world.feed(Wished(key))
        elif what == "dismiss":
            world.feed(Dismissed(key))
        elif what == "remove":
            world.feed(Removed(key))
        world.run(world.now + 0.4)
    world.run(world.now + 200)
    # A dismissal aborts a load and refuses the requests that waited for it.
    assert all((ticket in world.admitted) != (ticket in world.refused) for _, ticket in tickets)
    assert all(not seat.running for seat in world.residency.seats.values())


def test_many_who_ask_first_load_once() -> None:
    world = World({"a": 5}, 10)
    tickets = [world.ask("a") for _ in range(10)]
    world.run(3)
    assert world.loads == ["a"]
    assert {world.admitted[ticket] for ticket in tickets} == {1.1}


def test_the_least_recently_used_makes_room() -> None:
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


def test_two_that_alternate_do_not_thrash() -> None:
    """Two callers, each asking again as soon as it has its answer: a load per turn, not one per request."""
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


def test_one_who_asks_for_both_in_turn_waits_only_as_long_as_it_takes_to_see_that_nobody_else_does() -> None:
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


def test_what_is_asked_of_a_model_whose_turn_is_over_waits_together() -> None:
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


def test_a_failure_is_told_to_all_who_wait_and_the_next_tries_again() -> None:
    world = World({"a": 4}, 8)
    world.broken.add("a")
    tickets = [world.ask("a"), world.ask("a")]
    world.run(5)
    assert world.refused == set(tickets)
    world.broken.clear()
    ticket = world.ask("a")
    world.run(10)
    assert ticket in world.admitted
    assert world.loads == ["a", "a"]


def test_a_wish_and_a_dismissal() -> None:
    world = World({"a": 4}, 8, keep_alive=0)
    world.feed(Wished("a"))
    world.run(20)
    assert world.inside == {"a"}
    world.run(UNUSED_SECONDS + 5)
    assert world.inside == set()
    world.ask("a", 3)
    world.run(world.now + 2)
    world.feed(Dismissed("a"))
    late = world.ask("a", 1)
    assert "a" in world.inside
    world.run(world.now + 20)
    assert world.unloads == ["a", "a", "a"]
    assert late in world.admitted


def test_dismissal_aborts_a_load_and_the_next_request_starts_another() -> None:
    world = World({"a": 4}, 8)
    first = world.ask("a", 3)
    world.run(0.5)
    world.feed(Dismissed("a"))
    assert world.refused == {first}
    late = world.ask("a", 1)
    world.run(30)
    assert (world.loads, world.aborts, world.unloads) == (["a", "a"], ["a"], [])
    assert late in world.admitted
    assert first not in world.admitted


def test_a_removed_model_serves_those_who_have_asked_for_it() -> None:
    world = World({"a": 4, "b": 4}, 4)
    world.ask("a", 5)
    waiting = world.ask("b")
    world.feed(Removed("a"))
    world.feed(Removed("b"))
    world.run(30)
    assert waiting in world.admitted
    assert sorted(world.forgotten) == ["a", "b"]


def test_one_that_is_lost_is_loaded_anew_for_the_next() -> None:
    world = World({"a": 4}, 8)
    world.ask("a", 10)
    world.run(3)
    del world._memory["a"]
    world.feed(Lost("a"))
    ticket = world.ask("a")
    world.run(20)
    assert world.loads == ["a", "a"]
    assert ticket in world.admitted

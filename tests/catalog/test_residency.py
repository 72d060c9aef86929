"""Which models are in memory, over schedules made by chance and by hand, in a time of their own."""

import heapq
import itertools
import math
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.catalog.residency import (
    LINGER,
    UNUSED_SECONDS,
    Added,
    Admit,
    Asked,
    Bounds,
    Dismissed,
    Effect,
    Event,
    Failed,
    Forget,
    GaveUp,
    Load,
    Loaded,
    Lost,
    Measured,
    Passed,
    Refuse,
    Removed,
    Residency,
    Unload,
    Unloaded,
    Weigh,
    Weighed,
    Wished,
)


class Left(msgspec.Struct, frozen=True):
    """Somebody has finished using it: what the `Lifecycle` tells in a call of its own, and a plan in its order."""

    key: str


def left(residency: Residency, key: str, now: float) -> list[Effect]:
    return [] if residency.leave(key, now) else residency.feed(Passed(), now)


class World:
    """A machine whose models load, answer and unload in `seconds`, and which minds what it is told."""

    def __init__(
        self, needs: Mapping[str, int], budget: int | None, turn: float = 4.0, keep_alive: float = math.inf
    ) -> None:
        self.needs = needs
        self.budget = budget
        self.residency = Residency(budget, turn)
        self.now = 0.0
        self.seconds = 1.0
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.forgotten: list[str] = []
        self.admitted: dict[int, float] = {}
        self.refused: set[int] = set()
        self.broken: set[str] = set()
        self._memory: dict[str, int] = {}
        self._running = dict.fromkeys(needs, 0)
        self._lengths: dict[int, float] = {}
        self._tickets = itertools.count()
        self._plan: list[tuple[float, int, Event | Left]] = []
        self._order = itertools.count()
        for key in needs:
            self.feed(Added(key, keep_alive))

    def ask(self, key: str, length: float = 1.0) -> int:
        ticket = next(self._tickets)
        self._lengths[ticket] = length
        self.feed(Asked(key, ticket))
        return ticket

    def later(self, seconds: float, event: Event | Left) -> None:
        heapq.heappush(self._plan, (self.now + seconds, next(self._order), event))

    def feed(self, event: Event | Left) -> None:
        if isinstance(event, Unloaded):
            del self._memory[event.key]
        if isinstance(event, Left):
            self._running[event.key] -= 1
            effects = left(self.residency, event.key, self.now)
        else:
            effects = self.residency.feed(event, self.now)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Weigh):
            self.later(0.1, Weighed(effect.key, self.needs[effect.key]))
        elif isinstance(effect, Load):
            assert effect.key not in self._memory
            self._memory[effect.key] = self.needs[effect.key]
            assert self.budget is None or sum(self._memory.values()) <= self.budget
            self.loads.append(effect.key)
            if effect.key in self.broken:
                del self._memory[effect.key]
                self.later(self.seconds, Failed(effect.key))
            else:
                self.later(self.seconds, Loaded(effect.key, self.needs[effect.key]))
        elif isinstance(effect, Unload):
            assert not self._running[effect.key]
            assert effect.key in self._memory
            self.unloads.append(effect.key)
            self.later(self.seconds / 2, Unloaded(effect.key))
        elif isinstance(effect, Admit):
            assert effect.key in self._memory
            for ticket in effect.tickets:
                assert ticket not in self.admitted
                self.admitted[ticket] = self.now
                self._running[effect.key] += 1
                self.later(self._lengths[ticket], Left(effect.key))
        elif isinstance(effect, Refuse):
            self.refused |= set(effect.tickets)
        elif isinstance(effect, Forget):
            self.forgotten.append(effect.key)

    def run(self, until: float) -> None:
        """Let time pass."""
        while True:
            planned = self._plan[0][0] if self._plan else math.inf
            at = min(planned, max(self.now, self.residency.due))
            if at > until:
                self.now = until
                return
            self.now = at
            if planned <= at:
                self.feed(heapq.heappop(self._plan)[2])
            else:
                due = self.residency.due
                self.feed(Passed())
                assert self.residency.due > min(due, self.now), "it asks for the same moment again"

    @property
    def inside(self) -> set[str]:
        return {key for key, seat in self.residency.seats.items() if seat.state == "in"}


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
    assert all(ticket in world.admitted for _, ticket in tickets)
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


def test_one_that_is_dismissed_while_it_comes_serves_those_who_waited_and_goes() -> None:
    world = World({"a": 4}, 8)
    first = world.ask("a", 3)
    world.run(0.5)
    world.feed(Dismissed("a"))
    second = world.ask("a", 1)
    world.run(2)
    assert first in world.admitted
    assert second in world.admitted
    late = world.ask("a", 1)
    assert late not in world.admitted
    world.run(30)
    assert (world.loads, world.unloads) == (["a", "a"], ["a"])
    assert late in world.admitted


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

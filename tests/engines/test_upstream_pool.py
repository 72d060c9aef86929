"""Who is asked next: rules of the pool, without sockets and without waiting."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dragoman.core.request import GenerationRequest, Message, Text, Tool
from dragoman.engines.upstream.pool import (
    MAX_FAILURES,
    MAX_SUSPENSION_SECONDS,
    RECENT_SECONDS,
    SLACK,
    SLACK_SHARE,
    Pool,
    Spot,
)
from dragoman.engines.upstream.prefix_index import BLOCK, PrefixIndex, chain


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(*spots: Spot) -> tuple[Pool, Clock]:
    clock = Clock()
    return Pool(spots or [Spot() for _ in range(3)], clock), clock


def asked(*texts: str, principal: str = "a", tools: Sequence[Tool] = ()) -> GenerationRequest:
    roles = ("system", "user", "assistant", "user")
    messages = tuple(Message(role, (Text(text),)) for role, text in zip(roles, texts, strict=False))  # type: ignore[arg-type]
    return GenerationRequest(model="m", principal=principal, messages=messages, tools=tuple(tools))


def shared(first: list[bytes], second: list[bytes]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


LONG = "All about the sea. " * 200


def test_prompts_that_begin_alike_have_chains_that_begin_alike() -> None:
    first, second = chain(asked(LONG, "What is a tide?")), chain(asked(LONG, "What is a wave? " * 50))
    assert shared(first, second) >= len(LONG) // BLOCK - 1
    longer = chain(asked(LONG, "What is a tide?", "Water that " * 50, "And then?"))
    assert shared(first, longer) >= len(first) - 1


def test_what_another_asks_or_offers_is_another_beginning() -> None:
    first = chain(asked(LONG))
    assert shared(first, chain(asked(LONG, principal="b"))) == 0
    assert shared(first, chain(asked(LONG, tools=[Tool("f", "x" * BLOCK)]))) == 0


@given(st.text(max_size=2000), st.text(max_size=500), st.text(max_size=500))
def test_a_chain_tells_nothing_else(start: str, one: str, two: str) -> None:
    first, second = chain(asked(start + one)), chain(asked(start + two))
    assert shared(first, second) >= (len(start.encode()) // BLOCK) - 1
    if one == two:
        assert first == second


def test_a_conversation_stays_where_it_began() -> None:
    places, _ = pool()
    opening = asked(LONG, "hello")
    first = places.choose(chain(opening))
    assert first is not None
    places.ended(first)
    for _ in range(10):
        other = places.choose(chain(asked("x" * 3000 + str(_))))
        assert other is not None
        at = places.choose(chain(asked(LONG, "hello", "Good morning.", "and?")))
        assert at == first
        places.ended(first)


def test_a_place_with_much_more_to_do_is_spared() -> None:
    places, _ = pool()
    links = chain(asked(LONG))
    chosen = [places.choose(links) for _ in range(30)]
    assert set(chosen) == {0, 1, 2}
    loads = [spot.load for spot in places.spots]
    assert max(loads) - min(loads) <= max(SLACK, min(loads) * SLACK_SHARE) + 1


def test_what_was_in_a_place_that_was_away_is_gone() -> None:
    places, clock = pool(Spot(), Spot())
    links = chain(asked(LONG))
    first = places.choose(links)
    assert first is not None
    places.ended(first)
    places.record_failure(first, is_unreachable=True)
    second = places.choose(links)
    assert second == 1 - first
    clock.now += 1
    places.record_probe(first)
    assert places.state(first) == "up"
    places.ended(second)
    assert places.choose(links) == second


def test_work_is_shared_by_weight() -> None:
    places, _ = pool(Spot(weight=1), Spot(weight=3))
    for _ in range(400):
        at = places.choose()
        assert at is not None
        places.ended(at)
    assert 280 <= places.spots[1].served * 3 <= 320


def test_a_higher_rank_is_for_when_nobody_else_can() -> None:
    places, clock = pool(Spot(), Spot(rank=1))
    assert places.choose() == 0
    places.record_failure(0, is_unreachable=True)
    assert places.choose() == 1
    clock.now += 1
    assert places.choose() == 0
    assert places.choose() == 1
    places.record_success(0)
    assert places.choose() == 0


def test_out_after_failures_in_a_row_and_longer_each_time() -> None:
    places, clock = pool(Spot())
    for _ in range(MAX_FAILURES - 1):
        places.record_failure(0, is_unreachable=False)
    places.record_success(0)
    for _ in range(MAX_FAILURES):
        assert places.choose() == 0
        places.record_failure(0, is_unreachable=False)
    waits = []
    for _ in range(8):
        assert places.choose() is None
        waits.append(places.seconds_until_available())
        clock.now += places.seconds_until_available()
        assert places.choose() == 0
        places.record_failure(0, is_unreachable=False)
    assert waits == [1, 2, 4, 8, 16, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS]
    places.record_probe(0)
    assert places.state(0) == "out"


def test_a_slow_look_is_no_proof() -> None:
    alone, clock = pool(Spot())
    for _ in range(2 * MAX_FAILURES):
        alone.record_slow_probe(0)
    assert alone.choose() == 0
    places, clock = pool(Spot(), Spot())
    for _ in range(MAX_FAILURES - 1):
        places.record_slow_probe(0)
    assert places.state(0) == "up"
    places.record_slow_probe(0)
    assert places.state(0) == "out"
    places.record_probe(0)
    assert places.state(0) == "up"
    places.record_success(0)
    for _ in range(MAX_FAILURES):
        places.record_slow_probe(0)
    assert places.state(0) == "up"
    places.choose()
    places.record_reply_start(0)
    clock.now += RECENT_SECONDS
    places.record_slow_probe(0)
    assert places.state(0) == "up"
    places.ended(0, begun=True)
    for _ in range(MAX_FAILURES):
        places.record_slow_probe(0)
    assert places.state(0) == "out"


def test_who_asks_for_patience_gets_it() -> None:
    places, clock = pool(Spot(), Spot())
    places.pause(0, 5)
    assert [places.choose() for _ in range(3)] == [1, 1, 1]
    assert places.state(0) == "resting"
    clock.now += 5
    assert places.choose() == 0


def test_a_drained_place_gets_nothing_new() -> None:
    places, _ = pool(Spot(), Spot())
    assert places.choose() == 0
    places.drain(0, True)
    assert places.state(0) == "draining"
    assert {places.choose() for _ in range(5)} == {1}
    places.ended(0)
    assert places.state(0) == "drained"
    places.drain(0, False)
    assert places.choose() == 0


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    beginnings = PrefixIndex(max_links=50)
    first = chain(asked("a" * BLOCK * 5))
    beginnings.add(first, 0, 0)
    for number in range(20):
        beginnings.add(chain(asked(f"{number}" * BLOCK * 3)), 1, 0)
        beginnings.add(first[:2], 0, 0)
        assert len(beginnings) <= 50
    assert beginnings.find_longest(first, {0: 0, 1: 0}) == ([0], 2)


class Life(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = Pool([Spot(), Spot(2.0), Spot(1.0, 1)], self.clock, PrefixIndex(max_links=40))
        self.running: list[int] = []

    @rule(prompt=st.integers(0, 5), without=st.sets(st.integers(0, 2)))
    def begin(self, prompt: int, without: set[int]) -> None:
        open_now = [
            at for at, spot in enumerate(self.pool.spots) if spot.is_available(self.clock.now) and at not in without
        ]
        ranks = [self.pool.spots[at].rank for at in open_now]
        loads = [spot.load for spot in self.pool.spots]
        at = self.pool.choose(chain(asked(str(prompt) * 2000)), without)
        if at is None:
            assert not open_now
            return
        assert at in open_now
        assert self.pool.spots[at].rank == min(ranks)
        least = min(loads[other] for other in open_now if self.pool.spots[other].rank == min(ranks))
        assert loads[at] <= least + max(SLACK, least * SLACK_SHARE)
        self.running.append(at)

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 10), how=st.sampled_from(["success", "failure", "unreachable", "overloaded", "abandoned"])
    )
    def end(self, which: int, how: str) -> None:
        at = self.running.pop(which % len(self.running))
        if how == "success":
            self.pool.record_success(at)
        elif how == "overloaded":
            self.pool.pause(at, 2)
        elif how != "abandoned":
            self.pool.record_failure(at, is_unreachable=how == "unreachable")
        self.pool.ended(at)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(at=st.integers(0, 2), drained=st.booleans())
    def drain(self, at: int, drained: bool) -> None:
        self.pool.drain(at, drained)

    @rule(at=st.integers(0, 2))
    def look(self, at: int) -> None:
        self.pool.record_probe(at)

    @rule(at=st.integers(0, 2))
    def look_in_vain(self, at: int) -> None:
        self.pool.record_slow_probe(at)

    @invariant()
    def counts(self) -> None:
        assert [spot.running for spot in self.pool.spots] == [self.running.count(at) for at in range(3)]

    @invariant()
    def nobody_is_out_for_ever(self) -> None:
        assert all(spot.suspended_until <= self.clock.now + MAX_SUSPENSION_SECONDS for spot in self.pool.spots)
        assert self.pool.seconds_until_available() >= 1


TestLife = Life.TestCase

"""Who is asked next: rules of the pool, without sockets and without waiting."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dragoman.core.request import GenerationRequest, Message, Text, Tool
from dragoman.engines.upstream.pool import FAILURES, LONGEST_OUT, RECENT_SECONDS, SLACK, SLACK_SHARE, Pool, Spot
from dragoman.engines.upstream.prefix_index import BLOCK, Beginnings, chain


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
    places.failed(first, unreached=True)
    second = places.choose(links)
    assert second == 1 - first
    clock.now += 1
    places.seen(first)
    assert places.state(first) == "up"
    places.ended(second)
    assert places.choose(links) == second


def test_work_is_shared_by_weight() -> None:
    places, _ = pool(Spot(weight=1), Spot(weight=3))
    for _ in range(400):
        at = places.choose()
        assert at is not None
        places.ended(at)
    assert 280 <= places.spots[1].had * 3 <= 320


def test_a_higher_rank_is_for_when_nobody_else_can() -> None:
    places, clock = pool(Spot(), Spot(rank=1))
    assert places.choose() == 0
    places.failed(0, unreached=True)
    assert places.choose() == 1
    clock.now += 1
    assert places.choose() == 0
    assert places.choose() == 1
    places.worked(0)
    assert places.choose() == 0


def test_out_after_failures_in_a_row_and_longer_each_time() -> None:
    places, clock = pool(Spot())
    for _ in range(FAILURES - 1):
        places.failed(0, unreached=False)
    places.worked(0)
    for _ in range(FAILURES):
        assert places.choose() == 0
        places.failed(0, unreached=False)
    waits = []
    for _ in range(8):
        assert places.choose() is None
        waits.append(places.wait())
        clock.now += places.wait()
        assert places.choose() == 0
        places.failed(0, unreached=False)
    assert waits == [1, 2, 4, 8, 16, LONGEST_OUT, LONGEST_OUT, LONGEST_OUT]
    places.seen(0)
    assert places.state(0) == "out"


def test_a_slow_look_is_no_proof() -> None:
    alone, clock = pool(Spot())
    for _ in range(2 * FAILURES):
        alone.slow(0)
    assert alone.choose() == 0
    places, clock = pool(Spot(), Spot())
    for _ in range(FAILURES - 1):
        places.slow(0)
    assert places.state(0) == "up"
    places.slow(0)
    assert places.state(0) == "out"
    places.seen(0)
    assert places.state(0) == "up"
    places.worked(0)
    for _ in range(FAILURES):
        places.slow(0)
    assert places.state(0) == "up"
    places.choose()
    places.begun(0)
    clock.now += RECENT_SECONDS
    places.slow(0)
    assert places.state(0) == "up"
    places.ended(0, begun=True)
    for _ in range(FAILURES):
        places.slow(0)
    assert places.state(0) == "out"


def test_who_asks_for_patience_gets_it() -> None:
    places, clock = pool(Spot(), Spot())
    places.rests(0, 5)
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
    beginnings = Beginnings(most=50)
    first = chain(asked("a" * BLOCK * 5))
    beginnings.note(first, 0, 0)
    for number in range(20):
        beginnings.note(chain(asked(f"{number}" * BLOCK * 3)), 1, 0)
        beginnings.note(first[:2], 0, 0)
        assert len(beginnings) <= 50
    assert beginnings.longest(first, {0: 0, 1: 0}) == ([0], 2)


class Life(RuleBasedStateMachine):
    """Whatever happens, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = Pool([Spot(), Spot(2.0), Spot(1.0, 1)], self.clock, Beginnings(most=40))
        self.running: list[int] = []

    @rule(prompt=st.integers(0, 5), without=st.sets(st.integers(0, 2)))
    def begin(self, prompt: int, without: set[int]) -> None:
        open_now = [at for at, spot in enumerate(self.pool.spots) if spot.is_open(self.clock.now) and at not in without]
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
    @rule(which=st.integers(0, 10), how=st.sampled_from(["worked", "failed", "unreached", "rests", "left"]))
    def end(self, which: int, how: str) -> None:
        at = self.running.pop(which % len(self.running))
        if how == "worked":
            self.pool.worked(at)
        elif how == "rests":
            self.pool.rests(at, 2)
        elif how != "left":
            self.pool.failed(at, unreached=how == "unreached")
        self.pool.ended(at)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(at=st.integers(0, 2), drained=st.booleans())
    def drain(self, at: int, drained: bool) -> None:
        self.pool.drain(at, drained)

    @rule(at=st.integers(0, 2))
    def look(self, at: int) -> None:
        self.pool.seen(at)

    @rule(at=st.integers(0, 2))
    def look_in_vain(self, at: int) -> None:
        self.pool.slow(at)

    @invariant()
    def counts(self) -> None:
        assert [spot.running for spot in self.pool.spots] == [self.running.count(at) for at in range(3)]

    @invariant()
    def nobody_is_out_for_ever(self) -> None:
        assert all(spot.out_until <= self.clock.now + LONGEST_OUT for spot in self.pool.spots)
        assert self.pool.wait() >= 1


TestLife = Life.TestCase

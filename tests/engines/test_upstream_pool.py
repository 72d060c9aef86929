"""Server selection of the pool, without I/O."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dragoman.core.request import GenerationRequest, Message, Text, Tool
from dragoman.engines.upstream.pool import (
    BLOCK,
    MAX_FAILURES,
    MAX_SUSPENSION_SECONDS,
    RECENT_SECONDS,
    SLACK,
    SLACK_SHARE,
    PoolMember,
    PrefixIndex,
    ServerPool,
    hash_prefixes,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pool(*members: PoolMember) -> tuple[ServerPool, Clock]:
    clock = Clock()
    return ServerPool(members or [PoolMember() for _ in range(3)], clock), clock


def build_request(*texts: str, principal: str = "a", tools: Sequence[Tool] = ()) -> GenerationRequest:
    roles = ("system", "user", "assistant", "user")
    messages = tuple(Message(role, (Text(text),)) for role, text in zip(roles, texts, strict=False))  # type: ignore[arg-type]
    return GenerationRequest(model="m", principal=principal, messages=messages, tools=tuple(tools))


def shared(first: list[bytes], second: list[bytes]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


LONG = "All about the sea. " * 200


def test_prompts_with_a_common_prefix_share_links() -> None:
    first, second = (
        hash_prefixes(build_request(LONG, "What is a tide?")),
        hash_prefixes(build_request(LONG, "What is a wave? " * 50)),
    )
    assert shared(first, second) >= len(LONG) // BLOCK - 1
    longer = hash_prefixes(build_request(LONG, "What is a tide?", "Water that " * 50, "And then?"))
    assert shared(first, longer) >= len(first) - 1


def test_other_principal_or_tools_share_no_links() -> None:
    first = hash_prefixes(build_request(LONG))
    assert shared(first, hash_prefixes(build_request(LONG, principal="b"))) == 0
    assert shared(first, hash_prefixes(build_request(LONG, tools=[Tool("f", "x" * BLOCK)]))) == 0


@given(st.text(max_size=2000), st.text(max_size=500), st.text(max_size=500))
def test_chain_depends_only_on_the_prompt(start: str, one: str, two: str) -> None:
    first, second = hash_prefixes(build_request(start + one)), hash_prefixes(build_request(start + two))
    assert shared(first, second) >= (len(start.encode()) // BLOCK) - 1
    if one == two:
        assert first == second


def test_conversation_stays_on_its_server() -> None:
    servers, _ = pool()
    opening = build_request(LONG, "hello")
    first = servers.choose(hash_prefixes(opening))
    assert first is not None
    servers.ended(first)
    for _ in range(10):
        other = servers.choose(hash_prefixes(build_request("x" * 3000 + str(_))))
        assert other is not None
        at = servers.choose(hash_prefixes(build_request(LONG, "hello", "Good morning.", "and?")))
        assert at == first
        servers.ended(first)


def test_load_is_balanced_despite_known_prefix() -> None:
    servers, _ = pool()
    links = hash_prefixes(build_request(LONG))
    chosen = [servers.choose(links) for _ in range(30)]
    assert set(chosen) == {0, 1, 2}
    loads = [spot.load for spot in servers.members]
    assert max(loads) - min(loads) <= max(SLACK, min(loads) * SLACK_SHARE) + 1


def test_restored_server_has_lost_its_prefixes() -> None:
    servers, clock = pool(PoolMember(), PoolMember())
    links = hash_prefixes(build_request(LONG))
    first = servers.choose(links)
    assert first is not None
    servers.ended(first)
    servers.record_failure(first, is_unreachable=True)
    second = servers.choose(links)
    assert second == 1 - first
    clock.now += 1
    servers.record_probe(first)
    assert servers.state(first) == "up"
    servers.ended(second)
    assert servers.choose(links) == second


def test_requests_are_distributed_by_weight() -> None:
    servers, _ = pool(PoolMember(weight=1), PoolMember(weight=3))
    for _ in range(400):
        at = servers.choose()
        assert at is not None
        servers.ended(at)
    assert 280 <= servers.members[1].served * 3 <= 320


def test_higher_rank_is_used_only_as_fallback() -> None:
    servers, clock = pool(PoolMember(), PoolMember(rank=1))
    assert servers.choose() == 0
    servers.record_failure(0, is_unreachable=True)
    assert servers.choose() == 1
    clock.now += 1
    assert servers.choose() == 0
    assert servers.choose() == 1
    servers.record_success(0)
    assert servers.choose() == 0


def test_suspension_after_consecutive_failures_doubles() -> None:
    servers, clock = pool(PoolMember())
    for _ in range(MAX_FAILURES - 1):
        servers.record_failure(0, is_unreachable=False)
    servers.record_success(0)
    for _ in range(MAX_FAILURES):
        assert servers.choose() == 0
        servers.record_failure(0, is_unreachable=False)
    waits = []
    for _ in range(8):
        assert servers.choose() is None
        waits.append(servers.seconds_until_available())
        clock.now += servers.seconds_until_available()
        assert servers.choose() == 0
        servers.record_failure(0, is_unreachable=False)
    assert waits == [1, 2, 4, 8, 16, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS]
    servers.record_probe(0)
    assert servers.state(0) == "out"


def test_slow_probes_suspend_only_an_idle_server_with_alternatives() -> None:
    alone, clock = pool(PoolMember())
    for _ in range(2 * MAX_FAILURES):
        alone.record_slow_probe(0)
    assert alone.choose() == 0
    servers, clock = pool(PoolMember(), PoolMember())
    for _ in range(MAX_FAILURES - 1):
        servers.record_slow_probe(0)
    assert servers.state(0) == "up"
    servers.record_slow_probe(0)
    assert servers.state(0) == "out"
    servers.record_probe(0)
    assert servers.state(0) == "up"
    servers.record_success(0)
    for _ in range(MAX_FAILURES):
        servers.record_slow_probe(0)
    assert servers.state(0) == "up"
    servers.choose()
    servers.record_reply_start(0)
    clock.now += RECENT_SECONDS
    servers.record_slow_probe(0)
    assert servers.state(0) == "up"
    servers.ended(0, begun=True)
    for _ in range(MAX_FAILURES):
        servers.record_slow_probe(0)
    assert servers.state(0) == "out"


def test_overloaded_server_is_paused() -> None:
    servers, clock = pool(PoolMember(), PoolMember())
    servers.pause(0, 5)
    assert [servers.choose() for _ in range(3)] == [1, 1, 1]
    assert servers.state(0) == "resting"
    clock.now += 5
    assert servers.choose() == 0


def test_drained_server_gets_no_new_requests() -> None:
    servers, _ = pool(PoolMember(), PoolMember())
    assert servers.choose() == 0
    servers.drain(0, True)
    assert servers.state(0) == "draining"
    assert {servers.choose() for _ in range(5)} == {1}
    servers.ended(0)
    assert servers.state(0) == "drained"
    servers.drain(0, False)
    assert servers.choose() == 0


def test_prefix_index_is_bounded_and_evicts_the_oldest() -> None:
    index = PrefixIndex(max_links=50)
    first = hash_prefixes(build_request("a" * BLOCK * 5))
    index.add(first, 0, 0)
    for number in range(20):
        index.add(hash_prefixes(build_request(f"{number}" * BLOCK * 3)), 1, 0)
        index.add(first[:2], 0, 0)
        assert len(index) <= 50
    assert index.find_longest(first, {0: 0, 1: 0}) == ([0], 2)


class PoolMachine(RuleBasedStateMachine):
    """Random sequences of events."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.pool = ServerPool(
            [PoolMember(), PoolMember(2.0), PoolMember(1.0, 1)], self.clock, PrefixIndex(max_links=40)
        )
        self.running: list[int] = []

    @rule(prompt=st.integers(0, 5), without=st.sets(st.integers(0, 2)))
    def begin(self, prompt: int, without: set[int]) -> None:
        available = [
            at for at, spot in enumerate(self.pool.members) if spot.is_available(self.clock.now) and at not in without
        ]
        ranks = [self.pool.members[at].rank for at in available]
        loads = [spot.load for spot in self.pool.members]
        at = self.pool.choose(hash_prefixes(build_request(str(prompt) * 2000)), without)
        if at is None:
            assert not available
            return
        assert at in available
        assert self.pool.members[at].rank == min(ranks)
        least = min(loads[other] for other in available if self.pool.members[other].rank == min(ranks))
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
    def probe(self, at: int) -> None:
        self.pool.record_probe(at)

    @rule(at=st.integers(0, 2))
    def slow_probe(self, at: int) -> None:
        self.pool.record_slow_probe(at)

    @invariant()
    def counts(self) -> None:
        assert [spot.running for spot in self.pool.members] == [self.running.count(at) for at in range(3)]

    @invariant()
    def suspensions_are_bounded(self) -> None:
        assert all(spot.suspended_until <= self.clock.now + MAX_SUSPENSION_SECONDS for spot in self.pool.members)
        assert self.pool.seconds_until_available() >= 1


TestPoolMachine = PoolMachine.TestCase

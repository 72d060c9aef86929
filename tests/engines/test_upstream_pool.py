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


def pool(*members: PoolMember) -> tuple[ServerPool[PoolMember], Clock]:
    clock = Clock()
    return ServerPool(members or [PoolMember() for _ in range(3)], clock), clock


def build_request(*texts: str, principal: str = "a", tools: Sequence[Tool] = ()) -> GenerationRequest:
    roles = ("system", "user", "assistant", "user")
    messages = tuple(Message(role, (Text(text),)) for role, text in zip(roles, texts, strict=False))  # type: ignore[arg-type]
    return GenerationRequest(model="m", principal=principal, messages=messages, tools=tuple(tools))


def shared(first: list[bytes], second: list[bytes]) -> int:
    """The number of links that two chains share. After the first difference they have none in common."""
    return len(set(first) & set(second))


LONG = "All about the sea. " * 200


def test_prompts_with_a_common_prefix_share_links() -> None:
    first = hash_prefixes(build_request(LONG, "What is a tide?"))
    second = hash_prefixes(build_request(LONG, "What is a wave? " * 50))
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
    first = servers.choose(hash_prefixes(build_request(LONG, "hello")))
    assert first is not None
    servers.ended(first)
    for number in range(10):
        assert servers.choose(hash_prefixes(build_request("x" * 3000 + str(number)))) is not None
        assert servers.choose(hash_prefixes(build_request(LONG, "hello", "Good morning.", "and?"))) is first
        servers.ended(first)


def test_load_is_balanced_despite_known_prefix() -> None:
    servers, _ = pool()
    links = hash_prefixes(build_request(LONG))
    assert {servers.choose(links) for _ in range(30)} == set(servers.members)
    loads = [member.load for member in servers.members]
    assert max(loads) - min(loads) <= max(SLACK, min(loads) * SLACK_SHARE) + 1


def test_restored_server_has_lost_its_prefixes() -> None:
    servers, clock = pool(PoolMember(), PoolMember())
    links = hash_prefixes(build_request(LONG))
    first = servers.choose(links)
    assert first is not None
    servers.ended(first)
    servers.record_failure(first, is_unreachable=True)
    second = servers.choose(links)
    assert second not in (None, first)
    clock.now += 1
    servers.record_probe(first)
    assert servers.state(first) == "up"
    servers.ended(second)
    assert servers.choose(links) is second


def test_requests_are_distributed_by_weight() -> None:
    light, heavy = PoolMember(weight=1), PoolMember(weight=3)
    servers, _ = pool(light, heavy)
    for _ in range(400):
        chosen = servers.choose()
        assert chosen is not None
        servers.ended(chosen)
    assert 280 <= heavy.served * 3 <= 320


def test_higher_rank_is_used_only_as_fallback() -> None:
    first, fallback = PoolMember(), PoolMember(rank=1)
    servers, clock = pool(first, fallback)
    assert servers.choose() is first
    servers.record_failure(first, is_unreachable=True)
    assert servers.choose() is fallback
    clock.now += 1
    assert servers.choose() is first
    assert servers.choose() is fallback
    servers.record_success(first)
    assert servers.choose() is first


def test_suspension_after_consecutive_failures_doubles() -> None:
    member = PoolMember()
    servers, clock = pool(member)
    for _ in range(MAX_FAILURES - 1):
        servers.record_failure(member, is_unreachable=False)
    servers.record_success(member)
    for _ in range(MAX_FAILURES):
        assert servers.choose() is member
        servers.record_failure(member, is_unreachable=False)
    waits = []
    for _ in range(8):
        assert servers.choose() is None
        waits.append(servers.seconds_until_available())
        clock.now += servers.seconds_until_available()
        assert servers.choose() is member
        servers.record_failure(member, is_unreachable=False)
    assert waits == [1, 2, 4, 8, 16, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS, MAX_SUSPENSION_SECONDS]
    servers.record_probe(member)
    assert servers.state(member) == "out"


def test_slow_probes_suspend_only_an_idle_server_with_alternatives() -> None:
    slow = PoolMember()
    servers, clock = pool(slow)

    def record_slow_probes(count: int) -> str:
        for _ in range(count):
            servers.record_slow_probe(slow)
        return servers.state(slow)

    assert record_slow_probes(2 * MAX_FAILURES) == "up"
    servers.record_probe(slow)
    servers.add(PoolMember())
    assert record_slow_probes(MAX_FAILURES - 1) == "up"
    assert record_slow_probes(1) == "out"
    servers.record_probe(slow)
    assert servers.state(slow) == "up"
    servers.record_success(slow)
    assert record_slow_probes(MAX_FAILURES) == "up"
    servers.take(slow)
    servers.record_reply_start(slow)
    clock.now += RECENT_SECONDS
    assert record_slow_probes(MAX_FAILURES) == "up"
    servers.ended(slow, begun=True)
    assert record_slow_probes(1) == "out"


def test_overloaded_server_is_paused() -> None:
    busy, other = PoolMember(), PoolMember()
    servers, clock = pool(busy, other)
    servers.pause(busy, 5)
    assert [servers.choose() for _ in range(3)] == [other] * 3
    assert servers.state(busy) == "resting"
    clock.now += 5
    assert servers.choose() is busy


def test_drained_server_gets_no_new_requests() -> None:
    first, other = PoolMember(), PoolMember()
    servers, _ = pool(first, other)
    assert servers.choose() is first
    first.is_drained = True
    assert servers.state(first) == "draining"
    assert {servers.choose() for _ in range(5)} == {other}
    servers.ended(first)
    assert servers.state(first) == "drained"
    first.is_drained = False
    assert servers.choose() is first


def test_added_server_does_not_catch_up() -> None:
    old, new = PoolMember(), PoolMember()
    servers, _ = pool(old)
    for _ in range(100):
        assert servers.choose() is old
        servers.ended(old)
    servers.add(new)
    chosen = [servers.choose() for _ in range(20)]
    assert (chosen.count(old), chosen.count(new)) == (10, 10)


def test_prefix_index_is_bounded_and_evicts_the_oldest() -> None:
    index = PrefixIndex(max_links=50)
    member, other = PoolMember(), PoolMember()
    first = hash_prefixes(build_request("a" * BLOCK * 5))
    index.add(first, member)
    for number in range(20):
        index.add(hash_prefixes(build_request(f"{number}" * BLOCK * 3)), other)
        index.add(first[:2], member)
        assert len(index) <= 50
    assert index.find_longest(first, [member, other]) == [member]
    assert index.find_longest(first[2:], [member, other]) == []


class PoolMachine(RuleBasedStateMachine):
    """Random sequences of events."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        members = [PoolMember(), PoolMember(2.0), PoolMember(1.0, 1)]
        self.pool = ServerPool(members, self.clock, max_links=40)
        self.running: list[PoolMember] = []

    @rule(prompt=st.integers(0, 5), tried=st.sets(st.integers(0, 2)))
    def begin(self, prompt: int, tried: set[int]) -> None:
        without = {self.pool.members[at] for at in tried}
        available = [member for member in self.pool.members if member.is_available(self.clock.now)]
        candidates = [member for member in available if member not in without]
        loads = {member: member.load for member in candidates}
        chosen = self.pool.choose(hash_prefixes(build_request(str(prompt) * 2000)), without)
        if chosen is None:
            assert not candidates
            return
        assert chosen.rank == min(member.rank for member in candidates)
        least = min(load for member, load in loads.items() if member.rank == chosen.rank)
        assert loads[chosen] <= least + max(SLACK, least * SLACK_SHARE)
        self.running.append(chosen)

    @precondition(lambda self: self.running)
    @rule(
        which=st.integers(0, 10), how=st.sampled_from(["success", "failure", "unreachable", "overloaded", "abandoned"])
    )
    def end(self, which: int, how: str) -> None:
        member = self.running.pop(which % len(self.running))
        if how == "success":
            self.pool.record_success(member)
        elif how == "overloaded":
            self.pool.pause(member, 2)
        elif how != "abandoned":
            self.pool.record_failure(member, is_unreachable=how == "unreachable")
        self.pool.ended(member)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(at=st.integers(0, 2), what=st.sampled_from(["drain", "resume", "probe", "slow probe"]))
    def change(self, at: int, what: str) -> None:
        member = self.pool.members[at]
        if what == "probe":
            self.pool.record_probe(member)
        elif what == "slow probe":
            self.pool.record_slow_probe(member)
        else:
            member.is_drained = what == "drain"

    @invariant()
    def counts(self) -> None:
        assert all(member.running == self.running.count(member) for member in self.pool.members)

    @invariant()
    def suspensions_are_bounded(self) -> None:
        assert all(member.suspended_until <= self.clock.now + MAX_SUSPENSION_SECONDS for member in self.pool.members)
        assert self.pool.seconds_until_available() >= 1


TestPoolMachine = PoolMachine.TestCase

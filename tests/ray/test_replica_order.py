"""The choice of replicas, without Ray."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.upstream.pool import SLACK
from dragoman.ray.replica_order import ReplicaCall, ReplicaSelector

SEA = [b"sea", b"sea and tides"]
MOUNTAINS = [b"mountains"]


def selector_of(*replicas: str) -> ReplicaSelector:
    selector = ReplicaSelector()
    selector.update(replicas)
    return selector


def test_prompt_prefers_the_replica_with_its_prefix() -> None:
    selector = selector_of("a", "b", "c")
    for at, links in enumerate((SEA, MOUNTAINS)):
        selector.begin_call("abc"[at], links)()
    for _ in range(5):
        assert selector.order([*SEA, b"and waves"])[0] == "a"
        assert selector.order(MOUNTAINS)[0] == "b"


def test_unknown_prompts_are_distributed() -> None:
    selector = selector_of("a", "b", "c")
    first = [selector.order([])[0] for _ in range(3) if selector.begin_call(selector.order([])[0], []) is not None]
    assert len(set(first)) > 1
    busy = selector_of("a", "b")
    end = busy.begin_call("a", [])
    assert busy.order([]) == ["b", "a"]
    end()
    assert busy.order([])[0] == "b"


def test_much_busier_replica_loses_its_preference() -> None:
    selector = selector_of("a", "b")
    ends = [selector.begin_call("a", SEA) for _ in range(int(SLACK) + 1)]
    assert selector.order(SEA)[0] == "b"
    ends[0]()
    assert selector.order(SEA)[0] == "a"


def test_tried_replicas_come_last() -> None:
    selector = selector_of("a", "b", "c")
    selector.begin_call("a", SEA)()
    assert selector.order(SEA, tried=["a"])[-1] == "a"
    assert set(selector.order(SEA, tried=["a", "b", "c"])) == {"a", "b", "c"}
    assert selector_of("a").order(SEA, tried=["a"]) == ["a"]


def test_new_replica_has_no_prefixes_of_its_predecessor() -> None:
    selector = selector_of("a", "b")
    selector.begin_call("a", SEA)()
    selector.update(["b", "new"])
    end = selector.begin_call("new", MOUNTAINS)
    assert selector.order(SEA)[0] == "b"
    end()
    selector.begin_call("new", SEA)()
    assert selector.order(SEA)[0] == "new"


def test_late_end_does_not_change_the_count_of_a_new_replica() -> None:
    selector = selector_of("a", "b")
    late = [selector.begin_call("a", []) for _ in range(3)]
    selector.update(["b", "new"])
    ends = [selector.begin_call("new", []) for _ in range(2)]
    for end in late:
        end()
    selector.begin_call("b", [])
    assert selector.order([])[0] == "b"
    for end in ends:
        end()
    assert selector.order([])[0] == "new"
    selector.begin_call("gone", SEA)()


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef"), min_size=1), st.binary(max_size=1)), max_size=30))
def test_every_replica_is_in_the_order_once(rounds: list[tuple[set[str], bytes]]) -> None:
    selector, ends = ReplicaSelector(), []
    for replicas, link in rounds:
        selector.update(replicas)
        order = selector.order([link])
        assert sorted(order) == sorted(replicas)
        ends.append(selector.begin_call(order[0], [link]))
        if len(ends) > 3:
            ends.pop(0)()


def test_concurrent_calls_are_counted_when_assigned() -> None:
    selector = selector_of("a", "b")
    heading = []
    for _ in range(10):
        call = ReplicaCall(b"", SEA)
        replica = selector.order(call.links)[0]
        call.assign(replica, selector)
        heading.append(replica)
    assert set(heading) == {"a", "b"}
    assert abs(heading.count("a") - heading.count("b")) <= SLACK + 1


def test_reassigned_call_is_counted_once() -> None:
    selector = selector_of("a", "b")
    call = ReplicaCall(b"body", SEA)
    for replica in ("a", "a", "b"):
        call.assign(replica, selector)
    assert selector.order([]) == ["a", "b"]
    end = selector.begin_call("a", [])
    call.close()
    call.assign("b", selector)
    assert selector.order([]) == ["b", "a"]
    end()
    there = pickle.loads(pickle.dumps(call))
    assert (there.body, there.links) == (b"body", ())

"""Which replica is asked, as they come and go: without Ray."""

import pickle
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.upstream.pool import SLACK
from dragoman.ray.replica_call import Asked
from dragoman.ray.replica_order import Choosing

SEA = [b"sea", b"sea and tides"]
MOUNTAINS = [b"mountains"]


def choosing(*replicas: str) -> Choosing:
    made = Choosing()
    made.update(replicas)
    return made


def test_a_prompt_goes_back_to_where_its_beginning_is() -> None:
    chosen = choosing("a", "b", "c")
    for at, links in enumerate((SEA, MOUNTAINS)):
        chosen.take("abc"[at], links)()
    for _ in range(5):
        assert chosen.order([*SEA, b"and waves"])[0] == "a"
        assert chosen.order(MOUNTAINS)[0] == "b"


def test_prompts_that_nobody_knows_are_spread() -> None:
    chosen = choosing("a", "b", "c")
    first = [chosen.order([])[0] for _ in range(3) if chosen.take(chosen.order([])[0], []) is not None]
    assert len(set(first)) > 1
    busy = choosing("a", "b")
    over = busy.take("a", [])
    assert busy.order([]) == ["b", "a"]
    over()
    assert busy.order([])[0] == "b"


def test_one_that_has_much_more_to_do_is_not_asked_for_what_it_remembers() -> None:
    chosen = choosing("a", "b")
    overs = [chosen.take("a", SEA) for _ in range(int(SLACK) + 1)]
    assert chosen.order(SEA)[0] == "b"
    overs[0]()
    assert chosen.order(SEA)[0] == "a"


def test_where_a_request_has_been_it_comes_last() -> None:
    chosen = choosing("a", "b", "c")
    chosen.take("a", SEA)()
    assert chosen.order(SEA, tried=["a"])[-1] == "a"
    assert set(chosen.order(SEA, tried=["a", "b", "c"])) == {"a", "b", "c"}
    assert choosing("a").order(SEA, tried=["a"]) == ["a"]


def test_one_that_comes_knows_nothing_of_the_one_that_has_gone() -> None:
    chosen = choosing("a", "b")
    chosen.take("a", SEA)()
    over = chosen.take("b", MOUNTAINS)
    chosen.update(["b", "new"])
    over()
    assert chosen.order(SEA)[0] == "new"  # it has had the least, not the sea
    chosen.take("b", SEA)()
    assert chosen.order(SEA)[0] == "b"


def test_what_ends_after_its_replica_has_gone_is_not_counted_for_another() -> None:
    chosen = choosing("a", "b")
    late = [chosen.take("a", []) for _ in range(3)]
    chosen.update(["b", "new"])
    overs = [chosen.take("new", []) for _ in range(2)]
    for over in late:
        over()
    chosen.take("b", [])
    assert chosen.order([])[0] == "b"
    for over in overs:
        over()
    assert chosen.order([])[0] == "new"
    chosen.take("gone", SEA)()


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdef"), min_size=1), st.binary(max_size=1)), max_size=30))
def test_whoever_is_there_is_in_the_order_once(rounds: list[tuple[set[str], bytes]]) -> None:
    chosen, overs = Choosing(), []
    for replicas, link in rounds:
        chosen.update(replicas)
        order = chosen.order([link])
        assert sorted(order) == sorted(replicas)
        overs.append(chosen.take(order[0], [link]))
        if len(overs) > 3:
            overs.pop(0)()


def test_those_who_come_at_once_see_each_other_on_their_way() -> None:
    chosen = choosing("a", "b")
    heading = []
    for _ in range(10):
        asked = Asked(b"", SEA)
        replica = chosen.order(asked.links)[0]
        asked.heads_for(replica, partial(chosen.take, replica, SEA))
        heading.append(replica)
    assert set(heading) == {"a", "b"}
    assert abs(heading.count("a") - heading.count("b")) <= SLACK + 1


def test_one_that_goes_elsewhere_is_counted_there_and_at_the_end_nowhere() -> None:
    counts = {"a": 0, "b": 0}

    def take(replica: str) -> Callable[[], None]:
        counts[replica] += 1
        return lambda: counts.update({replica: counts[replica] - 1})

    asked = Asked(b"body", SEA)
    for replica in ("a", "a", "b"):
        asked.heads_for(replica, partial(take, replica))
    assert counts == {"a": 0, "b": 1}
    asked.close()
    asked.heads_for("a", partial(take, "a"))
    assert counts == {"a": 0, "b": 0}
    there = pickle.loads(pickle.dumps(asked))
    assert (there.body, there.links) == (b"body", ())

"""The slots of jobs in the decoder's memory, the cache of prefixes, and pinned prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.sequences import GAP_PLANS, Clear, Copy, PinnedPrefixes
from tests.engines.scheduler_model import SchedulerModel, chunks_of


def test_evicted_slot_is_cached_and_reused() -> None:
    world = SchedulerModel(1, 1)
    first, second = tuple(range(100)), tuple(range(200, 300))
    world.add(first, 0)
    world.finish()
    world.add(second, 0)
    assert world.step(200).effects == (Copy(0, 1), Clear(0))
    world.finish()
    world.add(first, 0)
    plan = world.step(200)
    assert chunks_of(plan) == [(2, 98, 2, 1)]
    world.finish()
    assert Copy(1, 0) in plan.effects


def test_cache_evicts_the_least_recently_used() -> None:
    world = SchedulerModel(1, 2)
    texts = [tuple(range(100 * at, 100 * at + 90)) for at in range(5)]
    for prompt in texts[:3]:
        world.add(prompt, 0)
        world.finish()
    world.add(texts[0], 0)
    world.finish()
    world.add(texts[3], 0)
    world.finish()
    world.add(texts[0], 0)
    assert len(world.step(200).chunks[0].tokens) == 2
    world.finish()
    world.add(texts[1], 0)
    assert len(world.step(200).chunks[0].tokens) == 90


def test_jobs_get_adjacent_slots() -> None:
    world = SchedulerModel(6)
    for at in range(6):
        world.add(tuple(range(100 * at, 100 * at + 40)), 50)
    world.step(600)
    for job in (1, 3, 4, 5):
        world.end(job)
    world.add(tuple(range(500, 550)), 9)
    assert [chunk.sequence for chunk in world.step(600).chunks] == [0, 1, 2]


def six_jobs_with_a_gap() -> SchedulerModel:
    world = SchedulerModel(6, 1)
    for at in range(6):
        world.add(tuple(range(100 * at, 100 * at + 40)), 50)
    world.step(600)
    world.end(2)
    for _ in range(GAP_PLANS):
        assert not world.step(600).effects
    return world


def test_persistent_gap_is_closed_and_its_text_cached() -> None:
    world = six_jobs_with_a_gap()
    plan = world.step(600)
    assert plan.effects == (Copy(2, 6), Clear(2), Copy(5, 2))
    assert [chunk.sequence for chunk in plan.chunks] == [0, 1, 2, 3, 4]
    assert not world.step(600).effects
    world.add((*range(200, 240), 7, 7), 1)
    assert [chunk.start for chunk in world.step(600).chunks if chunk.job == 6] == [40]
    world.finish()


def test_job_of_the_smaller_group_moves() -> None:
    world = six_jobs_with_a_gap()
    world.end(1)
    assert [chunk.sequence for chunk in world.step(600).chunks] == [2, 3, 4, 5]


# Pinned prefixes.


def text(which: int, length: int = 100) -> tuple[int, ...]:
    return tuple(range(1000 * which, 1000 * which + length))


def run_prompt(world: SchedulerModel, prompt: tuple[int, ...], keep: float = 0, principal: str = "") -> int:
    """Run a prompt and return how many of its tokens were reused."""
    world.add(prompt, 1, principal=principal, keep=keep)
    job = len(world.jobs) - 1
    shared = 0
    while not world.scheduler.idle:
        world.step(200)
        if job in world.scheduler.slots:
            shared = world.scheduler.shared(job)
    return shared


def test_pinned_prefix_survives_until_it_expires() -> None:
    world = SchedulerModel(1, 2)
    run_prompt(world, text(0), keep=300)
    for which in range(1, 20):
        run_prompt(world, text(which))
    assert run_prompt(world, text(0)) == 98
    world.now = 301
    for which in range(20, 24):
        run_prompt(world, text(which))
    assert run_prompt(world, text(0)) == 0


def test_half_of_the_cache_may_be_pinned_and_the_oldest_is_replaced() -> None:
    world = SchedulerModel(1, 4)
    for which in range(3):
        run_prompt(world, text(which), keep=300)
    for which in range(10, 30):
        run_prompt(world, text(which))
    assert [run_prompt(world, text(which)) for which in (1, 2, 0)] == [98, 98, 0]


def test_kept_tokens_are_reported_once() -> None:
    world = SchedulerModel(1, 2)
    reported: list[tuple[int, int]] = []
    for prompt in (text(0), text(0), (*text(0), *text(5))):
        world.add(prompt, 2, keep=300)
        world.step(500)
        reported.append((world.scheduler.shared(len(reported)), world.scheduler.kept(len(reported))))
        world.finish()
    assert reported == [(0, 100), (98, 2), (100, 100)]


@pytest.mark.parametrize(("cached", "length"), [(2, 20), (1, 100)], ids=["short prompt", "cache of one sequence"])
def test_prompt_that_is_not_pinned(cached: int, length: int) -> None:
    world = SchedulerModel(1, cached)
    world.add(text(0, length), 1, keep=300)
    world.step(200)
    assert world.scheduler.kept(0) == 0
    world.finish()
    assert not world.scheduler.sequences.pins.live


def test_incomplete_or_failed_prompt_is_not_pinned() -> None:
    world = SchedulerModel(1, 2)
    world.add(text(0), 1, keep=300)
    world.step(50)
    world.end(0)
    world.add(text(1), 1, keep=300)
    world.step(200, frozenset([1]))
    assert not world.scheduler.sequences.pins.live


def test_longer_text_replaces_its_pinned_prefix() -> None:
    now = 0.0
    pins = PinnedPrefixes(2, lambda: now)
    pins.add((1, 2), "", 3600)
    pins.add((7,), "", 300)
    now = 10
    pins.add((1, 2, 3), "", 300)
    assert [(pin.tokens, pin.expires_at) for pin in pins.live] == [((7,), 300), ((1, 2, 3), 3600)]
    pins.add((1, 2, 3), "other", 5)
    assert [pin.salt for pin in pins.live] == ["", "other"]
    now = 15
    assert [pin.salt for pin in pins.live] == [""]


@given(
    limit=st.integers(0, 4),
    additions=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from("ab"), st.integers(1, 9), st.integers(0, 3)),
        max_size=30,
    ),
)
def test_pins_are_limited_live_and_distinct(limit: int, additions: list[tuple[list[int], str, int, int]]) -> None:
    now = 0

    pins = PinnedPrefixes(limit, lambda: now)
    for tokens, salt, seconds, elapsed in additions:
        pins.add(tokens, salt, seconds)
        live = list(pins.live)
        assert len(live) <= limit
        if limit:
            assert live[-1].tokens == tuple(tokens)
            assert live[-1].expires_at >= now + seconds
        for earlier, pin in enumerate(live):
            for later in live[earlier + 1 :]:
                assert pin.salt != later.salt or later.tokens[: len(pin.tokens)] != pin.tokens
        now += elapsed
        assert all(pin.expires_at > now for pin in pins.live)

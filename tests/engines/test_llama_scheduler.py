"""The scheduler with a simulated memory: in any order of events, a job sees its own prompt and tokens only."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.llama.scheduler import Job, Scheduler
from dragoman.engines.llama.sequences import Clear, Copy, Trim
from tests.engines.scheduler_model import WRONG, SchedulerModel, chunks_of

SCHEDULES = 5_000

LONG = [tuple(range(90)), (*range(50), *range(90, 200)), (*range(120), 7, 7, 7)]


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        chance = random.Random(seed)
        sharing = chance.random() < 0.9
        world = SchedulerModel(
            chance.randint(1, 5),
            chance.randint(0, 5) if sharing else 0,
            sharing=sharing,
            isolate=chance.random() < 0.3,
        )
        for _ in range(chance.randrange(40)):
            random_event(chance, world)
        world.finish()


def random_event(chance: random.Random, world: SchedulerModel) -> None:
    kind = chance.random()
    world.now += chance.random()
    if kind < 0.35:
        prompt = chance.choice(LONG)[: chance.randrange(1, 200)]
        prompt += tuple(chance.randrange(3) for _ in range(chance.randrange(6)))
        if world.jobs and chance.random() < 0.3:
            earlier = chance.choice(list(world.jobs))
            prompt = (*world.jobs[earlier].prompt, *world.replies[earlier], *prompt[:40])
        keep = chance.choice([0, 0, 5, 50])
        world.add(prompt, chance.randrange(12), chance.random() < 0.1, chance.choice(["ann", "bob"]), keep)
    elif kind < 0.45 and world.jobs:
        world.end(chance.choice(list(world.jobs)))
    else:
        failing = [chance.choice(list(world.jobs))] if world.jobs and chance.random() < 0.1 else []
        drafting = (chance.randrange(5), chance.randrange(3)) if chance.random() < 0.6 else (0, 0)
        world.step(chance.randint(1, 150), frozenset(failing), *drafting)


PROMPTS = st.one_of(
    st.sampled_from([(1,), (1, 2), tuple(range(20)), *LONG]),
    st.lists(st.integers(0, 3), min_size=1, max_size=30).map(tuple),
)
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(0, 6), st.booleans() | st.just(False))
END = st.tuples(st.just("end"), st.integers(0, 30))
DRAFT = st.tuples(st.integers(0, 4), st.integers(0, 2))
STEP = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(0, 30), max_size=2), DRAFT)
GOOD_STEP = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(), max_size=0), DRAFT)


@settings(max_examples=100, deadline=None)
@given(
    slots=st.integers(1, 5),
    events=st.lists(st.one_of(ADD, ADD, GOOD_STEP, GOOD_STEP, END, STEP), max_size=60),
)
def test_any_order_of_events(slots: int, events: list[tuple[object, ...]]) -> None:
    world = SchedulerModel(slots, 2)
    for event in events:
        match event:
            case "add", tuple(prompt), int(limit), bool(prompt_outputs):
                world.add(prompt, limit, prompt_outputs)
            case "end", int(job) if job in world.jobs:
                world.end(job)
            case "step", int(budget), frozenset(failing), (int(right), int(wrong)):
                world.step(budget, failing, right, wrong)
    world.finish()


def test_equal_prompts_wait_for_the_first() -> None:
    world = SchedulerModel(3)
    for _ in range(3):
        world.add(tuple(range(100)), 9)
    assert chunks_of(world.step(64)) == [(0, 0, 64, 0)]
    assert chunks_of(world.step(64)) == [(0, 64, 36, 1)]
    third = world.step(64)
    assert third.effects == (Copy(0, 1), Trim(1, 98), Copy(1, 2), Trim(2, 98))
    assert chunks_of(third) == [(0, 100, 1, 1), (1, 98, 2, 1), (2, 98, 2, 1)]
    assert [world.scheduler.shared(job) for job in range(3)] == [0, 98, 98]


def test_common_prefix_is_computed_once() -> None:
    world = SchedulerModel(3)
    common = tuple(range(100))
    for own in range(3):
        world.add((*common, *[200 + own] * (10 if own else 300)), 1)
    assert chunks_of(world.step(64)) == [(0, 0, 64, 0)]
    assert chunks_of(world.step(64)) == [(0, 64, 64, 0)]
    assert [(job, start) for job, start, *_ in chunks_of(world.step(64))] == [(0, 128), (1, 100), (2, 100)]
    world.finish()


def test_short_common_prefix_is_not_waited_for() -> None:
    world = SchedulerModel(2)
    world.add((*range(31), 500), 1)
    world.add((*range(31), 600), 1)
    assert chunks_of(world.step(64)) == [(0, 0, 32, 1), (1, 0, 32, 1)]


def test_next_turn_continues_in_its_slot() -> None:
    world = SchedulerModel(2)
    world.add(tuple(range(100)), 5)
    world.finish()
    world.add((*range(100), *world.replies[0], 7, 7, 7), 1)
    plan = world.step(64)
    assert plan.effects == (Trim(0, 105),)
    assert chunks_of(plan) == [(1, 105, 3, 1)]


def test_follower_reuses_a_cancelled_leader() -> None:
    world = SchedulerModel(2)
    for _ in range(2):
        world.add(tuple(range(100)), 1)
    world.step(64)
    world.end(0)
    plan = world.step(64)
    assert chunks_of(plan) == [(1, 64, 36, 1)]
    assert plan.chunks[0].sequence == 0
    assert world.scheduler.shared(1) == 64


def test_follower_does_not_reuse_a_failed_leader() -> None:
    world = SchedulerModel(2)
    for _ in range(2):
        world.add(tuple(range(100)), 1)
    world.step(64, failing=frozenset({0}))
    plan = world.step(64)
    assert not plan.effects
    assert chunks_of(plan) == [(1, 0, 64, 0)]


def test_waiting_job_gets_the_next_free_slot() -> None:
    world = SchedulerModel(1)
    world.add((1, 2, 3), 9)
    world.add((4, 5), 9)
    world.step(64)
    assert chunks_of(world.step(64)) == [(0, 3, 1, 1)]
    world.end(0)
    plan = world.step(64)
    assert plan.effects == (Clear(0),)
    assert chunks_of(plan) == [(1, 0, 2, 1)]


def test_isolated_principals_share_no_prefixes() -> None:
    world = SchedulerModel(2, isolate=True)
    for principal in ("ann", "bob"):
        world.add(tuple(range(100)), 0, principal=principal)
    assert chunks_of(world.step(200)) == [(0, 0, 100, 1), (1, 0, 100, 1)]
    world.add(tuple(range(100)), 0, principal="bob")
    assert chunks_of(world.step(200)) == [(2, 98, 2, 1)]


def test_without_sharing_every_job_prefills() -> None:
    world = SchedulerModel(2, sharing=False)
    for _ in range(2):
        world.add(tuple(range(50)), 0)
    assert chunks_of(world.step(100)) == [(0, 0, 50, 1), (1, 0, 50, 1)]


def test_wrong_part_of_a_draft_is_trimmed() -> None:
    world = SchedulerModel(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    assert world.step(64, right=2, wrong=1).chunks[0].tokens == (0, 1, 2, WRONG)
    assert world.replies[0] == [0, 1, 2, 0]
    plan = world.step(64)
    assert plan.effects == (Trim(0, 43),)
    assert chunks_of(plan) == [(0, 43, 1, 1)]


def test_correct_draft_needs_no_trim() -> None:
    world = SchedulerModel(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    world.step(64, right=3)
    plan = world.step(64)
    assert not plan.effects
    assert chunks_of(plan) == [(0, 44, 1, 1)]


def test_no_drafts_while_a_prompt_is_prefilled() -> None:
    world = SchedulerModel(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    world.add(tuple(range(100, 200)), 1)
    assert chunks_of(world.step(64, right=3)) == [(0, 40, 1, 1), (1, 0, 64, 0)]


def test_unsampled_draft_is_not_reused() -> None:
    world = SchedulerModel(1)
    world.add(tuple(range(40)), 3)
    world.step(64)
    world.step(64, right=4, wrong=2)
    assert world.ended == {0}
    world.add((*range(40), 0, 1, 2, 0, 1, 2, WRONG, WRONG), 1)
    plan = world.step(64)
    assert plan.effects == (Trim(0, 43), Trim(0, 43))
    assert plan.chunks[0].start == 43


def test_plan_without_results_of_the_last_one_fails() -> None:
    scheduler = Scheduler(1)
    scheduler.add(Job(0, (1, 2, 3)))
    scheduler.plan(64)
    with pytest.raises(RuntimeError, match="not been heard of"):
        scheduler.plan(64)

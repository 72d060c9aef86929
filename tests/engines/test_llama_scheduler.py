"""The scheduler with a simulated memory: in any order of events, a job sees its own prompt and tokens only."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.prefill_shares import (
    REST_ROWS,
    RecentUsage,
    cap_beside_finished,
    share_between,
    shortest_first,
)
from dragoman.engines.llama.scheduler import Job, Scheduler
from dragoman.engines.llama.sequences import Clear, Copy, Trim
from tests.engines.scheduler_model import WRONG, SchedulerModel, chunks_of

SCHEDULES = 5_000

LONG = [tuple(range(90)), (*range(50), *range(90, 200)), (*range(120), 7, 7, 7)]


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        rng = random.Random(seed)
        sharing = rng.random() < 0.9
        world = SchedulerModel(
            rng.randint(1, 5),
            rng.randint(0, 5) if sharing else 0,
            sharing=sharing,
            isolate=rng.random() < 0.3,
        )
        for _ in range(rng.randrange(40)):
            random_event(rng, world)
        world.finish()


def random_event(rng: random.Random, world: SchedulerModel) -> None:
    kind = rng.random()
    world.now += rng.random()
    if kind < 0.35:
        prompt = rng.choice(LONG)[: rng.randrange(1, 200)]
        prompt += tuple(rng.randrange(3) for _ in range(rng.randrange(6)))
        if world.jobs and rng.random() < 0.3:
            earlier = rng.choice(list(world.jobs))
            prompt = (*world.jobs[earlier].prompt, *world.replies[earlier], *prompt[:40])
        keep = rng.choice([0, 0, 5, 50])
        world.add(prompt, rng.randrange(12), rng.random() < 0.1, rng.choice(["ann", "bob"]), keep)
    elif kind < 0.45 and world.jobs:
        world.end(rng.choice(list(world.jobs)))
    else:
        failing = [rng.choice(list(world.jobs))] if world.jobs and rng.random() < 0.1 else []
        drafting = (rng.randrange(5), rng.randrange(3)) if rng.random() < 0.6 else (0, 0)
        world.step(rng.randint(1, 150), frozenset(failing), *drafting)


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


@pytest.mark.parametrize(("fails", "chunk"), [(False, (1, 64, 36, 1)), (True, (1, 0, 64, 0))])
def test_follower_reuses_a_cancelled_leader_but_not_a_failed_one(fails: bool, chunk: tuple[int, ...]) -> None:
    world = SchedulerModel(2)
    for _ in range(2):
        world.add(tuple(range(100)), 1)
    world.step(64, failing=frozenset({0} if fails else ()))
    world.end(0)
    assert chunks_of(world.step(64)) == [chunk]


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


def decoding_job(slots: int, limit: int) -> SchedulerModel:
    """Return a scheduler with one job that has sampled its first token."""
    world = SchedulerModel(slots)
    world.add(tuple(range(40)), limit)
    world.step(64)
    return world


def test_wrong_part_of_a_draft_is_trimmed() -> None:
    world = decoding_job(2, limit=9)
    assert world.step(64, right=2, wrong=1).chunks[0].tokens == (0, 1, 2, WRONG)
    assert world.replies[0] == [0, 1, 2, 0]
    plan = world.step(64, right=3)
    assert plan.effects == (Trim(0, 43),)
    assert chunks_of(plan) == [(0, 43, 4, 4)]
    # The last draft was right.
    plan = world.step(64)
    assert not plan.effects
    assert chunks_of(plan) == [(0, 47, 1, 1)]


def test_no_drafts_while_a_prompt_is_prefilled() -> None:
    world = decoding_job(2, limit=9)
    world.add(tuple(range(100, 200)), 1)
    assert chunks_of(world.step(64, right=3)) == [(0, 40, 1, 1), (1, 0, 64, 0)]


def test_unsampled_draft_is_not_reused() -> None:
    world = decoding_job(1, limit=3)
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
    with pytest.raises(RuntimeError, match="were not reported"):
        scheduler.plan(64)


# The division of a step's rows.


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_division_uses_the_budget_and_exceeds_no_demand(wants: list[int], budget: int) -> None:
    shares = shortest_first(wants, budget)
    assert all(got <= want for got, want in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(wants))


@pytest.mark.parametrize(
    ("wants", "budget", "shares"),
    [
        ([1000, 900, 10], 128, [64, 54, 10]),
        ([1000], 128, [128]),
        ([20, 20, 20, 20], 32, [20, 12, 0, 0]),
    ],
)
def test_oldest_gets_half_and_short_prompts_come_next(wants: list[int], budget: int, shares: list[int]) -> None:
    assert shortest_first(wants, budget) == shares


@given(wants=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=12), budget=st.integers(1, 512))
def test_share_between_principals_uses_the_budget(wants: list[tuple[str, int]], budget: int) -> None:
    owners = [owner for owner, _ in wants]
    shares = share_between(sorted(set(owners)), owners, [rows for _, rows in wants], budget)
    assert all(got <= want for got, (_, want) in zip(shares, wants, strict=True))
    assert sum(shares) == min(budget, sum(rows for _, rows in wants))


def test_first_principal_gets_three_quarters() -> None:
    assert share_between(["bob", "ann"], ["ann", "ann", "bob"], [1000] * 3, 120) == [30, 0, 90]
    assert share_between(["bob", "ann"], ["ann", "ann", "bob"], [1000, 1000, 20], 120) == [100, 0, 20]


def test_principal_with_fewest_recent_and_missing_rows_comes_first() -> None:
    now = 0.0
    usage = RecentUsage(lambda: now)
    usage.record(["ann", "bob"], [100, 10])
    assert usage.order(["ann", "bob", "ann"], {}) == ["bob", "ann"]
    assert usage.order(["ann", "bob", "eve"], {}) == ["eve", "bob", "ann"]
    assert usage.order(["ann", "bob", "eve"], {"ann": 1, "bob": 80, "eve": 500}) == ["bob", "ann", "eve"]
    assert usage.has_lighter({"ann": 1})
    assert usage.has_lighter({"eve": 11})
    assert not usage.has_lighter({"eve": 10})
    assert not usage.has_lighter({"ann": 1, "bob": 1})
    now = 60.0
    usage.record(["bob"], [10])
    assert usage.order(["ann", "bob"], {}) == ["ann", "bob"]


def test_long_prompts_leave_room_for_a_lighter_principal() -> None:
    scheduler = Scheduler(slots=4)
    scheduler.add(Job(1, tuple(range(100)), principal="bob"))
    scheduler.decoded(scheduler.plan(128).chunks[0])
    scheduler.add(Job(2, tuple(range(90)), principal="ann"))
    assert not scheduler.expects_lighter_principal
    scheduler.end(2)
    scheduler.add(Job(3, tuple(range(1000)), principal="ann"))
    assert scheduler.expects_lighter_principal
    scheduler.decoded(scheduler.plan(256).chunks[0])
    assert scheduler.expects_lighter_principal
    scheduler.end(3)
    scheduler.add(Job(4, tuple(range(5000, 5040)), principal="ann"))
    scheduler.plan(4)
    assert not scheduler.expects_lighter_principal


def test_step_that_ends_a_prompt_of_one_principal_has_few_rows_of_others() -> None:
    owners, wants = ["ann", "ann", "bob"], [1000, 1000, 10]
    assert cap_beside_finished(owners, wants, [60, 0, 10]) == [REST_ROWS, 0, 10]
    assert cap_beside_finished(owners, wants, [60, 5, 5]) == [60, 5, 5]
    assert cap_beside_finished(["ann", "ann"], [1000, 10], [100, 10]) == [100, 10]

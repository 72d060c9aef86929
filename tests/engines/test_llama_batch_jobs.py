"""Batch jobs of the llama engine: they use what interactive jobs leave free, and always proceed."""

import asyncio
import random
from typing import Any

import pytest

from dragoman.engines.llama.binding import ABORTED
from dragoman.engines.llama.compute_thread import StepPace
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.prefill_shares import REST_ROWS
from dragoman.engines.llama.scheduler import BATCH_SHARE, PAUSE_SECONDS, Plan, Workload
from tests.engines.llama_fixtures import CITY, FRANCE, SEA, collect, completion, runner_of, wait_until, wait_until_idle
from tests.engines.scheduler_model import SchedulerModel, chunks_of

READING = Workload(has_batch=False, has_interactive=True, is_reading=True, is_decoding=False)
TEXT = tuple(range(1000))


def jobs_of(plan: Plan) -> list[int]:
    return [chunk.job for chunk in plan.chunks]


def decoding_batch_job(slots: int = 3) -> SchedulerModel:
    """Return a scheduler with one batch job that has sampled its first token."""
    world = SchedulerModel(slots)
    world.add(TEXT[:40], 100, is_batch=True)
    world.step(64)
    return world


def test_batch_jobs_pause_while_an_interactive_prompt_is_read() -> None:
    world = decoding_batch_job()
    world.add(TEXT[500:600], 9, is_batch=True)
    world.add(TEXT[200:300], 9)
    assert chunks_of(world.step(64)) == [(2, 0, 64, 0)]
    assert chunks_of(world.step(64)) == [(2, 64, 36, 1)]


def test_paused_batch_jobs_have_some_rows_after_a_while() -> None:
    world = decoding_batch_job()
    world.add(TEXT[500:600], 9, is_batch=True)
    world.add(TEXT[:900:2], 9)
    assert jobs_of(world.step(64)) == [2]
    world.now += PAUSE_SECONDS
    assert sorted(chunks_of(world.step(64))) == [(0, 40, 1, 1), (1, 0, REST_ROWS, 0), (2, 64, 64 - REST_ROWS, 0)]
    assert jobs_of(world.step(64)) == [2]


def test_batch_jobs_have_a_share_of_the_time_beside_interactive_replies() -> None:
    world = decoding_batch_job()
    world.add(TEXT[200:240], 100)
    world.step(64)
    plans = []
    for _ in range(50):
        plans.append(jobs_of(world.step(64)))
        world.now += 0.03
    assert all(1 in plan for plan in plans)
    assert sum(0 in plan for plan in plans) == 50 * BATCH_SHARE
    world.now += 3600
    assert jobs_of(world.step(64)) == [0, 1]
    world.now += PAUSE_SECONDS
    assert jobs_of(world.step(64)) == [1], "an idle hour counts as one long pause"
    world.now += PAUSE_SECONDS
    assert jobs_of(world.step(64)) == [0, 1]


def test_batch_jobs_pause_for_a_prompt_of_another_scheduler() -> None:
    world = decoding_batch_job()
    assert not world.scheduler.plan(64, None, [READING]).chunks
    assert jobs_of(world.step(64)) == [0]


def test_interactive_job_gets_the_next_slot() -> None:
    world = decoding_batch_job(slots=1)
    world.add(TEXT[100:110], 9, is_batch=True)
    world.add(TEXT[200:210], 9)
    world.end(0)
    assert jobs_of(world.step(64)) == [2]


def test_batch_job_keeps_its_rows_while_interactive_jobs_wait_for_a_slot() -> None:
    world = decoding_batch_job(slots=1)
    world.add(TEXT[200:210], 9)
    assert [jobs_of(world.step(64)) for _ in range(3)] == [[0]] * 3


def test_interactive_job_copies_from_a_batch_job_but_does_not_follow_it() -> None:
    world = SchedulerModel(3)
    world.add(TEXT[:200], 9, is_batch=True)
    world.step(64)
    world.add(TEXT[:100], 9)
    assert chunks_of(world.step(64)) == [(1, 64, 36, 1)]


def test_batch_job_follows_an_interactive_one() -> None:
    world = SchedulerModel(3)
    world.add(TEXT[:100], 9)
    world.add(TEXT[:100], 9, is_batch=True)
    assert jobs_of(world.step(64)) == [0]
    assert jobs_of(world.step(64)) == [0]
    assert (1, 98, 2, 1) in [chunk for _ in range(4) for chunk in chunks_of(world.step(64))]


def test_rows_of_batch_jobs_do_not_count_for_other_jobs_of_their_principal() -> None:
    world = SchedulerModel(3)
    world.add(TEXT[:400], 1, principal="ann", is_batch=True)
    for _ in range(5):
        world.step(64)
    assert not world.scheduler.idle
    world.add(TEXT[400:600], 1, principal="ann")
    world.add(TEXT[600:800], 1, principal="bob")
    assert chunks_of(world.step(64)) == [(1, 0, 48, 0), (2, 0, 16, 0)]


def test_memory_of_batch_jobs_is_reused_first() -> None:
    world = SchedulerModel(2, 1)
    conversation, line = TEXT[:100], TEXT[200:300]
    world.add(conversation, 1)
    world.finish()
    for at in range(5):
        world.add((*line, 900 + at, 901, 902), 1, is_batch=True)
        world.finish()
    world.add((*conversation, 800, 801, 802), 1)
    world.step(64)
    assert world.rows[6] == 3, "the conversation is still in memory"
    assert [world.rows[job] for job in range(1, 6)] == [104, 4, 4, 4, 4], "and so is the common prefix of the batch"


@pytest.mark.parametrize("part", range(2))
def test_random_schedules_with_batch_jobs(part: int) -> None:
    for seed in range(part * 500, (part + 1) * 500):
        rng = random.Random(seed)
        world = SchedulerModel(rng.randint(1, 5), rng.randint(0, 4))
        ran_at = -PAUSE_SECONDS
        for _ in range(rng.randrange(60)):
            world.now += rng.random() / 2
            if rng.random() < 0.4:
                at = rng.randrange(300)
                prompt = TEXT[at : at + rng.randrange(1, 300)]
                outputs, principal, is_batch = rng.random() < 0.1, rng.choice(["ann", "bob"]), rng.random() < 0.5
                world.add(prompt, rng.randrange(1, 12), outputs, principal, is_batch=is_batch)
            else:
                ran_at = check_pause(world, world.step(rng.randint(2, 150)), ran_at)
        world.finish()


def check_pause(world: SchedulerModel, plan: Plan, ran_at: float) -> float:
    """Check a plan, given when the last plan with rows for batch jobs ran, and return that time after it."""
    batch = [chunk for chunk in plan.chunks if world.jobs[chunk.job].is_batch]
    prompts = [chunk for chunk in plan.chunks if chunk.start < len(world.jobs[chunk.job].prompt)]
    if batch and any(not world.jobs[chunk.job].is_batch for chunk in prompts):
        assert world.now >= ran_at + PAUSE_SECONDS
        assert sum(len(chunk.tokens) for chunk in prompts if world.jobs[chunk.job].is_batch) <= REST_ROWS
    return world.now if batch else ran_at


@pytest.mark.anyio
@pytest.mark.engine_options(context=1024)
async def test_new_interactive_job_aborts_a_step_of_batch_jobs(engine: LlamaEngine) -> None:
    codes: list[int] = []
    runner = runner_of(engine)
    decode = runner.context.decode

    def recording(*rows: Any) -> int:
        codes.append(decode(*rows))
        return codes[-1]

    expected = await collect(engine, completion())
    await wait_until_idle(engine)
    runner.context.decode = recording  # type: ignore[method-assign, assignment]
    runner.alone = StepPace(60, minimum=512, maximum=512)
    line = completion(f"{SEA} {CITY} {SEA} {CITY} {FRANCE}", priority="batch")
    batch = asyncio.create_task(collect(engine, line))
    await wait_until(lambda: runner.is_batch_step)
    assert (await collect(engine, completion())).tokens == expected.tokens
    assert codes[0] == ABORTED
    assert not batch.done()
    assert (await batch).text.startswith(" Paris")

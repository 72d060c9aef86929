"""The slots of jobs in the decoder's memory, and the cache of prefixes."""

from dragoman.engines.llama.sequences import GAP_PLANS, Clear, Copy
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

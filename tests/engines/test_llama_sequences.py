"""Where jobs sit in the decoder's memory, and what is kept of those that have gone."""

from dragoman.engines.llama.sequences import PATIENCE, Clear, Copy
from tests.engines.world import World, chunks_of


def test_a_text_that_must_leave_its_seat_is_shelved_and_found_again() -> None:
    world = World(1, 1)
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


def test_the_shelf_gives_up_what_has_not_been_used_for_longest() -> None:
    world = World(1, 2)
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


def test_jobs_sit_side_by_side() -> None:
    world = World(6)
    for at in range(6):
        world.add(tuple(range(100 * at, 100 * at + 40)), 50)
    world.step(600)
    for job in (1, 3, 4, 5):
        world.end(job)
    world.add(tuple(range(500, 550)), 9)
    assert [chunk.sequence for chunk in world.step(600).chunks] == [0, 1, 2]


def six_of_which_one_has_left() -> World:
    world = World(6, 1)
    for at in range(6):
        world.add(tuple(range(100 * at, 100 * at + 40)), 50)
    world.step(600)
    world.end(2)
    for _ in range(PATIENCE):
        assert not world.step(600).effects
    return world


def test_a_gap_that_nobody_fills_is_closed_and_what_was_there_kept() -> None:
    world = six_of_which_one_has_left()
    plan = world.step(600)
    assert plan.effects == (Copy(2, 6), Clear(2), Copy(5, 2))
    assert [chunk.sequence for chunk in plan.chunks] == [0, 1, 2, 3, 4]
    assert not world.step(600).effects
    world.add((*range(200, 240), 7, 7), 1)
    assert [chunk.start for chunk in world.step(600).chunks if chunk.job == 6] == [40]
    world.finish()


def test_the_smaller_part_moves() -> None:
    world = six_of_which_one_has_left()
    world.end(1)
    assert [chunk.sequence for chunk in world.step(600).chunks] == [2, 3, 4, 5]

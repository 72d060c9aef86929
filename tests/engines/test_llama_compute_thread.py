"""The thread that computes: turns, failures, and the pace of steps."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.engines.llama.compute_thread import (
    LONG_STEP_ROWS,
    MAX_LONG_STEP,
    STEPS_BETWEEN_TRIES,
    ComputeThread,
    StepPace,
)
from dragoman.engines.llama.runner import ALONE_SECONDS, MIN_CHUNK
from tests.engines.llama_fixtures import wait_until


@pytest.mark.parametrize(
    ("cost", "settles"),
    [
        (lambda rows: 0.1 + rows / 400, 60),
        (lambda rows: rows / 1000, 250),
        (lambda rows: rows / 10, MIN_CHUNK),
        (lambda rows: rows / 100_000, 512),
    ],
)
def test_chunk_converges_to_the_target_time(cost: Callable[[int], float], settles: int) -> None:
    pace = StepPace(ALONE_SECONDS, minimum=MIN_CHUNK, maximum=512)
    for _ in range(40):
        pace.record(pace.rows, cost(pace.rows))
    assert pace.rows == pytest.approx(settles, rel=0.03)


def test_one_slow_step_has_little_effect() -> None:
    pace = StepPace(ALONE_SECONDS, minimum=MIN_CHUNK, maximum=512)
    for _ in range(20):
        pace.record(pace.rows, pace.rows / 1000)
    settled = pace.rows
    pace.record(pace.rows, 10 * ALONE_SECONDS)
    assert pace.rows >= 0.7 * settled
    for _ in range(4):
        pace.record(pace.rows, pace.rows / 1000)
    assert pace.rows >= 0.9 * settled


@pytest.mark.parametrize(("maximum", "rows", "chunk"), [(512, 1, MIN_CHUNK), (8, 8, 8)])
def test_partial_steps_and_small_batches(maximum: int, rows: int, chunk: int) -> None:
    pace = StepPace(ALONE_SECONDS, minimum=MIN_CHUNK, maximum=maximum)
    pace.record(rows, 0.001)
    assert pace.rows == chunk


GAP = 0.15


def steps_of(pace: StepPace, rows: int, cost: Callable[[int, int], float]) -> list[tuple[int, float]]:
    """Return the rows and seconds of each step of a prompt."""
    steps, done = [], 0
    while done < rows:
        chunk = min(pace.rows, rows - done)
        seconds = cost(done, chunk)
        pace.record(chunk, seconds)
        steps.append((chunk, seconds))
        done += chunk
    return steps


def step_seconds(position: int, rows: int) -> float:
    """Cost of a step on a CPU with two cores: attention to earlier tokens costs a third from 64 rows on."""
    before = position * 3e-6 * (rows if rows <= 64 else rows / 3)
    return 0.008 + rows * 0.0026 + before


def test_long_prompt_uses_long_steps_once_they_pay() -> None:
    steps = steps_of(StepPace(GAP, minimum=MIN_CHUNK, maximum=512, long_steps=True), 1200, step_seconds)
    plain = steps_of(StepPace(GAP, minimum=MIN_CHUNK, maximum=512), 1200, step_seconds)
    assert max(seconds for _, seconds in steps) <= MAX_LONG_STEP * GAP
    assert sum(seconds for _, seconds in steps) < 0.85 * sum(seconds for _, seconds in plain)
    assert [rows for rows, _ in steps[-6:-1]] == [LONG_STEP_ROWS] * 5


def test_next_prompt_begins_with_normal_steps() -> None:
    pace = StepPace(GAP, minimum=MIN_CHUNK, maximum=512, long_steps=True)
    steps_of(pace, 1200, step_seconds)
    assert [rows < LONG_STEP_ROWS for rows, _ in steps_of(pace, 200, step_seconds)[:4]] == [True] * 4


@pytest.mark.parametrize("cost", [lambda _, rows: 0.008 + rows * 0.0032, lambda _, rows: rows * 0.02])
def test_unprofitable_long_steps_are_rare(cost: Callable[[int, int], float]) -> None:
    steps = steps_of(StepPace(GAP, minimum=MIN_CHUNK, maximum=512, long_steps=True), 3000, cost)
    assert sum(rows == LONG_STEP_ROWS for rows, _ in steps) <= len(steps) / STEPS_BETWEEN_TRIES + 1


class TurnTaker:
    """A member of the compute thread that records its steps."""

    def __init__(self, name: str, order: list[str], steps: int) -> None:
        self.name = name
        self.order = order
        self.left = steps
        self.error: DragomanError | None = None

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> None:
        self.left -= 1
        self.order.append(self.name)
        if self.name == "failing":
            raise RuntimeError("a bug")

    def reset(self, error: DragomanError) -> None:
        self.left, self.error = 0, error

    def close(self) -> None:
        self.order.append(f"{self.name} closed")


@pytest.mark.anyio
async def test_members_of_the_compute_thread_take_turns_and_fail_alone() -> None:
    order: list[str] = []
    members = [TurnTaker(name, order, 3) for name in ("one", "failing", "other")]
    thread = ComputeThread(asyncio.get_running_loop())
    await asyncio.wrap_future(thread.submit(partial(setattr, thread, "members", members)))
    await wait_until(lambda: not any(member.has_work for member in members))
    thread.close()
    thread.join()
    assert order[:7] == ["one", "failing", "other", "one", "other", "one", "other"]
    assert sorted(order[7:]) == ["failing closed", "one closed", "other closed"]
    with pytest.raises(EngineFailed, match="stopped"):
        thread.require_open()

"""Workers and front ends that are killed, or stand still."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from tools.client import Ending
from tools.faults.judge import Scenario
from tools.faults.trial import ANSWERED, ANSWERED_OR_ERROR, IN_WORKER, PROBE, PROBE_TEXT, Trial, in_background
from tools.server import kill

TEXT = "".join(f"{number:03} " for number in range(40))
VICTIMS = ("a", "b", "c", "d")
PACED = {**IN_WORKER, "tokens_per_second": 50, "replies": [{"output": TEXT}]}
STALL_SECONDS = 2.0
CUT: frozenset[Ending] = ANSWERED_OR_ERROR | {"cut"}
"""The connections of a front end end with it: nobody is left to send an error."""


def worker_models() -> dict[str, object]:
    return dict.fromkeys(VICTIMS, PACED)


async def workers_killed(trial: Trial) -> None:
    """SIGKILL to random workers. Requests get 502, 503 or an error frame; another model never notices."""
    async with _worker_load(trial):
        # Some die while they start, most while they have requests.
        await _kill_at_random_age(trial, trial.server.workers, 3.0)
    _expect_frames(trial)


async def _kill_at_random_age(trial: Trial, processes: Callable[[], list[int]], oldest: float) -> None:
    """Kill one process after the other, each at an age between 0 and `oldest` seconds, or more."""
    first_seen: dict[int, float] = {}
    done = 0
    while done < trial.times:
        await asyncio.sleep(0.1)
        now, running = time.monotonic(), processes()
        first_seen = {pid: first_seen.get(pid, now) for pid in running}
        age = trial.random.uniform(0.0, oldest)
        old = [pid for pid in running if now - first_seen[pid] > age]
        done += bool(old) and kill(trial.random.choice(old), signal.SIGKILL)


async def workers_stopped(trial: Trial) -> None:
    """SIGSTOP to random workers. Half go on soon; the server replaces the others, and their requests get 504."""
    replaced = 0
    async with _worker_load(trial):
        for number in range(trial.times):
            await trial.wait(lambda: bool(trial.server.workers()), "a worker runs")
            pid = trial.random.choice(trial.server.workers())
            kill(pid, signal.SIGSTOP)
            if number % 2:
                await asyncio.sleep(trial.random.uniform(0.0, STALL_SECONDS / 2))
                kill(pid, signal.SIGCONT)
            else:
                await _wait_for_end(trial, pid, "the server replaces a worker that stands still")
                replaced += 1
    trial.figures["workers replaced"] = f"{replaced} of {trial.times}"
    late = sum(count for ending, count in trial.endings.items() if ending.endswith("error 504"))
    late += sum(count for ending, count in trial.endings.items() if ending.endswith("error frame"))
    trial.expect(late >= 1, "no request of a worker that stood still was told")


async def front_ends_killed(trial: Trial) -> None:
    """SIGKILL to random front ends. Their own connections break; all others are answered."""
    async with _front_end_load(trial):
        # One that dies within ten seconds of its start is started again after a pause, which grows.
        await _kill_at_random_age(trial, trial.server.front_ends, 12.0)
    _expect_answers(trial)


async def front_ends_stopped(trial: Trial) -> None:
    """SIGSTOP to front ends, several at once. Half go on soon; the parent replaces the others."""
    free = asyncio.Semaphore(max(1, len(trial.server.front_ends()) - 1))
    stopped: set[int] = set()

    def running() -> list[int]:
        return [pid for pid in trial.server.front_ends() if pid not in stopped]

    async def stop_one(number: int) -> None:
        async with free:
            await trial.wait(lambda: bool(running()), "a front end runs")
            pid = trial.random.choice(running())
            stopped.add(pid)
            kill(pid, signal.SIGSTOP)
            if number % 2:
                await asyncio.sleep(trial.random.uniform(0.0, 3.0))
                kill(pid, signal.SIGCONT)
                stopped.remove(pid)
            else:
                await _wait_for_end(trial, pid, "the parent replaces a front end that stands still")

    async with _front_end_load(trial), asyncio.TaskGroup() as group:
        for number in range(trial.times):
            group.create_task(stop_one(number))
    _expect_answers(trial)


async def _wait_for_end(trial: Trial, pid: int, what: str) -> None:
    await trial.wait(lambda: pid not in trial.server.processes(), what)


@asynccontextmanager
async def _worker_load(trial: Trial) -> AsyncIterator[None]:
    """Streams and whole replies on the victims, whose failures are repaired, and on a model that must not notice."""
    async with AsyncExitStack() as stack:
        for model in VICTIMS:
            await stack.enter_async_context(trial.load(model, 2, text=TEXT))
            await stack.enter_async_context(trial.load(model, 1, text=TEXT, stream=False))
        await stack.enter_async_context(trial.load(PROBE, 1, ANSWERED, PROBE_TEXT))
        await stack.enter_async_context(in_background(_load_failed(trial)))
        yield


async def _load_failed(trial: Trial) -> None:
    """A model whose worker died three times soon after its start is left alone for a while; an operator may load it."""
    while True:
        states = (await trial.get("/ready"))["models"]
        for name, state in states.items():
            if state in ("failed", "cold"):
                await trial.post(f"/admin/models/{name}/load")
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _front_end_load(trial: Trial) -> AsyncIterator[None]:
    trial.may_drop = True
    async with trial.load("a", 8, CUT, TEXT), trial.load(PROBE, 2, CUT, PROBE_TEXT):
        yield
    trial.may_drop = False


def _expect_frames(trial: Trial) -> None:
    frames = sum(count for ending, count in trial.endings.items() if ending.endswith("error frame"))
    trial.expect(frames >= 1, "no stream ended with an error frame: the workers had no load")
    _expect_answers(trial)


def _expect_answers(trial: Trial) -> None:
    answered = sum(count for ending, count in trial.endings.items() if ending.endswith(": answered"))
    trial.expect(answered >= 1, "no request was answered")


LIMITS = {"limits": {"stall_seconds": STALL_SECONDS, "load_seconds": 30}}
SCENARIOS = {
    "workers_killed": Scenario(workers_killed, 1000, 6, worker_models()),
    "workers_stopped": Scenario(workers_stopped, 100, 2, worker_models(), LIMITS),
    "front_ends_killed": Scenario(front_ends_killed, 1000, 4, {"a": PACED}, workers=8),
    "front_ends_stopped": Scenario(front_ends_stopped, 100, 2, {"a": PACED}, workers=8),
}

"""Batch requests in admission: they use the slots that interactive requests leave free, and never starve."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from dragoman.core.errors import QueueFull, ResourceUnavailable
from dragoman.core.types import Priority
from dragoman.models import admission as admission_module
from dragoman.models.admission import PEAK_SECONDS, STARVED_SECONDS, Admission, RecentPeak, Slots
from tests.models.test_admission import turn


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Requests:
    """Requests that hold a slot until `leave`. The principal of a request is the first letter of its name; names in
    capitals have batch priority."""

    def __init__(self, slots: int | None, queue: int = 10, seconds: float = 60) -> None:
        self.clock = Clock()
        self.admission = Admission(slots, queue, seconds, self.clock)
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, *names: str, is_admitted: bool = False) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._enter(name, is_admitted))
            await turn()

    async def _enter(self, name: str, is_admitted: bool) -> None:
        await self.admission.enter(name[0], is_admitted, priority_of(name))
        self.running.append(name)

    async def leave(self, *names: str) -> None:
        for name in names:
            self.running.remove(name)
            self.admission.leave(name[0], priority_of(name))
            await turn()

    async def stop(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def priority_of(name: str) -> Priority:
    return "batch" if name.isupper() else "interactive"


@pytest.mark.parametrize(("slots", "running"), [(1, 1), (2, 1), (4, 3), (None, 6)])
async def test_batch_requests_leave_one_slot_free(slots: int | None, running: int) -> None:
    requests = Requests(slots)
    await requests.enter(*"ABCDEF")
    assert requests.running == list("ABCDEF")[:running]
    await requests.stop()


async def test_interactive_request_takes_the_free_slot_at_once() -> None:
    requests = Requests(4)
    await requests.enter(*"ABCD", "a")
    assert requests.running == ["A", "B", "C", "a"]
    await requests.leave("A")
    assert requests.admission.waiting == 1, "the slot stays free for the next interactive request"
    await requests.leave("a")
    assert requests.running == ["B", "C", "D"]
    await requests.stop()


async def test_waiting_interactive_request_goes_before_batch_requests() -> None:
    requests = Requests(2)
    await requests.enter("A", "B", "a", "b")
    assert requests.running == ["A", "a"]
    await requests.leave("A")
    assert requests.running == ["a", "b"]
    await requests.stop()


async def test_as_many_slots_stay_free_as_interactive_requests_needed_at_once() -> None:
    requests = Requests(4)
    await requests.enter("a", "b", "c")
    await requests.leave("a", "b", "c")
    await requests.enter("A", "B")
    assert requests.running == ["A"]
    requests.clock.now += 2 * PEAK_SECONDS
    await requests.enter("C")
    await requests.leave("A")
    assert requests.running == ["B", "C"]
    await requests.stop()


async def test_batch_requests_follow_when_interactive_ones_have_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "PEAK_SECONDS", 0.05)
    admission = Admission(1, 10, 60)
    assert admission.try_enter("a")
    admission.leave("a")
    assert not admission.try_enter("b", "batch")
    async with asyncio.timeout(30):
        await admission.enter("b", priority="batch")
    assert admission.running == 1


@pytest.mark.parametrize("slots", [1, 2])
async def test_starved_batch_request_goes_first(slots: int) -> None:
    requests = Requests(slots)
    await requests.enter(*"abc", "A", "B")
    requests.clock.now += STARVED_SECONDS - 1
    await requests.leave("a")
    assert "A" not in requests.running
    await requests.enter("d")
    requests.clock.now += 1
    await requests.leave("b")
    assert "A" in requests.running
    await requests.leave("A")
    assert "B" not in requests.running, "its turn comes after the same time"
    requests.clock.now += STARVED_SECONDS
    await requests.leave("c")
    assert "B" in requests.running
    await requests.stop()


async def test_starved_batch_request_gets_a_free_slot_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "STARVED_SECONDS", 0.05)
    admission = Admission(1, 10, 60)
    assert admission.try_enter("a")
    admission.leave("a")
    async with asyncio.timeout(30):
        await admission.enter("b", priority="batch")
    assert admission.running == 1


async def test_principals_take_turns_in_batch_slots() -> None:
    requests = Requests(2)
    await requests.enter("A", "AA", "AAA", "B")
    for _ in range(3):
        await requests.leave(requests.running[0])
    assert requests.running == ["AAA"]
    await requests.leave("AAA")
    await requests.stop()
    assert requests.admission.running == requests.admission.waiting == 0


async def test_batch_slots_of_a_principal_do_not_count_for_its_interactive_requests() -> None:
    admission = Admission(2, 10, 60)
    assert admission.try_enter("a", "batch")
    assert admission.try_enter("b")
    admission.leave("b")
    assert admission.try_enter("a"), "the last slot is reserved for b only if a has another one"


async def test_full_queue_of_batch_requests_refuses_with_429() -> None:
    requests = Requests(1, queue=1)
    await requests.enter("a", "A")
    with pytest.raises(ResourceUnavailable) as caught:
        await requests.admission.enter("A", priority="batch")
    assert (caught.value.status, caught.value.code) == (429, "resource_unavailable")
    assert caught.value.retry_after
    await requests.enter("b")
    assert requests.admission.waiting == 2, "interactive requests have a queue of their own"
    with pytest.raises(QueueFull):
        await requests.admission.enter("b")
    await requests.stop()


async def test_batch_requests_wait_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "BATCH_SECONDS", 0.1)
    requests = Requests(1, seconds=0.05)
    await requests.enter("a")
    with pytest.raises(ResourceUnavailable, match="no slot became free within"):
        await requests.admission.enter("b", priority="batch")
    assert requests.admission.waiting == 0


async def test_admitted_batch_jobs_wait_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "BATCH_SECONDS", 0.01)
    requests = Requests(1, queue=0, seconds=0.01)
    await requests.enter("a")
    jobs = [Slots(requests.admission, "b", "batch", is_admitted=True) for _ in range(3)]
    waiting = [asyncio.create_task(slots.acquire_first()) for slots in jobs]
    await asyncio.sleep(0.1)
    assert requests.admission.waiting == 3
    requests.clock.now += STARVED_SECONDS
    await requests.leave("a")
    assert [task.done() for task in waiting] == [True, False, False]
    jobs[0].close()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_recent_peak_is_forgotten() -> None:
    peak = RecentPeak(0)
    peak.note(3, 1)
    peak.note(2, PEAK_SECONDS + 1)
    assert [peak.highest(PEAK_SECONDS * at + 2) for at in (1, 2, 3)] == [3, 2, 0]
    assert peak.change_in(PEAK_SECONDS * 3 + 2) == PEAK_SECONDS - 2


@pytest.mark.parametrize("seed", range(30))
async def test_random_events_keep_the_rules(seed: int) -> None:
    """After every event: no slot is used twice or lost, and no interactive request waits for a free slot."""
    rng = random.Random(seed)
    slots = rng.randint(1, 5)
    requests = Requests(slots, queue=100)
    names = numbered()
    for _ in range(300):
        kind, admission = rng.random(), requests.admission
        requests.clock.now += rng.choice([0, 0, 0.1, 1, 5, 40])
        before = set(requests.running)
        if kind < 0.5:
            await requests.enter(rng.choice("abAB") * next(names))
        elif kind < 0.6 and (waiting := [name for name, task in requests.tasks.items() if not task.done()]):
            requests.tasks[rng.choice(waiting)].cancel()
            await turn()
        elif requests.running:
            await requests.leave(rng.choice(requests.running))
        assert admission.running == len(requests.running) <= slots
        assert admission.waiting == sum(not task.done() for task in requests.tasks.values())
        if [name for name, task in requests.tasks.items() if not task.done() and name.islower()]:
            assert admission.running >= slots - 1, "the last slot may be reserved for another principal"
        started = set(requests.running) - before
        assert len([name for name in requests.running if name.isupper()]) <= max(1, slots - 1) or not started
    await drained(requests)


def numbered() -> Iterator[int]:
    yield from range(1, 1000)


async def drained(requests: Requests) -> None:
    """Every request gets its slot in the end."""
    for _ in range(1000):
        requests.clock.now += STARVED_SECONDS
        if requests.running:
            await requests.leave(requests.running[0])
        else:
            requests.admission._grant()
            await turn()
        if not requests.running and not requests.admission.waiting:
            break
    assert requests.admission.running == requests.admission.waiting == 0
    await requests.stop()

import asyncio

import pytest

from dragoman.core.errors import QueueFull
from dragoman.models.admission import Admission, Slots


class Callers:
    """Requests that hold a slot until `finish`. The principal of a request is the first letter of its name."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.admitted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._release = asyncio.Event()

    async def start(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._hold(name))
            await turn()

    async def _hold(self, name: str) -> None:
        await self.admission.enter(name[0])
        try:
            self.admitted.append(name)
            await self._release.wait()
        finally:
            self.admission.leave(name[0])

    async def finish(self) -> None:
        self._release.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert self.admission.running == self.admission.waiting == 0


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_principals_take_turns() -> None:
    callers = Callers(Admission(1, 10, 10))
    await callers.start("a1", "a2", "a3", "b1", "c1")
    assert callers.admitted == ["a1"]
    await callers.finish()
    assert callers.admitted == ["a1", "a2", "b1", "c1", "a3"]


async def test_new_slots_go_to_waiting_requests() -> None:
    admission = Admission(1, 10, 10)
    callers = Callers(admission)
    await callers.start(*"abcd")
    admission.resize(3)
    await turn()
    assert (callers.admitted, admission.running, admission.waiting) == (["a", "b", "c"], 3, 1)
    admission.resize(1)
    admission.set_limits(0, 1)
    with pytest.raises(QueueFull):
        await admission.enter("e")
    admission.resize(None)
    await turn()
    assert callers.admitted == ["a", "b", "c", "d"]
    await callers.finish()


async def test_full_queue_refuses_at_once() -> None:
    callers = Callers(Admission(1, 1, 10))
    await callers.start("a1", "a2")
    with pytest.raises(QueueFull) as caught:
        await callers.admission.enter("a")
    assert caught.value.status == 503
    assert caught.value.retry_after
    await callers.finish()


async def test_full_queue_accepts_one_request_of_another_principal() -> None:
    callers = Callers(Admission(1, 1, 60))
    await callers.start("a1", "a2", "b1")
    assert callers.admission.waiting == 2
    for principal in ("a", "b", "c"):
        with pytest.raises(QueueFull):
            await callers.admission.enter(principal)
    await callers.finish()
    assert sorted(callers.admitted) == ["a1", "a2", "b1"]


async def test_wait_times_out() -> None:
    callers = Callers(Admission(1, 5, 0.05))
    await callers.start("a")
    with pytest.raises(QueueFull):
        await callers.admission.enter("b")
    assert callers.admission.waiting == 0
    await callers.finish()


@pytest.mark.parametrize("after_the_grant", [False, True])
async def test_cancelled_request_passes_its_slot_on(after_the_grant: bool) -> None:
    callers = Callers(Admission(1, 5, 10))
    await callers.start("a", "b", "c")
    if after_the_grant:
        callers.tasks["a"].cancel()  # passes its slot on to b, which is cancelled at the same time
        await asyncio.sleep(0)
    callers.tasks["b"].cancel()
    await callers.finish()
    assert callers.admitted == ["a", "c"]


async def test_request_cancelled_before_the_grant_gets_no_slot() -> None:
    callers = Callers(Admission(1, 5, 10))
    await callers.admission.enter("a")
    await callers.start("b", "c")
    callers.tasks["b"].cancel()
    callers.admission.leave("a")
    await callers.finish()
    assert callers.admitted == ["c"]


async def test_no_slot_limit() -> None:
    callers = Callers(Admission(None, 0, 1))
    await callers.start(*(f"a{at}" for at in range(50)))
    assert len(callers.admitted) == callers.admission.running == 50
    await callers.finish()


async def test_retry_after_estimates_the_queue() -> None:
    admission = Admission(1, 2, 60)
    await admission.enter("a")
    waiting = [asyncio.create_task(admission.enter("a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await admission.enter("a")
    assert caught.value.retry_after == 1
    for _ in range(20):
        admission._freed_at -= 5
        admission.leave("a")
        waiting.append(asyncio.create_task(admission.enter("a")))
        await asyncio.sleep(0)
    with pytest.raises(QueueFull) as later:
        await admission.enter("a")
    assert later.value.retry_after == pytest.approx(15, rel=0.1)
    for task in waiting:
        task.cancel()


def test_extra_release_is_ignored() -> None:
    admission = Admission(2, 10, 10)
    one, other = Slots(admission, "a"), Slots(admission, "b")
    assert one.try_acquire_first()
    assert other.try_acquire_first()
    one.release()
    one.release()
    one.close()
    assert admission.running == 1
    other.close()
    assert admission.running == 0


async def test_free_slot_goes_to_the_principal_that_holds_the_fewest() -> None:
    callers = Callers(Admission(3, 10, 60))
    for _ in range(3):
        await callers.admission.enter("a")
    await callers.start("a4", "b1", "a5", "b2")
    for _ in range(2):
        callers.admission.leave("a")
        await turn()
    assert callers.admitted == ["b1", "a4"]
    callers.admission.leave("a")
    await callers.finish()


async def test_last_slot_is_reserved_for_recent_principals() -> None:
    admission = Admission(3, 10, 60)
    callers = Callers(admission)
    assert admission.try_enter("b")
    admission.leave("b")
    assert admission.try_enter("a")
    assert admission.try_enter("a")
    await callers.start("a3")
    assert (callers.admitted, admission.running) == ([], 2)
    assert admission.try_enter("b"), "the reserved slot"
    assert not admission.try_enter("c")
    admission.leave("b")
    await turn()
    assert (callers.admitted, admission.running) == ([], 2)
    callers.tasks["a3"].cancel()
    await asyncio.wait(callers.tasks.values())
    assert admission.waiting == 0


async def test_reservation_of_the_last_slot_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.models.admission.RESERVE_SECONDS", 0.3)
    admission = Admission(2, 10, 60)
    assert admission.try_enter("b")
    admission.leave("b")
    assert admission.try_enter("a")
    assert not admission.try_enter("a")
    await admission.enter("a")
    assert admission.running == 2


def test_single_principal_has_all_slots() -> None:
    admission = Admission(3, 10, 60)
    assert [admission.try_enter("a") for _ in range(4)] == [True, True, True, False]

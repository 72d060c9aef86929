import asyncio

import pytest

from dragoman.core.errors import QueueFull
from dragoman.models.admission import Admission, Slots


async def hold(admission: Admission, name: str, log: list[str], release: asyncio.Event) -> None:
    """Hold a slot; the principal is the first letter of the name."""
    await admission.enter(name[0])
    try:
        log.append(name)
        await release.wait()
    finally:
        admission.leave(name[0])


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start(
    admission: Admission, log: list[str], release: asyncio.Event, *names: str
) -> list["asyncio.Task[None]"]:
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(hold(admission, name, log, release)))
        await turn()
    return tasks


async def test_principals_take_turns() -> None:
    admission, log, release = Admission(1, 10, 10), list[str](), asyncio.Event()
    tasks = await start(admission, log, release, "a1", "a2", "a3", "b1", "c1")
    assert log == ["a1"]
    release.set()
    await asyncio.gather(*tasks)
    assert admission.running == admission.waiting == 0
    assert log == ["a1", "a2", "b1", "c1", "a3"]


async def test_new_slots_go_to_waiting_requests() -> None:
    admission, log, release = Admission(1, 10, 10), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, name, log, release)) for name in "abcd"]
    await turn()
    admission.resize(3)
    await turn()
    assert (log, admission.running, admission.waiting) == (["a", "b", "c"], 3, 1)
    admission.resize(1)
    admission.set_limits(0, 1)
    with pytest.raises(QueueFull):
        await admission.enter("e")
    admission.resize(None)
    await turn()
    assert log == ["a", "b", "c", "d"]
    release.set()
    await asyncio.gather(*tasks)
    assert admission.running == admission.waiting == 0


async def test_full_queue_refuses_at_once() -> None:
    admission, release = Admission(1, 1, 10), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, "a", [], release)) for _ in range(2)]
    await turn()
    with pytest.raises(QueueFull) as caught:
        await admission.enter("a")
    assert caught.value.status == 503
    assert caught.value.retry_after
    release.set()
    await asyncio.gather(*tasks)


async def test_wait_times_out() -> None:
    admission, release = Admission(1, 5, 0.05), asyncio.Event()
    task = asyncio.create_task(hold(admission, "a", [], release))
    await turn()
    with pytest.raises(QueueFull):
        await admission.enter("b")
    assert admission.waiting == 0
    release.set()
    await task
    assert admission.running == 0


@pytest.mark.parametrize("after_the_grant", [False, True])
async def test_cancelled_request_passes_its_slot_on(after_the_grant: bool) -> None:
    admission, log, release = Admission(1, 5, 10), list[str](), asyncio.Event()
    first = asyncio.create_task(hold(admission, "a", log, release))
    await turn()
    leaver = asyncio.create_task(hold(admission, "b", log, release))
    last = asyncio.create_task(hold(admission, "c", log, release))
    await turn()
    if after_the_grant:
        first.cancel()  # passes its slot on to b, which is cancelled at the same time
        await asyncio.sleep(0)
    leaver.cancel()
    release.set()
    await asyncio.gather(first, leaver, last, return_exceptions=True)
    assert "c" in log
    assert admission.running == admission.waiting == 0


async def test_no_slot_limit() -> None:
    admission, log, release = Admission(None, 0, 1), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, "a", log, release)) for _ in range(50)]
    await turn()
    assert len(log) == admission.running == 50
    release.set()
    await asyncio.gather(*tasks)


async def test_cancelled_request_gets_no_slot() -> None:
    admission, log, release = Admission(1, 5, 10), list[str](), asyncio.Event()
    await admission.enter("a")
    leaver = asyncio.create_task(hold(admission, "b", log, release))
    last = asyncio.create_task(hold(admission, "c", log, release))
    await turn()
    leaver.cancel()
    admission.leave("a")
    release.set()
    await asyncio.gather(leaver, last, return_exceptions=True)
    assert log == ["c"]
    assert admission.running == admission.waiting == 0


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
    admission, log, release = Admission(3, 10, 60), list[str](), asyncio.Event()
    for _ in range(3):
        await admission.enter("a")
    tasks = await start(admission, log, release, "a4", "b1", "a5", "b2")
    for _ in range(2):
        admission.leave("a")
        await turn()
    assert log == ["b1", "a4"]
    admission.leave("a")
    release.set()
    await asyncio.gather(*tasks)
    assert admission.running == admission.waiting == 0


async def test_last_slot_is_reserved_for_recent_principals() -> None:
    admission, log, release = Admission(3, 10, 60), list[str](), asyncio.Event()
    assert admission.try_enter("b")
    admission.leave("b")
    assert admission.try_enter("a")
    assert admission.try_enter("a")
    (waiting,) = await start(admission, log, release, "a3")
    assert (log, admission.running) == ([], 2)
    assert admission.try_enter("b"), "the reserved slot"
    assert not admission.try_enter("c")
    admission.leave("b")
    await turn()
    assert (log, admission.running) == ([], 2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
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


async def test_full_queue_accepts_one_request_of_another_principal() -> None:
    admission, log, release = Admission(1, 1, 60), list[str](), asyncio.Event()
    await admission.enter("a")
    tasks = [asyncio.create_task(hold(admission, name, log, release)) for name in ("a", "b")]
    await turn()
    assert admission.waiting == 2
    for principal in ("a", "b", "c"):
        with pytest.raises(QueueFull):
            await admission.enter(principal)
    admission.leave("a")
    release.set()
    await asyncio.gather(*tasks)
    assert sorted(log) == ["a", "b"]

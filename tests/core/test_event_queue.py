import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.event_queue import EventQueue
from dragoman.core.events import Event, TextDelta


def deltas(*texts: str) -> Sequence[Event]:
    return tuple(TextDelta(text) for text in texts)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_events_arrive_in_order(steps: list[tuple[int, bool]]) -> None:
    async def scenario() -> None:
        mailbox = EventQueue()
        sent: list[Event] = []

        async def write() -> None:
            for count, pause in steps:
                batch = deltas(*(str(len(sent) + at) for at in range(count)))
                sent.extend(batch)
                mailbox.put(batch)
                if pause:
                    await asyncio.sleep(0)
            mailbox.end()

        writer = asyncio.create_task(write())
        taken: list[Event] = []
        while events := await mailbox.take():
            taken.extend(events)
        await writer
        assert taken == sent
        assert not await mailbox.take()

    asyncio.run(scenario())


def test_failure_follows_earlier_events() -> None:
    async def scenario() -> None:
        mailbox = EventQueue()
        mailbox.put(deltas("a"))
        mailbox.fail(ValueError("boom"))
        assert await mailbox.take() == list(deltas("a"))
        with pytest.raises(ValueError, match="boom"):
            await mailbox.take()

    asyncio.run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_end_wakes_a_waiting_reader(fails: bool) -> None:
    async def scenario() -> None:
        mailbox = EventQueue()
        reader = asyncio.create_task(asyncio.wait_for(mailbox.take(), 5))
        await asyncio.sleep(0)
        mailbox.put(())
        await asyncio.sleep(0.01)
        assert not reader.done()
        if fails:
            mailbox.fail(ValueError("boom"))
            with pytest.raises(ValueError, match="boom"):
                await reader
        else:
            mailbox.end()
            assert not await reader

    asyncio.run(scenario())


def test_cancelled_take_loses_no_events() -> None:
    async def scenario() -> None:
        mailbox = EventQueue()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.take(), 0.01)
        mailbox.put(deltas("a"))
        assert await mailbox.take() == list(deltas("a"))

    asyncio.run(scenario())

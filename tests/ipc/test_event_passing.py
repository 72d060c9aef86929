"""Generations that are passed on to another process, as their parent sees them."""

import asyncio
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import EngineDied
from dragoman.core.events import Finished, TextDelta
from dragoman.ipc.worker_messages import PackedStep, Progress, pack, unpack
from tests.ipc.test_worker import ask, events, run, worker

OTHERS = 2 << 32
"""Keys of somebody who is not the parent."""


class Following:
    def __init__(self) -> None:
        self.told: dict[int, list[Progress]] = {}

    def put(self, progress: msgspec.Raw) -> None:
        part = unpack(progress)
        self.told.setdefault(part.id, []).append(part)

    async def until_ended(self, key: int) -> list[Progress]:
        async with asyncio.timeout(60):
            while not self.told.get(key, [Progress(key)])[-1].ended:  # noqa: ASYNC110 (another process tells)
                await asyncio.sleep(0.01)
        return self.told[key]


class Deaf(Following):
    """Cannot take the first thing that it is told."""

    def put(self, progress: msgspec.Raw) -> None:
        super().put(progress)
        if len(self.told) == 1 and not self.told[OTHERS][1:]:
            raise RuntimeError("nobody expected this")


def packed(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(ask(text)))


def test_a_reply_that_is_complete_is_no_work_however_long_its_reader_takes() -> None:
    engine = worker(stall_seconds=1)

    async def scenario() -> None:
        await engine.start()
        first, follower = engine.pid, Following()
        await engine.pass_on(follower, OTHERS, packed("slowly 5"))
        assert engine._child is not None
        assert engine._child.busy
        told = await follower.until_ended(OTHERS)
        said = [event for part in told for event in part.events]
        assert [event.text for event in said if isinstance(event, TextDelta)] == [f"{at} " for at in range(5)]
        assert isinstance(said[-1], Finished)
        assert not engine._child.busy
        await asyncio.sleep(1.5)
        assert engine.pid == first
        engine.let_go(OTHERS, ended=True)
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())


def test_one_that_is_let_go_of_is_cancelled_and_the_others_are_told_of_a_death() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        follower = Following()
        for key in (OTHERS, OTHERS + 1):
            await engine.pass_on(follower, key, packed("slowly 10000"))
        await asyncio.sleep(0.1)
        engine.let_go(OTHERS, ended=False)
        child = engine._child
        assert child is not None
        assert set(child.followed) == {OTHERS + 1}
        await child.kill()
        failure = (await follower.until_ended(OTHERS + 1))[-1].failure
        assert failure is not None
        assert isinstance(failure.error(), EngineDied)
        assert not any(part.ended for part in follower.told[OTHERS])

    run(engine, scenario())


def test_what_cannot_be_handed_out_is_a_death_and_then_a_new_life(caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        first, follower = engine.pid, Deaf()
        await engine.pass_on(follower, OTHERS, packed("slowly 10000"))
        failure = (await follower.until_ended(OTHERS))[-1].failure
        assert failure is not None
        assert isinstance(failure.error(), EngineDied)
        async with asyncio.timeout(60):
            # Without anybody who asks for it.
            while engine.is_away:  # noqa: ASYNC110 (another process tells)
                await asyncio.sleep(0.01)
        assert engine.pid != first
        assert len(await events(engine, "count 2")) == 4

    run(engine, scenario())
    assert caplog.messages[0] == "model obedient: what the engine's process said could not be handed out"


def test_what_nobody_wants_any_more_is_not_even_read(caplog: pytest.LogCaptureFixture) -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        assert engine._child is not None
        wrong: Any = None
        engine._child.deliver(PackedStep((pack(Progress(OTHERS, (TextDelta(wrong),))),)))

    run(engine, scenario())
    assert not caplog.messages

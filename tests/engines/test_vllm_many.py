"""Hundreds of concurrent streams with the fake vLLM, and the death of its engine process."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from dragoman.core.engine import stream_events
from dragoman.core.errors import EngineDied
from dragoman.core.events import Finished
from dragoman.ipc.worker_engine import WorkerEngine
from tests.engines.fake_vllm_engine import (
    chat,
    engine,
    engine_process,
    events,
    gone,
    numbers,
    text_of,
    with_engine,
)

pytestmark = pytest.mark.usefixtures("stand_in")


def test_512_concurrent_streams_are_ordered_and_complete() -> None:
    async def test(made: WorkerEngine) -> None:
        lengths = [20 + at % 40 for at in range(512)]
        said = await asyncio.gather(*(events(made, chat(f"count {length}")) for length in lengths))
        assert [text_of(each) for each in said] == [numbers(length) for length in lengths]
        for each in said:
            assert isinstance(each[-1], Finished)
            assert each[-1].usage is not None
            assert each[-1].usage.completion == len(text_of(each))

    with_engine(test, args={"steps_per_second": 100})


def test_cancelling_streams_leaves_others_intact() -> None:
    """Streams are cancelled while decoding and while queued."""

    async def test(made: WorkerEngine) -> None:
        async def leave_after(batches: int) -> None:
            async with aclosing(stream_events(made, chat("count 999", max_tokens=3000))) as stream:
                for _ in range(batches):
                    await anext(stream)

        waiting = [asyncio.create_task(leave_after(10**6)) for _ in range(100)]
        leaving = [leave_after(1 + at % 5) for at in range(256)]
        staying = [events(made, chat("count 30")) for _ in range(156)]
        said = await asyncio.gather(*leaving, *staying)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert [text_of(each) for each in said[256:] if each is not None] == [numbers(30)] * 156
        # If a cancelled stream still held a slot, this request would wait for half a minute.
        assert text_of(await asyncio.wait_for(events(made, chat("count 3")), 20)) == numbers(3)
        assert made.kv_used is not None
        assert made._worker is not None
        assert not made._worker.unfinished

    with_engine(test, args={"steps_per_second": 100, "max_num_seqs": 384})


def test_killed_engine_process_fails_requests_and_restarts() -> None:
    async def test(made: WorkerEngine) -> None:
        readers = [asyncio.create_task(events(made, chat("count 999", max_tokens=3000))) for _ in range(256)]
        await asyncio.sleep(1)
        assert not any(reader.done() for reader in readers)
        worker, process = made.pid, engine_process(made)
        os.kill(process, signal.SIGKILL)
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert {type(end) for end in ends} == {EngineDied}
        assert text_of(await events(made, chat("count 3"))) == numbers(3)
        assert made.pid != worker

    with_engine(test, args={"steps_per_second": 100})


def test_engine_process_ends_with_its_worker() -> None:
    async def main() -> None:
        async with engine() as made:
            stopped = engine_process(made)
        await gone(stopped)
        async with engine() as made:
            assert made.pid is not None
            orphan = engine_process(made)
            os.kill(made.pid, signal.SIGKILL)
            await gone(orphan)

    asyncio.run(main())

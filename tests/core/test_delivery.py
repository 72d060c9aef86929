"""Delivery of events: the queue, and engines that are written as generators."""

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.delivery import MAX_BACKLOG, EventQueue
from dragoman.core.engine import Engine, Output, call_engine, stream_events
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest

REQUEST = GenerationRequest(id="1")


def deltas(*texts: str) -> Sequence[Event]:
    return tuple(TextDelta(text) for text in texts)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_events_arrive_in_order(steps: list[tuple[int, bool]]) -> None:
    async def scenario() -> None:
        queue = EventQueue()
        sent: list[Event] = []

        async def write() -> None:
            for count, pause in steps:
                batch = deltas(*(str(len(sent) + at) for at in range(count)))
                sent.extend(batch)
                queue.put(batch)
                if pause:
                    await asyncio.sleep(0)
            queue.end()

        writer = asyncio.create_task(write())
        taken: list[Event] = []
        while events := await queue.take():
            taken.extend(events)
        await writer
        assert taken == sent
        assert not await queue.take()

    asyncio.run(scenario())


def test_failure_follows_earlier_events() -> None:
    async def scenario() -> None:
        queue = EventQueue()
        queue.put(deltas("a"))
        queue.fail(ValueError("boom"))
        assert await queue.take() == list(deltas("a"))
        with pytest.raises(ValueError, match="boom"):
            await queue.take()

    asyncio.run(scenario())


def test_error_of_the_listener_keeps_nothing_alive() -> None:
    """Memory of a request is returned at its end, not by the garbage collector."""

    class Held:
        pass

    async def generate(queue: EventQueue, held: Held) -> None:
        def listen(events: Sequence[Event]) -> None:
            assert held
            raise ValueError("boom")

        await queue.deliver(listen)

    async def scenario() -> None:
        queue, held = EventQueue(), Held()
        asyncio.get_running_loop().call_later(0.01, queue.put, deltas("a"))
        alive = weakref.ref(held)
        try:
            await generate(queue, held)
        except ValueError:
            del held
        assert alive() is None

    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_end_wakes_a_waiting_reader(fails: bool) -> None:
    async def scenario() -> None:
        queue = EventQueue()
        reader = asyncio.create_task(asyncio.wait_for(queue.take(), 5))
        await asyncio.sleep(0)
        queue.put(())
        await asyncio.sleep(0.01)
        assert not reader.done()
        if fails:
            queue.fail(ValueError("boom"))
            with pytest.raises(ValueError, match="boom"):
                await reader
        else:
            queue.end()
            assert not await reader

    asyncio.run(scenario())


def test_cancelled_take_loses_no_events() -> None:
    async def scenario() -> None:
        queue = EventQueue()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 0.01)
        queue.put(deltas("a"))
        assert await queue.take() == list(deltas("a"))

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=20), st.booleans())
def test_listener_gets_all_events_in_order(steps: list[tuple[int, bool, bool]], fails: bool) -> None:
    """Each step is a number of events, whether the listener then asks to wait, and whether the producer yields."""

    async def scenario() -> None:
        queue = EventQueue()
        sent: list[Event] = []
        received: list[Event] = []
        pauses = iter([is_busy for _, is_busy, _ in steps])
        is_waiting = False

        async def wait() -> None:
            nonlocal is_waiting
            await asyncio.sleep(0)
            is_waiting = False

        def listener(events: Sequence[Event]) -> Awaitable[None] | None:
            nonlocal is_waiting
            assert not is_waiting
            received.extend(events)
            is_waiting = next(pauses, False)
            return wait() if is_waiting else None

        delivery = asyncio.create_task(queue.deliver(listener))
        for count, _, yields in steps:
            batch = deltas(*(str(len(sent) + at) for at in range(count)))
            sent.extend(batch)
            queue.put(batch)
            if yields:
                await asyncio.sleep(0)
        if fails:
            queue.fail(ValueError("boom"))
            with pytest.raises(ValueError, match="boom"):
                await delivery
        else:
            queue.end()
            await delivery
        assert received == sent

    asyncio.run(scenario())


def test_listener_is_called_without_waking_a_task() -> None:
    async def scenario() -> None:
        queue = EventQueue()
        received: list[Event] = []
        delivery = asyncio.create_task(queue.deliver(received.extend))
        await asyncio.sleep(0)
        queue.put(deltas("a"))
        assert received == list(deltas("a"))
        queue.end()
        await delivery

    asyncio.run(scenario())


def test_pause_of_a_cancelled_delivery_is_closed() -> None:
    """Otherwise Python warns about a coroutine that was never awaited."""

    async def scenario() -> None:
        queue = EventQueue()
        delivery = asyncio.create_task(queue.deliver(lambda events: asyncio.sleep(0)))
        await asyncio.sleep(0)
        queue.put(deltas("a"))
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery

    asyncio.run(scenario())


def test_exception_of_the_listener_ends_the_delivery() -> None:
    async def scenario() -> None:
        queue, calls = EventQueue(), 0

        def listener(events: Sequence[Event]) -> None:
            nonlocal calls
            calls += 1
            raise ValueError("boom")

        delivery = asyncio.create_task(queue.deliver(listener))
        await asyncio.sleep(0)
        queue.put(deltas("a"))
        queue.put(deltas("b"))
        with pytest.raises(ValueError, match="boom"):
            await delivery
        assert calls == 1

    asyncio.run(scenario())


def batches(engine: Engine) -> list[Sequence[Event]]:
    async def collected() -> list[Sequence[Event]]:
        async with asyncio.timeout(60):
            return [batch async for batch in stream_events(engine, REQUEST)]

    return asyncio.run(collected())


def collect(engine: Engine) -> list[Event]:
    return [event for batch in batches(engine) for event in batch]


class Pausing(Engine):
    """Yields empty batches between its tokens."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield []
        yield "a"
        time.sleep(0.05)
        yield []
        time.sleep(0.05)
        yield ()
        yield "b"


class PausingAsync(Engine):
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        yield []
        yield "a"
        yield []
        await asyncio.sleep(0.01)
        yield "b"


@pytest.mark.parametrize("engine", [Pausing(), PausingAsync()], ids=["plain", "async"])
def test_empty_output_does_not_end_the_stream(engine: Engine) -> None:
    assert collect(engine) == [Started(), TextDelta("a"), TextDelta("b"), Finished()]
    assert all(batches(engine))


def test_more_empty_outputs_than_the_backlog() -> None:
    class Silent(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            for _ in range(3 * MAX_BACKLOG):
                yield []
            yield "at last"

    assert collect(Silent()) == [Started(), TextDelta("at last"), Finished()]


def test_abandoned_generator_without_output_is_closed() -> None:
    closed = threading.Event()

    class Silent(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            try:
                yield "a"
                while True:
                    yield []
                    time.sleep(0.001)
            finally:
                closed.set()

    async def scenario() -> None:
        stream = stream_events(Silent(), REQUEST)
        await anext(stream)
        await stream.aclose()

    asyncio.run(scenario())
    assert closed.wait(60)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_any_exception_of_a_generator_is_a_failure(error: type[BaseException]) -> None:
    class Leaving(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield "a"
            raise error

    with pytest.raises(EngineFailed, match=error.__name__):
        collect(Leaving())


def test_exception_in_close_does_not_block_the_reader() -> None:
    class Stubborn(Iterator[Output]):
        def __next__(self) -> Output:
            raise StopIteration

        def close(self) -> None:
            raise SystemExit

    class StubbornEngine(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            return Stubborn()

    assert collect(StubbornEngine()) == [Started(), Finished()]


def test_invalid_output_type_is_a_failure() -> None:
    class Strings(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield ["a", 3]  # type: ignore[list-item]

    with pytest.raises(EngineFailed, match="TypeError"):
        collect(Strings())


def test_call_plain_and_async_methods() -> None:
    async def later(_: int) -> int:
        return threading.get_ident()

    async def scenario() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found: int = await call_engine(later, 1)
            assert found == threading.get_ident()
            assert await call_engine(threading.get_ident) != threading.get_ident()

    asyncio.run(scenario())


def test_text_and_events_in_one_batch() -> None:
    class Mixed(Engine):
        def generate(self, request: GenerationRequest) -> Iterator[Output]:
            yield ["a", TextDelta("b", count=2)]
            yield ("c",)

    assert collect(Mixed()) == [Started(), TextDelta("a"), TextDelta("b", count=2), TextDelta("c"), Finished()]


def test_cancellation_inside_the_engine_is_a_failure() -> None:
    class Cancelled(Engine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
            yield "a"
            inner = asyncio.create_task(asyncio.sleep(10))
            inner.cancel()
            await inner

    with pytest.raises(EngineFailed, match="CancelledError"):
        collect(Cancelled())

"""Delivery of events: the queue, and engines that are written as generators."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.delivery import MAX_BACKLOG, EventQueue
from dragoman.core.engine import Engine, Output, call_engine, stream_events
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest


def deltas(*texts: str) -> Sequence[Event]:
    return tuple(TextDelta(text) for text in texts)


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
            assert events
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


async def test_listener_is_called_without_waking_a_task() -> None:
    queue = EventQueue()
    received: list[Event] = []
    delivery = asyncio.create_task(queue.deliver(received.extend))
    await asyncio.sleep(0)
    queue.put(deltas("a"))
    assert received == list(deltas("a"))
    queue.end()
    await delivery


async def test_pause_of_a_cancelled_delivery_is_closed() -> None:
    """Otherwise Python warns about a coroutine that was never awaited."""
    queue = EventQueue()
    delivery = asyncio.create_task(queue.deliver(lambda events: asyncio.sleep(0)))
    await asyncio.sleep(0)
    queue.put(deltas("a"))
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery


async def test_exception_of_the_listener_ends_the_delivery() -> None:
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


async def collect(generate: Callable[[], Iterable[Output] | AsyncIterable[Output]]) -> list[Event]:
    """Return the events of an engine whose generator is this one."""

    class Generating(Engine):
        def generate(self, request: GenerationRequest) -> Iterable[Output] | AsyncIterable[Output]:
            return generate()

    async with asyncio.timeout(60):
        batches = [batch async for batch in stream_events(Generating(), GenerationRequest(id="1"))]
    assert all(batches)
    return [event for batch in batches for event in batch]


def pausing() -> Iterator[Output]:
    """Yields empty batches between its tokens."""
    yield []
    yield "a"
    time.sleep(0.05)
    yield []
    time.sleep(0.05)
    yield ()
    yield "b"


async def pausing_async() -> AsyncIterator[Output]:
    yield []
    yield "a"
    yield []
    await asyncio.sleep(0.01)
    yield "b"


@pytest.mark.parametrize("generate", [pausing, pausing_async])
async def test_empty_output_does_not_end_the_stream(
    generate: Callable[[], Iterable[Output] | AsyncIterable[Output]],
) -> None:
    assert await collect(generate) == [Started(), TextDelta("a"), TextDelta("b"), Finished()]


async def test_more_empty_outputs_than_the_backlog() -> None:
    outputs: list[Output] = [[] for _ in range(3 * MAX_BACKLOG)]
    assert await collect(lambda: [*outputs, "at last"]) == [Started(), TextDelta("at last"), Finished()]


async def test_all_outputs_of_a_fast_generator_arrive() -> None:
    count = 5 * MAX_BACKLOG
    events = await collect(lambda: map(str, range(count)))
    assert events == [Started(), *(TextDelta(str(at)) for at in range(count)), Finished()]


async def test_output_after_finished_is_ignored() -> None:
    ended = Finished("length")
    assert await collect(lambda: ["a", [TextDelta("b"), ended, TextDelta("c")], "d"]) == [
        *(Started(), TextDelta("a"), TextDelta("b"), ended)
    ]


async def test_text_and_events_in_one_batch() -> None:
    events = await collect(lambda: [["a", TextDelta("b", count=2)], ("c",)])
    assert events == [Started(), TextDelta("a"), TextDelta("b", count=2), TextDelta("c"), Finished()]


async def test_abandoned_generator_without_output_is_closed() -> None:
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

    stream = stream_events(Silent(), GenerationRequest())
    await anext(stream)
    await stream.aclose()
    assert await asyncio.to_thread(closed.wait, 60)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
async def test_any_exception_of_a_generator_is_a_failure(error: type[BaseException]) -> None:
    def leave() -> Iterator[Output]:
        yield "a"
        raise error

    with pytest.raises(EngineFailed, match=error.__name__):
        await collect(leave)


async def test_cancellation_inside_the_engine_is_a_failure() -> None:
    async def cancel() -> AsyncIterator[Output]:
        yield "a"
        inner = asyncio.create_task(asyncio.sleep(10))
        inner.cancel()
        await inner

    with pytest.raises(EngineFailed, match="CancelledError"):
        await collect(cancel)


async def test_invalid_output_type_is_a_failure() -> None:
    with pytest.raises(EngineFailed, match="TypeError"):
        await collect(lambda: [["a", 3]])  # type: ignore[list-item]


async def test_exception_in_close_does_not_block_the_reader() -> None:
    class Stubborn(Iterator[Output]):
        def __next__(self) -> Output:
            raise StopIteration

        def close(self) -> None:
            raise SystemExit

    assert await collect(Stubborn) == [Started(), Finished()]


async def test_call_plain_and_async_methods() -> None:
    async def later(_: int) -> int:
        return threading.get_ident()

    found: int = await call_engine(later, 1)
    assert found == threading.get_ident()
    assert await call_engine(threading.get_ident) != threading.get_ident()

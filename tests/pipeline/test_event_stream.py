"""Adapting the output and errors of engines to an event stream."""

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from dragoman.core.engine import Engine, Output
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.pipeline.event_stream import MAX_BACKLOG, call_engine, stream_events

REQUEST = GenerationRequest(id="1")


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

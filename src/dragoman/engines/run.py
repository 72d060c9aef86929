"""Any engine's output as one kind of stream: lists of events, in the event loop.

An engine may be a generator or an async generator, may yield text, events or lists of events, and may leave out
`Started` and `Finished`. Here the difference ends.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

from dragoman.conversation import GenerationRequest
from dragoman.engines.interface import Engine, Output
from dragoman.errors import DragomanError, EngineFailed
from dragoman.events import Event, Finished, Started, TextDelta

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

MAX_BACKLOG = 256
"""Outputs that a threaded generator may be ahead of its reader."""


def run(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    """The events of one generation, `Started` first and `Finished` last whatever the engine yields."""
    if engine.streams_events:
        return cast("AsyncGenerator[Sequence[Event], None]", engine.generate(request))
    return _completed(engine, request)


async def _completed(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    try:
        source = engine.generate(request)
        outputs = source.__aiter__() if isinstance(source, AsyncIterable) else _in_thread(source)
        started = False
        try:
            async for output in outputs:
                events = _events(output)
                if not started and events:
                    started = True
                    if type(events[0]) is not Started:
                        events = [Started(), *events]
                finished = _up_to_finished(events)
                yield finished or events
                if finished:
                    return
            yield [Finished()] if started else [Started(), Finished()]
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
    except DragomanError:
        raise
    except Exception as error:
        log.exception("request %s: the engine raised", request.id)
        raise EngineFailed(f"the engine failed ({type(error).__name__}); the server's log says more") from error


def _up_to_finished(events: Sequence[Event]) -> Sequence[Event]:
    """The events with which a stream ends; nothing where it goes on."""
    end = next((at for at, event in enumerate(events, 1) if type(event) is Finished), 0)
    return events[:end]


def _events(output: Output) -> Sequence[Event]:
    if isinstance(output, str):
        return [TextDelta(output)]
    if isinstance(output, list | tuple):
        return output
    if isinstance(output, Event):
        return [output]
    raise TypeError(f"an engine yields text or events, not {type(output).__name__}")


async def call(method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """The answer of an engine's method; a plain one runs in a thread."""
    if asyncio.iscoroutinefunction(method):
        answer: T = await method(*arguments)
        return answer
    result = await asyncio.to_thread(method, *arguments)
    if isinstance(result, Awaitable):
        awaited: T = await result
        return awaited
    return result


async def _in_thread(source: Iterable[Output]) -> AsyncGenerator[Sequence[Event], None]:
    pump = _Pump(iter(source), asyncio.get_running_loop())
    threading.Thread(target=pump.work, name="dragoman-generate", daemon=True).start()
    try:
        while batch := await pump.take():
            yield batch
    finally:
        pump.close()


class _Pump:
    """Carries a plain generator's outputs from its thread into the event loop, a bounded number ahead."""

    def __init__(self, source: Iterator[Output], loop: asyncio.AbstractEventLoop) -> None:
        self.source = source
        self.loop = loop
        self.ready: deque[Sequence[Event]] = deque()
        self.wake = asyncio.Event()
        self.room = threading.Semaphore(MAX_BACKLOG)
        self.closed = False
        self.done = False
        self.error: Exception | None = None

    def work(self) -> None:
        try:
            for output in self.source:
                self.room.acquire()
                if self.closed:
                    break
                self._post(_events(output))
        except Exception as error:  # noqa: BLE001 (the reader raises it)
            self.error = error
        finally:
            self._end()

    def _post(self, events: Sequence[Event]) -> None:
        self.ready.append(events)
        self._wake()

    def _end(self) -> None:
        close = getattr(self.source, "close", None)
        if close is not None:
            try:
                close()
            except Exception:
                log.exception("an engine's generator raised while it was closed")
        self.done = True
        self._wake()

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self.wake.set)
        except RuntimeError:
            # The loop has been closed: nobody reads any more.
            self.closed = True

    async def take(self) -> Sequence[Event]:
        """Everything that is ready, at least one event; nothing at the end."""
        while not self.ready:
            if self.done:
                if self.error is not None:
                    raise self.error
                return []
            self.wake.clear()
            if not self.ready and not self.done:
                await self.wake.wait()
        taken: list[Event] = []
        while self.ready:
            taken.extend(self.ready.popleft())
            self.room.release()
        return taken

    def close(self) -> None:
        self.closed = True
        self.room.release()

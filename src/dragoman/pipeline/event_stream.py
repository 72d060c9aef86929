"""Any engine's output as one kind of stream: lists of events, in the event loop.

An engine may be a generator or an async generator, may yield text, events or lists of events, and may leave out
`Started` and `Finished`. Here the difference ends.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TypeVar, cast

from dragoman.core.engine import Engine, Output
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.event_queue import Mailbox
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta
from dragoman.core.request import GenerationRequest

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

MAX_BACKLOG = 256
"""Outputs that a threaded generator may be ahead of its reader."""


def run(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    """The events of one generation, `Started` first and `Finished` last, in lists that are never empty.

    An engine with `streams_events` vouches for that itself and is taken at its word; for any other it holds whatever
    the engine yields.
    """
    if engine.streams_events:
        return cast("AsyncGenerator[Sequence[Event], None]", engine.generate(request))
    return _completed(engine, request)


async def tell(engine: Engine, request: GenerationRequest, listener: Listener) -> None:
    """The same, for one who is called."""
    if engine.calls_back:
        await engine.tell(request, listener)
        return
    async with aclosing(run(engine, request)) as batches:
        async for events in batches:
            pause = listener(events)
            if pause is not None:
                await pause


async def read(tell: Callable[[Listener], Coroutine[None, None, None]]) -> AsyncGenerator[Sequence[Event], None]:
    """What is told, for one who reads: nothing more is told until the reader comes for it."""
    mailbox, wanted = Mailbox(), asyncio.Event()

    def put(events: Sequence[Event]) -> Awaitable[None]:
        wanted.clear()
        mailbox.put(events)
        return _set(wanted)

    telling = asyncio.create_task(_told(tell(put), mailbox))
    try:
        while batch := await mailbox.take():
            yield batch
            wanted.set()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _told(telling: Coroutine[None, None, None], mailbox: Mailbox) -> None:
    try:
        await telling
        mailbox.end()
    except Exception as error:  # noqa: BLE001 (the reader raises it)
        mailbox.fail(error)


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _completed(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    try:
        source = engine.generate(request)
        outputs = source.__aiter__() if isinstance(source, AsyncIterable) else _in_thread(source)
        started = False
        try:
            async for output in outputs:
                events = _events(output)
                if not events:
                    continue
                if not started:
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
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody cancelled this request: something inside the engine was cancelled, and it did not mind.
        log.exception("request %s: the engine raised", request.id)
        raise failed(error) from error
    except Exception as error:
        log.exception("request %s: the engine raised", request.id)
        raise failed(error) from error


def failed(error: BaseException) -> EngineFailed:
    """What a caller is told of an engine's exception, whose words may hold anything."""
    return EngineFailed(f"the engine failed ({type(error).__name__}); the server's log says more")


def _up_to_finished(events: Sequence[Event]) -> Sequence[Event]:
    """The events with which a stream ends; nothing where it goes on."""
    end = next((at for at, event in enumerate(events, 1) if type(event) is Finished), 0)
    return events[:end]


def _events(output: Output) -> Sequence[Event]:
    if isinstance(output, str):
        return [TextDelta(output)]
    if isinstance(output, list | tuple):
        return [_event(entry) for entry in output]
    return [_event(output)]


def _event(output: object) -> Event:
    if isinstance(output, str):
        return TextDelta(output)
    if isinstance(output, Event):
        return output
    raise TypeError(f"an engine yields text, events or lists of them, not {type(output).__name__}")


async def call(method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """The answer of an engine's method; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(method):
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
        self.mailbox = Mailbox()
        self.arrived = 0
        self.room = threading.Semaphore(MAX_BACKLOG)
        self.closed = False

    # In the thread.

    def work(self) -> None:
        error = self._pump()
        self._close_source()
        if error is None:
            self._call(self.mailbox.end)
        else:
            self._call(self.mailbox.fail, error)

    def _pump(self) -> Exception | None:
        try:
            for output in self.source:
                # Outputs of nothing never reach the reader, who could not make room for others by taking them.
                if events := _events(output):
                    self.room.acquire()
                    self._call(self._arrive, events)
                if self.closed:
                    break
        except Exception as error:  # noqa: BLE001 (the reader raises it)
            return error
        except BaseException as error:
            # It means to end the thread; raised by the reader it would end the event loop.
            log.exception("an engine's generator ended its thread")
            return failed(error)
        return None

    def _close_source(self) -> None:
        close = getattr(self.source, "close", None)
        if close is not None:
            try:
                close()
            except BaseException:
                log.exception("an engine's generator raised while it was closed")

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop has been closed: nobody reads any more.
            self.closed = True

    # In the event loop.

    def _arrive(self, events: Sequence[Event]) -> None:
        self.arrived += 1
        self.mailbox.put(events)

    async def take(self) -> Sequence[Event]:
        """Everything that is ready; nothing at the end."""
        taken = await self.mailbox.take()
        if self.arrived:
            self.room.release(self.arrived)
            self.arrived = 0
        return taken

    def close(self) -> None:
        self.closed = True
        self.room.release()

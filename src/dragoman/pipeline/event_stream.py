"""Adapts the output of any engine to one stream of event lists in the event loop.

An engine may be a generator or an async generator. It may yield text, events or lists of them, and may leave out
`Started` and `Finished`.
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
from dragoman.core.event_queue import EventQueue
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta
from dragoman.core.request import GenerationRequest

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

MAX_BACKLOG = 256
"""Maximum number of outputs a threaded generator may be ahead of its reader."""


def stream_events(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    """Return the events of one generation in non-empty lists, `Started` first and `Finished` last.

    The output of an engine with `emits_events` already has this form and is returned unchanged.
    """
    if engine.emits_events:
        return cast("AsyncGenerator[Sequence[Event], None]", engine.generate(request))
    return _normalized_events(engine, request)


async def push_events(engine: Engine, request: GenerationRequest, listener: Listener) -> None:
    """Call `listener` with the events of one generation."""
    if engine.is_push_based:
        await engine.tell(request, listener)
        return
    async with aclosing(stream_events(engine, request)) as batches:
        async for events in batches:
            pause = listener(events)
            if pause is not None:
                await pause


async def pull_events(
    push: Callable[[Listener], Coroutine[None, None, None]],
) -> AsyncGenerator[Sequence[Event], None]:
    """Turn a push-based generation into an async generator. The producer waits until each batch has been read."""
    mailbox, is_read = EventQueue(), asyncio.Event()

    def put(events: Sequence[Event]) -> Awaitable[None]:
        is_read.clear()
        mailbox.put(events)
        return _wait(is_read)

    async def produce() -> None:
        try:
            await push(put)
            mailbox.end()
        except Exception as error:  # noqa: BLE001 (the reader raises it)
            mailbox.fail(error)

    producer = asyncio.create_task(produce())
    try:
        while batch := await mailbox.take():
            yield batch
            is_read.set()
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _normalized_events(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    try:
        source = engine.generate(request)
        outputs = source.__aiter__() if isinstance(source, AsyncIterable) else _in_thread(source)
        started = False
        try:
            async for output in outputs:
                events = _to_events(output)
                if not events:
                    continue
                if not started:
                    started = True
                    if type(events[0]) is not Started:
                        events = [Started(), *events]
                finished = _through_finished(events)
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
        # The request was not cancelled: a task inside the engine was.
        log.exception("request %s: the engine raised", request.id)
        raise engine_failure(error) from error
    except Exception as error:
        log.exception("request %s: the engine raised", request.id)
        raise engine_failure(error) from error


def engine_failure(error: BaseException) -> EngineFailed:
    """Return the client-visible error for an engine's exception. It omits the exception text, which may be private."""
    return EngineFailed(f"the engine failed ({type(error).__name__}); see the server log")


def _through_finished(events: Sequence[Event]) -> Sequence[Event]:
    """The events up to and including `Finished`; empty if there is no `Finished`."""
    end = next((at for at, event in enumerate(events, 1) if type(event) is Finished), 0)
    return events[:end]


def _to_events(output: Output) -> Sequence[Event]:
    if isinstance(output, str):
        return [TextDelta(output)]
    if isinstance(output, list | tuple):
        return [_to_event(entry) for entry in output]
    return [_to_event(output)]


def _to_event(output: object) -> Event:
    if isinstance(output, str):
        return TextDelta(output)
    if isinstance(output, Event):
        return output
    raise TypeError(f"an engine yields text, events or lists of them, not {type(output).__name__}")


async def call_engine(method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """Call a method of an engine. A method that is not async runs in a thread."""
    if inspect.iscoroutinefunction(method):
        answer: T = await method(*arguments)
        return answer
    result = await asyncio.to_thread(method, *arguments)
    if isinstance(result, Awaitable):
        awaited: T = await result
        return awaited
    return result


async def _in_thread(source: Iterable[Output]) -> AsyncGenerator[Sequence[Event], None]:
    threaded = _ThreadedSource(iter(source), asyncio.get_running_loop())
    threading.Thread(target=threaded.run_generator, name="dragoman-generate", daemon=True).start()
    try:
        while batch := await threaded.next_batch():
            yield batch
    finally:
        threaded.close()


class _ThreadedSource:
    """Runs a plain generator in a thread and passes its outputs to the event loop, at most MAX_BACKLOG ahead."""

    def __init__(self, source: Iterator[Output], loop: asyncio.AbstractEventLoop) -> None:
        self._source = source
        self._loop = loop
        self._mailbox = EventQueue()
        self._unread = 0
        self._capacity = threading.Semaphore(MAX_BACKLOG)
        self._is_closed = False

    # Runs in the thread.

    def run_generator(self) -> None:
        error = self._produce()
        self._close_source()
        if error is None:
            self._call_in_loop(self._mailbox.end)
        else:
            self._call_in_loop(self._mailbox.fail, error)

    def _produce(self) -> Exception | None:
        try:
            for output in self._source:
                # Empty outputs never reach the reader, so the reader could not release their capacity.
                if events := _to_events(output):
                    self._capacity.acquire()
                    self._call_in_loop(self._put, events)
                if self._is_closed:
                    break
        except Exception as error:  # noqa: BLE001 (the reader raises it)
            return error
        except BaseException as error:
            # SystemExit and the like would end the event loop if the reader raised them.
            log.exception("the engine's generator raised %s", type(error).__name__)
            return engine_failure(error)
        return None

    def _close_source(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            try:
                close()
            except BaseException:
                log.exception("the engine's generator raised an exception while closing")

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop is closed.
            self._is_closed = True

    # Runs in the event loop.

    def _put(self, events: Sequence[Event]) -> None:
        self._unread += 1
        self._mailbox.put(events)

    async def next_batch(self) -> Sequence[Event]:
        """Return all events that are ready, or an empty sequence at the end."""
        events = await self._mailbox.take()
        if self._unread:
            self._capacity.release(self._unread)
            self._unread = 0
        return events

    def close(self) -> None:
        self._is_closed = True
        self._capacity.release()

"""Delivery of events from an engine to its listener, in the event loop.

    EventQueue        between callbacks that produce events and one listener
    complete_events   runs an engine that is written as a generator
    pull_events       turns a delivery into an async generator
    deliver_in_thread runs an engine whose `deliver` is a plain function

Rules
1. Events that were put into a queue before the end or an error are delivered first; later ones are dropped.
2. `EventQueue.deliver` calls the listener from within `put`. Waking a task per event list is too slow for an engine
   that advances hundreds of requests in one step. Events are queued only while the listener has asked to wait.
3. A generator may yield text, events or lists of them, and may leave out `Started` and `Finished`. A plain generator
   runs in a thread of its own. A function may also return the whole text or one event.
"""

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dragoman.core.daemon_thread import run_in_daemon_thread
from dragoman.core.errors import DragomanError, engine_failure
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta, notify
from dragoman.core.request import GenerationRequest

log = logging.getLogger("dragoman.engine")

MAX_BACKLOG = 256
"""Maximum number of outputs a threaded generator may be ahead of its reader."""

Output = str | Event | Sequence[str | Event]
"""A string counts as one token. A list or tuple is a batch that became ready together."""

Outputs = Iterable[Output] | AsyncIterable[Output]
Generate = Callable[[GenerationRequest], Outputs | Output | Awaitable[Outputs | Output]]
T = TypeVar("T")


class EventQueue:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ended = False
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._listener: Listener | None = None
        """Called by `put`, if `deliver` waits."""
        self._pause: Awaitable[None] | None = None
        """What `deliver` awaits before the next call of the listener."""

    def __len__(self) -> int:
        """The number of events in the queue."""
        return len(self._events)

    def put(self, events: Sequence[Event]) -> None:
        if not events or self._ended or self._error is not None:
            return
        if self._listener is None:
            self._events.extend(events)
            self._notify()
            return
        try:
            self._pause = self._listener(events)
        except Exception as error:  # noqa: BLE001 (`deliver` raises it)
            self.fail(error)
        if self._pause is not None:
            self._listener = None
            self._notify()

    def end(self) -> None:
        self._ended = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """Raise this error in `deliver`, after all events before it."""
        self._error = error
        self._notify()

    async def deliver(self, listener: Listener) -> None:
        """Pass all events to a listener, until the end."""
        while self._events or not (self._ended or self._error):
            if self._events:
                taken, self._events = self._events, []
                pause = listener(taken)
            else:
                self._listener = listener
                self._wake = asyncio.get_running_loop().create_future()
                try:
                    await self._wake
                except asyncio.CancelledError:
                    if inspect.iscoroutine(self._pause):
                        # Nothing will await it now.
                        self._pause.close()
                    raise
                finally:
                    self._listener = None
                pause, self._pause = self._pause, None
            if pause is not None:
                await pause
        if self._error is not None:
            # Drop the reference: the traceback of the error refers to this queue, so keeping it would form a cycle.
            error, self._error, self._ended = self._error, None, True
            try:
                raise error
            finally:
                del error

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


async def pull_events(
    deliver: Callable[[Listener], Coroutine[None, None, None]],
) -> AsyncGenerator[Sequence[Event], None]:
    """Turn a delivery into an async generator. The producer is at most one batch ahead of the reader."""
    batches: asyncio.Queue[Sequence[Event]] = asyncio.Queue(1)

    async def produce() -> Exception | None:
        error = None
        try:
            await deliver(batches.put)
        except Exception as raised:  # noqa: BLE001 (the reader raises it)
            error = raised
        # An empty batch is the end.
        await batches.put(())
        return error

    producer = asyncio.create_task(produce())
    try:
        while batch := await batches.get():
            yield batch
        if (error := await producer) is not None:
            raise error
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)


async def complete_events(generate: Generate, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    """Yield the events of one generation in non-empty lists, `Started` first and `Finished` last."""
    try:
        source = await _call_generate(generate, request)
        is_async = isinstance(source, AsyncIterable)
        outputs: Any = source.__aiter__() if isinstance(source, AsyncIterable) else _in_thread(source)
        started = False
        try:
            async for output in outputs:
                events: Sequence[Event] = _to_events(output) if is_async else output
                if not events:
                    continue
                if not started:
                    started = True
                    if type(events[0]) is not Started:
                        events = [Started(), *events]
                for at, event in enumerate(events, 1):
                    if type(event) is Finished:
                        yield events[:at]
                        return
                yield events
            yield [Finished()] if started else [Started(), Finished()]
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
    except DragomanError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        # Any other CancelledError comes from a task inside the engine: the request was not cancelled.
        log.exception("request %s: the engine raised", request.id)
        raise engine_failure(error) from error


async def _call_generate(generate: Generate, request: GenerationRequest) -> Outputs:
    """Call a method that may be a generator, or a function that returns an iterator, a text or an event."""
    result: Any
    if inspect.isgeneratorfunction(generate) or inspect.isasyncgenfunction(generate):
        result = generate(request)
    elif inspect.iscoroutinefunction(generate):
        result = await generate(request)
    else:
        result = await run_in_daemon_thread(partial(_convert_exit, partial(generate, request)))
    result = await result if inspect.isawaitable(result) else result
    if isinstance(result, str | Event):
        return (result,)
    if not isinstance(result, AsyncIterable | Iterable):
        raise TypeError(f"`generate` yields or returns text or events, not {type(result).__name__}")
    return result


def _convert_exit(function: Callable[[], T]) -> T:
    """Call a function; SystemExit and the like would end the event loop, so they become an error."""
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise engine_failure(error) from error


async def deliver_in_thread(
    deliver: Callable[[GenerationRequest, Listener], Any], request: GenerationRequest, listener: Listener
) -> None:
    """Run a `deliver` that blocks in a thread. The listener it gets returns when the events are passed on."""
    loop, is_ended = asyncio.get_running_loop(), threading.Event()

    async def pass_on(events: Sequence[Event]) -> None:
        if is_ended.is_set():
            raise concurrent.futures.CancelledError
        await notify(listener, events)

    def listen(events: Sequence[Event]) -> None:
        if is_ended.is_set():
            raise concurrent.futures.CancelledError
        asyncio.run_coroutine_threadsafe(pass_on(events), loop).result()

    try:
        await run_in_daemon_thread(partial(_convert_exit, partial(deliver, request, listen)))
    finally:
        is_ended.set()


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


async def _in_thread(source: Iterable[Output]) -> AsyncGenerator[Sequence[Event], None]:
    """Run a plain generator in a thread, at most MAX_BACKLOG outputs ahead of the reader."""
    iterator, loop = iter(source), asyncio.get_running_loop()
    ready, has_output = deque[Sequence[Event]](), asyncio.Event()
    capacity, is_closed = threading.Semaphore(MAX_BACKLOG), threading.Event()
    outcome: Future[None] = Future()

    def wake_reader() -> None:
        try:
            loop.call_soon_threadsafe(has_output.set)
        except RuntimeError:
            # The event loop is closed.
            is_closed.set()

    def produce() -> None:
        for output in iterator:
            # Empty outputs never reach the reader, so the reader could not release their capacity.
            if events := _to_events(output):
                capacity.acquire()
                ready.append(events)
                # A reader that was woken for an earlier entry takes this one too.
                if len(ready) == 1:
                    wake_reader()
            if is_closed.is_set():
                return

    def run() -> None:
        error = _catch(produce)
        closing_error = _catch(getattr(iterator, "close", lambda: None))
        if closing_error is not None:
            log.error("the engine's generator raised an exception while closing", exc_info=closing_error)
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
        wake_reader()

    threading.Thread(target=run, name="dragoman-generate", daemon=True).start()
    try:
        is_last = False
        while not is_last:
            await has_output.wait()
            has_output.clear()
            # Read first: what the thread adds before its end is in the last batch.
            is_last = outcome.done()
            batch: list[Event] = []
            while ready:
                batch += ready.popleft()
                capacity.release()
            if batch:
                yield batch
        outcome.result()
    finally:
        is_closed.set()
        capacity.release()


def _catch(function: Callable[[], None]) -> Exception | None:
    """Call a function of an engine's generator and return its exception."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 (the reader raises it)
        return error
    except BaseException as error:
        # SystemExit and the like would end the event loop if the reader raised them.
        log.exception("the engine's generator raised %s", type(error).__name__)
        return engine_failure(error)
    return None

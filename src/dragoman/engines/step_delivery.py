"""Base class of engines that process all requests together in steps and deliver the results of a step in one call.

    receiver.take([Portion, Portion, ...])      once per step, one portion per request with new events

Waking one async generator per request and token is too slow: with 256 requests and 100 steps a second it dominates the
cost of delivery. Requests are therefore started and cancelled by key, and a single receiver gets all events. In a
worker process the receiver writes the whole step to the pipe; otherwise it is a table of event queues.

Rules
1. The receiver gets the events that `generate` would yield, from `Started` to `Finished`. The portion with `ended` is
   the last one for its key; it has an `error` if the request failed.
2. If `begin` raises, the receiver gets nothing for that key.
3. After `drop` the receiver gets nothing for that key. A receiver may call `drop` from within `take`.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError, EngineDied
from dragoman.core.event_queue import EventQueue
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New events of one request. It has the wire format of `worker_messages.Progress`."""

    key: int
    events: tuple[Event, ...] = ()
    ended: bool = False
    error: DragomanError | None = None


class StepReceiver(Protocol):
    def take(self, portions: Sequence[RequestUpdate]) -> None:
        """Receive the results of one step."""

    def lose(self, reason: str) -> None:
        """Fail all requests because the engine has died."""


class SteppingEngine(Engine):
    emits_events = True

    def __init__(self) -> None:
        self._queues = EventQueues()
        self.receiver: StepReceiver = self._queues

    async def begin(self, key: int, request: GenerationRequest) -> None:
        """Start a request."""
        raise NotImplementedError

    def drop(self, key: int) -> None:
        """Cancel a request. Does nothing if the request is unknown or has ended."""
        raise NotImplementedError

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        key, mailbox = self._queues.open()
        try:
            await self.begin(key, request)
            while events := await mailbox.take():
                yield events
        finally:
            self._queues.close(key)
            self.drop(key)


class EventQueues:
    """A receiver with one event queue per request, for readers in the same process."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._open: dict[int, EventQueue] = {}

    def open(self) -> tuple[int, EventQueue]:
        key = next(self._keys)
        self._open[key] = mailbox = EventQueue()
        return key, mailbox

    def close(self, key: int) -> None:
        self._open.pop(key, None)

    def take(self, portions: Sequence[RequestUpdate]) -> None:
        for portion in portions:
            mailbox = self._open.get(portion.key)
            if mailbox is None:
                continue
            mailbox.put(portion.events)
            if portion.error is not None:
                mailbox.fail(portion.error)
            elif portion.ended:
                mailbox.end()

    def lose(self, reason: str) -> None:
        for mailbox in self._open.values():
            mailbox.fail(EngineDied(reason))

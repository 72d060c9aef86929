"""Engines that work on all their requests in steps, and hand out what a step made in one call.

    receiver.take([Portion, Portion, ...])      one per request that got something, once per step

An async generator per request is woken once per token: at 256 requests and a hundred steps a second that costs more
than everything else on the way to the reader. So here a request is only begun and dropped, by its key; what becomes of
it goes to the engine's one receiver. In a worker that is the child, which writes the whole step to the pipe; in the
process of whoever calls `generate` it is a table of mailboxes.

Rules
1. What the receiver gets for a key is what `generate` would yield, from `Started` to `Finished`; the portion with which
   it `ended` is the last. One that failed ends with `error`.
2. `begin` raises what is wrong with the request; then nothing is ever received for its key.
3. After `drop` nothing is received for the key any more. A receiver may drop while it takes.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError, EngineDied
from dragoman.core.event_queue import Mailbox
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest


class Portion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one request has new. On the wire to another process it is what `worker.messages.Progress` is."""

    key: int
    events: tuple[Event, ...] = ()
    ended: bool = False
    error: DragomanError | None = None


class Receiver(Protocol):
    def take(self, portions: Sequence[Portion]) -> None:
        """Everything that a step made."""

    def lose(self, reason: str) -> None:
        """The engine is gone, with everything that it worked on."""


class SteppingEngine(Engine):
    streams_events = True

    def __init__(self) -> None:
        self._mailboxes = Mailboxes()
        self.receiver: Receiver = self._mailboxes

    async def begin(self, key: int, request: GenerationRequest) -> None:
        """Work on the request from now on."""
        raise NotImplementedError

    def drop(self, key: int) -> None:
        """Nobody wants the rest. One that has ended, or was never begun, may be dropped too."""
        raise NotImplementedError

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        key, mailbox = self._mailboxes.open()
        try:
            await self.begin(key, request)
            while events := await mailbox.take():
                yield events
        finally:
            self._mailboxes.close(key)
            self.drop(key)


class Mailboxes:
    """A receiver for readers in the same process."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._open: dict[int, Mailbox] = {}

    def open(self) -> tuple[int, Mailbox]:
        key = next(self._keys)
        self._open[key] = mailbox = Mailbox()
        return key, mailbox

    def close(self, key: int) -> None:
        self._open.pop(key, None)

    def take(self, portions: Sequence[Portion]) -> None:
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

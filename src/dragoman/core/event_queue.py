"""A queue of events between one producer and one consumer. Use it only in the event loop.

Rules
1. Events that were put before the end or an error are returned first.
2. `take` returns at least one event, or nothing at the end. An empty `put` does not wake the consumer.
"""

import asyncio
from collections.abc import Sequence

from dragoman.core.events import Event


class EventQueue:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ended = False
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """The number of events in the queue."""
        return len(self._events)

    def put(self, events: Sequence[Event]) -> None:
        if events:
            self._events.extend(events)
            self._notify()

    def end(self) -> None:
        self._ended = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """Raise this error in `take`, after all events have been taken."""
        self._error = error
        self._notify()

    async def take(self) -> Sequence[Event]:
        """Wait for events and return all of them; nothing at the end."""
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                return ()
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        taken, self._events = self._events, []
        return taken

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

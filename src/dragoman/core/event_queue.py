"""Events between whoever makes them and the one who reads them. Everything here happens in the event loop.

Rules
1. What was put before the end or the failure is taken before either is told.
2. `take` gives at least one event; nothing means the end. A put of nothing wakes nobody.
"""

import asyncio
from collections.abc import Sequence

from dragoman.core.events import Event


class Mailbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ended = False
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """Events that wait for their reader."""
        return len(self._events)

    def put(self, events: Sequence[Event]) -> None:
        if events:
            self._events.extend(events)
            self._notify()

    def end(self) -> None:
        self._ended = True
        self._notify()

    def fail(self, error: Exception) -> None:
        """The reader gets the error once it has taken everything else."""
        self._error = error
        self._notify()

    async def take(self) -> Sequence[Event]:
        """Everything that has come; nothing at the end. For one reader."""
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

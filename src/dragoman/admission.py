"""Who may start now: a number of slots, a bounded queue, a turn for every principal.

Rules
1. At most `slots` requests run at once; None means no limit.
2. At most `queue` wait. One more is told so at once, with a time after which to try again.
3. Nobody waits longer than `seconds`.
4. Principals take turns for a free slot; of one principal's requests the oldest comes first.
"""

import asyncio
from collections import OrderedDict, deque

from dragoman.errors import QueueFull


class Admission:
    def __init__(self, slots: int | None, queue: int, seconds: float) -> None:
        self._slots = slots
        self._queue = queue
        self._seconds = seconds
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    async def enter(self, principal: str) -> None:
        """Return when a slot is granted; who has entered must `leave`."""
        if self._slots is None or (self.running < self._slots and not self.waiting):
            self.running += 1
        else:
            await self._wait(principal)

    def leave(self) -> None:
        """The slot goes to the next in line, if there is one; `running` counts it all the while."""
        while self._lines:
            principal, line = self._lines.popitem(last=False)
            turn = line.popleft()
            if line:
                self._lines[principal] = line
            self.waiting -= 1
            # One who is being cancelled right now has not had the time to step out of the line.
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    async def _wait(self, principal: str) -> None:
        if self.waiting >= self._queue:
            raise QueueFull(f"the queue of this model is full ({self._queue} requests wait); try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(principal, deque()).append(turn)
        self.waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                # The turn came in the same moment: somebody else takes it.
                self.leave()
            else:
                self._give_up(principal, turn)
            if isinstance(error, TimeoutError):
                raise QueueFull(f"no slot became free within {self._seconds:g} s; try again later") from None
            raise

    def _give_up(self, principal: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(principal, deque())
        if turn in line:
            self.waiting -= 1
            line.remove(turn)
            if not line:
                del self._lines[principal]

"""Who may start now: a number of slots, a bounded queue, a turn for every principal.

Rules
1. At most `slots` requests run at once; None means no limit.
2. At most `queue` wait. One more is told so at once, with a time after which to try again: about as long as those who
   wait will take, by how fast slots have become free lately.
3. Nobody waits longer than `seconds`.
4. Principals take turns for a free slot; of one principal's requests the oldest comes first.
5. Every choice of a request takes a slot. Only the first is subject to rules 2 and 3: the others belong to a request
   that has been let in.
"""

import asyncio
import time
from collections import OrderedDict, deque

from dragoman.errors import QueueFull

LATELY = 0.2
"""How much the newest counts."""
LONGEST_PATIENCE = 60.0


class Admission:
    def __init__(self, slots: int | None, queue: int, seconds: float) -> None:
        self.slots = slots
        self._queue = queue
        self._seconds = seconds
        self._left_at = time.monotonic()
        self._pause = 0.0
        """Between two slots that became free, lately, in seconds."""
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.running = 0
        self.waiting = 0

    async def enter(self, principal: str, patient: bool = False) -> None:
        """Return when a slot is granted; who has entered must `leave`. One who is patient waits as long as it takes."""
        if self.enter_now():
            return
        if not patient and self.waiting >= self._queue:
            words = f"the queue of this model is full ({self._queue} requests wait); try again later"
            raise QueueFull(words, retry_after=self.patience())
        await self._wait(principal, None if patient else self._seconds)

    def patience(self) -> float:
        """Seconds after which it may be worth trying again."""
        return min(LONGEST_PATIENCE, max(1.0, (self.waiting + 1) * self._pause))

    def enter_now(self) -> bool:
        """Whether a slot was free and nobody in line for it: then it is granted."""
        if self.slots is not None and (self.running >= self.slots or self._lines):
            return False
        self.running += 1
        return True

    def bound(self, queue: int, seconds: float) -> None:
        """For those who come from now on."""
        self._queue = queue
        self._seconds = seconds

    def resize(self, slots: int | None) -> None:
        """Another number of slots; if there are more, those who wait get them."""
        self.slots = slots
        while self._lines and (slots is None or self.running < slots):
            self.running += 1
            self.leave()

    def leave(self) -> None:
        """The slot goes to the next in line, if there is one; `running` counts it all the while."""
        if self._lines:
            self._note_pace()
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

    def _note_pace(self) -> None:
        now = time.monotonic()
        # Where nobody waited there was a pause that says nothing of the work.
        self._pause += (min(now - self._left_at, LONGEST_PATIENCE) - self._pause) * LATELY
        self._left_at = now

    async def _wait(self, principal: str, seconds: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(principal, deque()).append(turn)
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                # The turn came in the same moment: somebody else takes it.
                self.leave()
            else:
                self._give_up(principal, turn)
            if isinstance(error, TimeoutError):
                words = f"no slot became free within {seconds:g} s; try again later"
                raise QueueFull(words, retry_after=self.patience()) from None
            raise

    def _give_up(self, principal: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(principal, deque())
        if turn in line:
            self.waiting -= 1
            line.remove(turn)
            if not line:
                del self._lines[principal]


class Slots:
    """The slots that one request holds: one for each of its choices that is running."""

    def __init__(self, admission: Admission, principal: str) -> None:
        self._admission = admission
        self._principal = principal
        self._held = 0

    def take_first(self) -> bool:
        """The same as `first` where a slot is free, and False where one has to wait."""
        if not self._admission.enter_now():
            return False
        self._held += 1
        return True

    async def first(self) -> None:
        await self._admission.enter(self._principal)
        self._held += 1

    async def another(self) -> None:
        await self._admission.enter(self._principal, patient=True)
        self._held += 1

    def give_back(self) -> None:
        """One of them; whoever has none has none to give."""
        if self._held > 0:
            self._held -= 1
            self._admission.leave()

    def close(self) -> None:
        while self._held > 0:
            self.give_back()

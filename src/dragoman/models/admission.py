"""Which request may start: a number of slots, a bounded queue, and fair shares for the principals.

Rules
1. At most `slots` requests run at once; None means no limit.
2. At most `queue` requests wait. One more is refused, with a time after which to try again: about as long as those that
   wait will take, by how fast slots have become free lately. A principal with nothing in a full queue may still wait
   with one request, up to twice the size of the queue.
3. No request waits longer than `seconds`.
4. A free slot goes to the principal that holds the fewest. Of several it goes to the one whose turn is longest ago; of
   the requests of one principal the oldest comes first.
5. The last free slot is kept for a principal that holds none, if another one without a slot was seen in the last
   `COMPANY_SECONDS`: long requests of one principal do not keep others waiting.
6. Every choice of a request takes a slot. Only the first is subject to rules 2 and 3: the others belong to a request
   that has been admitted.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque

from dragoman.core.errors import QueueFull

LATELY = 0.2
"""How much the newest counts."""
LONGEST_PATIENCE = 60.0
COMPANY_SECONDS = 30.0


class Admission:
    def __init__(self, slots: int | None, queue: int, seconds: float) -> None:
        self.slots = slots
        self._queue = queue
        self._seconds = seconds
        self._left_at = time.monotonic()
        self._pause = 0.0
        """Between two slots that became free, lately, in seconds."""
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._held: Counter[str] = Counter()
        """Slots by principal."""
        self._latest = self._previous = ("", -COMPANY_SECONDS)
        """The last two principals, which differ, and when each was seen last."""
        self._timer: asyncio.TimerHandle | None = None
        self.running = 0
        self.waiting = 0

    async def enter(self, principal: str, patient: bool = False) -> None:
        """Return when a slot is granted, which must be given back with `leave`. `patient`: without a time limit."""
        if self.enter_now(principal):
            return
        if not patient and self.waiting >= self._queue and not self._may_exceed_queue(principal):
            words = f"the queue of this model is full ({self._queue} requests wait); try again later"
            raise QueueFull(words, retry_after=self.patience())
        await self._wait(principal, None if patient else self._seconds)

    def patience(self) -> float:
        """Seconds after which it may be worth trying again."""
        return min(LONGEST_PATIENCE, max(1.0, (self.waiting + 1) * self._pause))

    def enter_now(self, principal: str) -> bool:
        """Take a slot if the principal may have one now. A request in the queue that may have it has it already."""
        self._note_seen(principal)
        if principal in self._lines or not self._may_take(principal):
            return False
        self._take(principal)
        return True

    def bound(self, queue: int, seconds: float) -> None:
        """For requests that come from now on."""
        self._queue = queue
        self._seconds = seconds

    def resize(self, slots: int | None) -> None:
        """Change the number of slots; new ones go to the requests that wait."""
        self.slots = slots
        self._grant()

    def leave(self, principal: str) -> None:
        """Give a slot back, which goes to the next request that may have it."""
        self.running -= 1
        self._held[principal] -= 1
        if not self._held[principal]:
            del self._held[principal]
        if self._lines:
            self._note_pace()
            self._grant()

    def _take(self, principal: str) -> None:
        self.running += 1
        self._held[principal] += 1

    def _may_take(self, principal: str) -> bool:
        if self.slots is None:
            return True
        free = self.slots - self.running
        return free > 1 or (free == 1 and (not self._held[principal] or not self._company_seconds(principal)))

    def _may_exceed_queue(self, principal: str) -> bool:
        return principal not in self._lines and self.waiting < 2 * self._queue

    def _note_seen(self, principal: str) -> None:
        if principal != self._latest[0]:
            self._previous = self._latest
        self._latest = (principal, time.monotonic())

    def _company_seconds(self, principal: str) -> float:
        """How much longer the last free slot is kept for others."""
        other, seen = self._previous if principal == self._latest[0] else self._latest
        return 0.0 if self._held[other] else max(0.0, seen + COMPANY_SECONDS - time.monotonic())

    def _grant(self) -> None:
        """Give free slots to requests that wait."""
        while candidates := [principal for principal in self._lines if self._may_take(principal)]:
            # The first of several: their order is that of their turns.
            principal = min(candidates, key=self._held.__getitem__)
            line = self._lines.pop(principal)
            turn = line.popleft()
            if line:
                self._lines[principal] = line
            self.waiting -= 1
            # One that is being cancelled right now has not left the line yet.
            if not turn.done():
                self._take(principal)
                turn.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        """Where a free slot is kept for others, look again when that is over."""
        if self._timer is None and self._lines and self.slots is not None and self.running < self.slots:
            seconds = min(self._company_seconds(principal) for principal in self._lines)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._grant()

    def _note_pace(self) -> None:
        now = time.monotonic()
        # Where nothing waited there was a pause that says nothing of the work.
        self._pause += (min(now - self._left_at, LONGEST_PATIENCE) - self._pause) * LATELY
        self._left_at = now

    async def _wait(self, principal: str, seconds: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(principal, deque()).append(turn)
        self.waiting += 1
        self._set_timer()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                # The turn came in the same moment: another request takes it.
                self.leave(principal)
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
        if not self._admission.enter_now(self._principal):
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
            self._admission.leave(self._principal)

    def close(self) -> None:
        while self._held > 0:
            self.give_back()

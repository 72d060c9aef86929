"""Admits requests to a model: a number of slots, a bounded queue, and fair shares for principals.

Rules
1. At most `slots` requests run at once; None means no limit.
2. At most `queue` requests wait. Further ones are refused with a retry time: the estimated time for the queue to drain.
   A principal with no request in a full queue may still add one, up to twice the size of the queue.
3. No request waits longer than `seconds`.
4. A free slot goes to the principal that holds the fewest; among equals, to the one served least recently. The requests
   of one principal are served in order.
5. The last free slot is reserved for a principal that holds none, if another principal without a slot was seen in the
   last `RESERVE_SECONDS`. So long requests of one principal do not block others.
6. Every choice of a request takes a slot. Rules 2 and 3 apply only to the first one: the request is admitted already.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque

from dragoman.core.errors import QueueFull

PACE_WEIGHT = 0.2
"""Weight of the newest interval in the average."""
MAX_RETRY = 60.0
RESERVE_SECONDS = 30.0


class Admission:
    def __init__(self, slots: int | None, queue: int, seconds: float) -> None:
        self.slots = slots
        self._max_waiting = queue
        self._timeout = seconds
        self._freed_at = time.monotonic()
        self._interval = 0.0
        """Average seconds between two freed slots."""
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._held: Counter[str] = Counter()
        """Slots by principal."""
        self._latest = self._previous = ("", -RESERVE_SECONDS)
        """The last two distinct principals, and when each was seen."""
        self._timer: asyncio.TimerHandle | None = None
        self.running = 0
        self.waiting = 0

    async def enter(self, principal: str, is_admitted: bool = False) -> None:
        """Wait for a slot, to be given back with `leave`. A request that `is_admitted` waits without limits."""
        if self.try_enter(principal):
            return
        if not is_admitted and self.waiting >= self._max_waiting and not self._may_exceed_queue(principal):
            message = f"the queue of this model is full ({self._max_waiting} requests wait); try again later"
            raise QueueFull(message, retry_after=self.retry_after())
        await self._wait(principal, None if is_admitted else self._timeout)

    def retry_after(self) -> float:
        """Estimated seconds until the queue has room."""
        return min(MAX_RETRY, max(1.0, (self.waiting + 1) * self._interval))

    def try_enter(self, principal: str) -> bool:
        """Take a slot if one is free for the principal."""
        if principal != self._latest[0]:
            self._previous = self._latest
        self._latest = principal, time.monotonic()
        if principal in self._queues or not self._may_take(principal):
            return False
        self.running += 1
        self._held[principal] += 1
        return True

    def set_limits(self, queue: int, seconds: float) -> None:
        """Change the limits for future requests."""
        self._max_waiting = queue
        self._timeout = seconds

    def resize(self, slots: int | None) -> None:
        """Change the number of slots; new ones go to waiting requests."""
        self.slots = slots
        self._grant()

    def leave(self, principal: str) -> None:
        """Give a slot back; it goes to the next waiting request."""
        self.running -= 1
        self._held[principal] -= 1
        if not self._held[principal]:
            del self._held[principal]
        if self._queues:
            now = time.monotonic()
            # Capped: an interval without waiting requests does not measure the work.
            self._interval += (min(now - self._freed_at, MAX_RETRY) - self._interval) * PACE_WEIGHT
            self._freed_at = now
            self._grant()

    def _may_take(self, principal: str) -> bool:
        if self.slots is None:
            return True
        free = self.slots - self.running
        return free > 1 or (free == 1 and (not self._held[principal] or not self._reserved_seconds(principal)))

    def _may_exceed_queue(self, principal: str) -> bool:
        return principal not in self._queues and self.waiting < 2 * self._max_waiting

    def _reserved_seconds(self, principal: str) -> float:
        """Return how much longer the last free slot is reserved for others."""
        other, seen = self._previous if principal == self._latest[0] else self._latest
        return 0.0 if self._held[other] else max(0.0, seen + RESERVE_SECONDS - time.monotonic())

    def _grant(self) -> None:
        """Give free slots to waiting requests."""
        while candidates := [principal for principal in self._queues if self._may_take(principal)]:
            # `min` takes the first of equals; the queues are ordered by their last turn.
            principal = min(candidates, key=self._held.__getitem__)
            queue = self._queues.pop(principal)
            turn = queue.popleft()
            if queue:
                self._queues[principal] = queue
            self.waiting -= 1
            # A request that is being cancelled may still be in the queue.
            if not turn.done():
                self.running += 1
                self._held[principal] += 1
                turn.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        """Grant a reserved slot when its reservation ends."""
        if self._timer is None and self._queues and self.slots is not None and self.running < self.slots:
            seconds = min(self._reserved_seconds(principal) for principal in self._queues)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._fire_timer)

    def _fire_timer(self) -> None:
        self._timer = None
        self._grant()

    async def _wait(self, principal: str, seconds: float | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(principal, deque()).append(turn)
        self.waiting += 1
        self._set_timer()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                # The slot was granted at the same moment: pass it on.
                self.leave(principal)
            else:
                self._remove_waiting(principal, turn)
            if isinstance(error, TimeoutError):
                message = f"no slot became free within {seconds:g} s; try again later"
                raise QueueFull(message, retry_after=self.retry_after()) from None
            raise

    def _remove_waiting(self, principal: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(principal, deque())
        if turn in queue:
            self.waiting -= 1
            queue.remove(turn)
            if not queue:
                del self._queues[principal]


class Slots:
    """The slots of one request: one for each running choice."""

    def __init__(self, admission: Admission, principal: str) -> None:
        self._admission = admission
        self._principal = principal
        self._held = 0

    def try_acquire_first(self) -> bool:
        """Take the first slot if one is free; otherwise return False."""
        if not self._admission.try_enter(self._principal):
            return False
        self._held += 1
        return True

    async def acquire_first(self) -> None:
        await self._admission.enter(self._principal)
        self._held += 1

    async def acquire(self) -> None:
        await self._admission.enter(self._principal, is_admitted=True)
        self._held += 1

    def release(self) -> None:
        """Release one slot, if the request holds any."""
        if self._held > 0:
            self._held -= 1
            self._admission.leave(self._principal)

    def close(self) -> None:
        for _ in range(self._held):
            self._admission.leave(self._principal)
        self._held = 0

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

Batch requests use the slots that interactive requests leave free. Rules 1, 4 and 6 apply to them too, and:

7. They do not count for interactive requests, except in rule 1.
8. A batch request gets a slot if no interactive request waits, and if it leaves enough slots free for interactive
   ones: as many as these needed at once in the last `PEAK_SECONDS`, less those that they hold; and at least one, if
   there are several.
9. If batch requests wait, and none has held a slot for `STARVED_SECONDS`, one of them gets the next free slot, before
   interactive requests. So they never starve.
10. At most `queue` of them wait, each up to `BATCH_SECONDS`, or up to `seconds` if that is longer.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection

from dragoman.core.errors import QueueFull, ResourceUnavailable
from dragoman.core.types import Priority

PACE_WEIGHT = 0.2
"""Weight of the newest interval in the average."""
MAX_RETRY = 60.0
RESERVE_SECONDS = 30.0
PEAK_SECONDS = 30.0
"""At least; up to twice as long."""
STARVED_SECONDS = 60.0
BATCH_SECONDS = 300.0
"""Less than the ten minutes after which OpenAI's SDKs give up, so that the caller gets the error."""


class SlotUse:
    """The requests of one priority that hold slots and that wait, by principal."""

    def __init__(self) -> None:
        self.queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Ordered by their last turn."""
        self.held: Counter[str] = Counter()
        self.running = 0
        self.waiting = 0

    def hold(self, principal: str) -> None:
        self.running += 1
        self.held[principal] += 1

    def release(self, principal: str) -> None:
        self.running -= 1
        self.held[principal] -= 1
        if not self.held[principal]:
            del self.held[principal]

    def add(self, principal: str) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queues.setdefault(principal, deque()).append(turn)
        self.waiting += 1
        return turn

    def remove(self, principal: str, turn: asyncio.Future[None]) -> None:
        queue = self.queues.get(principal, deque())
        if turn in queue:
            self.waiting -= 1
            queue.remove(turn)
            if not queue:
                del self.queues[principal]

    def grant(self, candidates: Collection[str]) -> None:
        """Give a slot to the next request of one of these principals."""
        # `min` takes the first of equals.
        principal = min(candidates, key=self.held.__getitem__)
        queue = self.queues.pop(principal)
        turn = queue.popleft()
        if queue:
            self.queues[principal] = queue
        self.waiting -= 1
        # A request that is being cancelled may still be in the queue.
        if not turn.done():
            self.hold(principal)
            turn.set_result(None)


class RecentPeak:
    """The highest level of the last `PEAK_SECONDS`, or of up to twice as long."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._current = self._previous = 0

    def note(self, level: int, now: float) -> None:
        self._forget(now)
        self._current = max(self._current, level)

    def highest(self, now: float) -> int:
        self._forget(now)
        return max(self._current, self._previous)

    def change_in(self, now: float) -> float:
        """Seconds until the highest level may fall."""
        self._forget(now)
        return self._began + PEAK_SECONDS - now

    def _forget(self, now: float) -> None:
        periods = int((now - self._began) / PEAK_SECONDS)
        if periods:
            self._previous = self._current if periods == 1 else 0
            self._current = 0
            self._began += periods * PEAK_SECONDS


class Admission:
    def __init__(
        self, slots: int | None, queue: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.slots = slots
        self._max_waiting = queue
        self._timeout = seconds
        self._clock = clock
        self._freed_at = clock()
        self._interval = 0.0
        """Average seconds between two freed slots."""
        self._interactive, self._batch = SlotUse(), SlotUse()
        self._peak = RecentPeak(clock())
        self._batch_ran_at = clock()
        """When a batch request last held a slot, or none waited."""
        self._latest = self._previous = ("", -RESERVE_SECONDS)
        """The last two distinct principals of interactive requests, and when each was seen."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return self._interactive.running + self._batch.running

    @property
    def waiting(self) -> int:
        return self._interactive.waiting + self._batch.waiting

    async def enter(self, principal: str, is_admitted: bool = False, priority: Priority = "interactive") -> None:
        """Wait for a slot, to be given back with `leave`. A request that `is_admitted` waits without limits."""
        if self.try_enter(principal, priority):
            return
        use = self._use_of(priority)
        if not is_admitted and use.waiting >= self._max_waiting and not self._may_exceed_queue(use, principal):
            message = f"the queue of this model is full ({self._max_waiting} requests wait); try again later"
            raise self._refusal(message, priority)
        await self._wait(principal, priority, None if is_admitted else self._wait_limit(priority))

    def retry_after(self) -> float:
        """Estimated seconds until the queue has room."""
        return min(MAX_RETRY, max(1.0, (self.waiting + 1) * self._interval))

    def try_enter(self, principal: str, priority: Priority = "interactive") -> bool:
        """Take a slot if one is free for the principal."""
        use = self._use_of(priority)
        if priority == "batch":
            is_free = not use.queues and self._has_batch_slot()
        else:
            now = self._clock()
            self._peak.note(use.running + use.waiting + 1, now)
            if principal != self._latest[0]:
                self._previous = self._latest
            self._latest = principal, now
            is_free = principal not in use.queues and self._may_take(principal)
        if is_free:
            use.hold(principal)
        return is_free

    def set_limits(self, queue: int, seconds: float) -> None:
        """Change the limits for future requests."""
        self._max_waiting = queue
        self._timeout = seconds

    def resize(self, slots: int | None) -> None:
        """Change the number of slots; new ones go to waiting requests."""
        self.slots = slots
        self._grant()

    def leave(self, principal: str, priority: Priority = "interactive") -> None:
        """Give a slot back; it goes to the next waiting request."""
        now = self._clock()
        self._use_of(priority).release(principal)
        if priority == "batch":
            self._batch_ran_at = now
        if self.waiting:
            # Capped: an interval without waiting requests does not measure the work.
            self._interval += (min(now - self._freed_at, MAX_RETRY) - self._interval) * PACE_WEIGHT
            self._freed_at = now
            self._grant()

    def _use_of(self, priority: Priority) -> SlotUse:
        return self._batch if priority == "batch" else self._interactive

    def _wait_limit(self, priority: Priority) -> float:
        return max(self._timeout, BATCH_SECONDS) if priority == "batch" else self._timeout

    def _refusal(self, message: str, priority: Priority) -> QueueFull | ResourceUnavailable:
        kind = ResourceUnavailable if priority == "batch" else QueueFull
        return kind(message, retry_after=self.retry_after())

    def _may_take(self, principal: str) -> bool:
        if self.slots is None:
            return True
        free = self.slots - self.running
        return free > 1 or (
            free == 1 and (not self._interactive.held[principal] or not self._reserved_seconds(principal))
        )

    def _has_batch_slot(self) -> bool:
        """Whether a batch request may take a slot."""
        if self.slots is None:
            return True
        now, use = self._clock(), self._interactive
        if self.slots <= self.running:
            return False
        if self._starved_in(now) <= 0:
            return True
        needed = max(self._peak.highest(now) - use.running, int(self.slots > 1))
        return not use.queues and self.slots - self.running > needed

    def _starved_in(self, now: float) -> float:
        """Seconds until a waiting batch request goes before interactive ones."""
        if not self._batch.queues or self._batch.running:
            return STARVED_SECONDS
        return self._batch_ran_at + STARVED_SECONDS - now

    def _may_exceed_queue(self, use: SlotUse, principal: str) -> bool:
        return principal not in use.queues and use.waiting < 2 * self._max_waiting

    def _reserved_seconds(self, principal: str) -> float:
        """Return how much longer the last free slot is reserved for others."""
        other, seen = self._previous if principal == self._latest[0] else self._latest
        return 0.0 if self._interactive.held[other] else max(0.0, seen + RESERVE_SECONDS - self._clock())

    def _grant(self) -> None:
        """Give free slots to waiting requests."""
        interactive, batch = self._interactive, self._batch
        while True:
            is_starved = self._starved_in(self._clock()) <= 0
            if batch.queues and (is_starved or not interactive.queues) and self._has_batch_slot():
                batch.grant(batch.queues)
            elif candidates := [principal for principal in interactive.queues if self._may_take(principal)]:
                interactive.grant(candidates)
            else:
                break
        self._set_timer()

    def _set_timer(self) -> None:
        """Grant a slot when its reservation ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.waiting or self.slots is None or self.running >= self.slots:
            return
        now = self._clock()
        waits = [self._reserved_seconds(principal) for principal in self._interactive.queues]
        if self._batch.queues:
            waits += [self._peak.change_in(now), max(0.0, self._starved_in(now))]
        self._timer = asyncio.get_running_loop().call_later(min(waits), self._fire_timer)

    def _fire_timer(self) -> None:
        self._timer = None
        self._grant()

    async def _wait(self, principal: str, priority: Priority, seconds: float | None) -> None:
        use = self._use_of(priority)
        if priority == "batch" and not use.queues and not use.running:
            self._batch_ran_at = self._clock()
        turn = use.add(principal)
        self._set_timer()
        try:
            async with asyncio.timeout(seconds):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                # The slot was granted at the same moment: pass it on.
                self.leave(principal, priority)
            else:
                use.remove(principal, turn)
            if isinstance(error, TimeoutError):
                message = f"no slot became free within {seconds:g} s; try again later"
                raise self._refusal(message, priority) from None
            raise


class Slots:
    """The slots of one request: one for each running choice. If it `is_admitted`, it waits without limits."""

    def __init__(
        self,
        admission: Admission,
        principal: str,
        priority: Priority = "interactive",
        is_admitted: bool = False,
    ) -> None:
        self._admission = admission
        self._principal = principal
        self._priority: Priority = priority
        self._is_admitted = is_admitted
        self._held = 0

    def try_acquire_first(self) -> bool:
        """Take the first slot if one is free; otherwise return False."""
        if not self._admission.try_enter(self._principal, self._priority):
            return False
        self._held += 1
        return True

    async def acquire_first(self) -> None:
        await self._admission.enter(self._principal, self._is_admitted, self._priority)
        self._held += 1

    async def acquire(self) -> None:
        await self._admission.enter(self._principal, is_admitted=True, priority=self._priority)
        self._held += 1

    def release(self) -> None:
        """Release one slot, if the request holds any."""
        if self._held > 0:
            self._held -= 1
            self._admission.leave(self._principal, self._priority)

    def close(self) -> None:
        for _ in range(self._held):
            self._admission.leave(self._principal, self._priority)
        self._held = 0

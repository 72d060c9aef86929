"""What one key may still do: at once, and in a minute.

Rules
1. In any sixty seconds no more requests are let in, and no more tokens reserved, than the limit says.
2. Tokens are reserved before a request runs, by an estimate, and settled when it has ended, however it ended: by the
   true count, or by what was heard where nobody counted. What was too much goes back; what was too little counts from
   then on. Where nobody is left who heard anything, what was reserved counts as spent.
3. An estimate above the whole limit reserves the whole limit: such a request runs when nothing else has, not never.
4. Nothing here waits, and nothing is done in two steps: on one event loop no race can exceed a limit.
5. Time is monotonic. A clock that is set changes nothing.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from dragoman.config.sections import KeyLimits
from dragoman.core.errors import RateLimited, TokensLimited
from dragoman.core.rate_limits import Rate

MINUTE = 60
Clock = Callable[[], float]


class _Second:
    """What was taken in one second: all of it is free again when the last of it is a minute old."""

    __slots__ = ("at", "ends", "taken")

    def __init__(self, at: int) -> None:
        self.at = at
        self.taken = 0
        self.ends = math.inf


class Window:
    """What was taken in the last minute, second by second: as many numbers as there are seconds, however much it is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seconds: deque[_Second] = deque()
        """The oldest first."""
        self._taken = 0

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0].ends <= now:
            self._taken -= self._seconds.popleft().taken

    def left(self, now: float) -> int:
        self._forget(now)
        return max(0, self.limit - self._taken)

    def take(self, amount: int, now: float) -> None:
        second = math.floor(now)
        self._taken += amount
        if not self._seconds or self._seconds[-1].at != second:
            self._seconds.append(_Second(second))
        self._seconds[-1].taken += amount
        self._seconds[-1].ends = now + MINUTE

    def give_back(self, amount: int, taken_at: float) -> None:
        """Of what was taken then; nothing where it has been forgotten."""
        second = math.floor(taken_at)
        for entry in reversed(self._seconds):
            if entry.at == second:
                entry.taken -= amount
                self._taken -= amount
                return

    def wait(self, amount: int, now: float) -> float:
        """Seconds until so much is free."""
        self._forget(now)
        missing = self._taken + amount - self.limit
        if missing <= 0:
            return 0.0
        for second in self._seconds:
            missing -= second.taken
            if missing <= 0:
                return _until(second.ends, now)
        return float(MINUTE)

    def rate(self, what: str, now: float) -> Rate:
        left = self.left(now)
        reset = self._seconds[-1].ends - now if self._seconds else 0.0
        return Rate(what, self.limit, left, max(0.0, reset))


def _until(then: float, now: float) -> float:
    """So long that it is not still a rounding error too early."""
    wait = then - now
    while now + wait < then:
        wait = math.nextafter(wait, math.inf)
    return wait


class Quota:
    """One key's."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.limits = limits
        self.running = 0
        self.concurrency = limits.concurrency
        self.requests = _window(limits.requests_per_minute)
        self.tokens = _window(limits.tokens_per_minute)

    def change(self, limits: KeyLimits) -> None:
        """Other limits from now on; what was taken stays taken."""
        self.limits = limits
        self.concurrency = limits.concurrency
        self.requests = _changed(self.requests, limits.requests_per_minute)
        self.tokens = _changed(self.tokens, limits.tokens_per_minute)

    @property
    def is_idle(self) -> bool:
        """Whether nobody would notice if it were made anew."""
        now = self.clock()
        windows = [window for window in (self.requests, self.tokens) if window is not None]
        return not self.running and all(window.left(now) == window.limit for window in windows)


def _window(limit: int | None) -> Window | None:
    return None if limit is None else Window(limit)


def _changed(window: Window | None, limit: int | None) -> Window | None:
    if window is None or limit is None:
        return _window(limit)
    window.limit = limit
    return window


class Holding(Protocol):
    """What is told of a lease, wherever its quota is."""

    def settle(self, tokens: int) -> None: ...

    def rates(self) -> list[Rate]: ...


class Lease:
    """What one request has taken of a quota, from its first moment to its last. `limited` counts refusals, by the kind
    of limit."""

    def __init__(self, quota: Quota, limited: Counter[str]) -> None:
        self._quota = quota
        self._limited = limited
        self._inside = False
        self._reserved = 0
        self._reserved_at = 0.0

    def enter(self) -> None:
        quota, now = self._quota, self._quota.clock()
        if quota.concurrency is not None and quota.running >= quota.concurrency:
            words = f"this key may have {quota.concurrency} requests at a time; wait until one has ended"
            raise self._counted(RateLimited(words, retry_after=1))
        window = quota.requests
        if window is not None:
            if window.left(now) < 1:
                wait = window.wait(1, now)
                raise self._counted(RateLimited(_words("requests", window.limit, 1, wait), retry_after=wait))
            window.take(1, now)
        quota.running += 1
        self._inside = True

    def reserve(self, estimate: int) -> None:
        window, now = self._quota.tokens, self._quota.clock()
        if window is None:
            return
        wanted = min(max(1, estimate), window.limit)
        if window.left(now) < wanted:
            wait = window.wait(wanted, now)
            raise self._counted(TokensLimited(_words("tokens", window.limit, wanted, wait), retry_after=wait))
        window.take(wanted, now)
        self._reserved, self._reserved_at = wanted, now

    def _counted(self, error: RateLimited) -> RateLimited:
        self._limited[error.type] += 1
        return error

    def settle(self, tokens: int) -> None:
        """The request has ended, and so many tokens is what it came to."""
        if not self._inside:
            return
        self._inside = False
        self._quota.running -= 1
        window = self._quota.tokens
        if window is None:
            return
        surplus = tokens - self._reserved
        if surplus > 0:
            window.take(surplus, self._quota.clock())
        elif surplus < 0:
            window.give_back(-surplus, self._reserved_at)

    def abandon(self) -> None:
        """The request has ended, and nobody knows what it came to."""
        self.settle(self._reserved)

    def rates(self) -> list[Rate]:
        now, quota = self._quota.clock(), self._quota
        kinds = (("requests", quota.requests), ("tokens", quota.tokens))
        return [window.rate(what, now) for what, window in kinds if window is not None]


def _words(what: str, limit: int, wanted: int, wait: float) -> str:
    asked = "" if what == "requests" else f", and this request may need {wanted}"
    return f"rate limit reached: this key may have {limit} {what} per minute{asked}; try again in {math.ceil(wait)} s"

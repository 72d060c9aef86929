"""Quotas of keys: concurrent requests, requests per minute, tokens per minute.

Rules
1. In any sixty seconds, at most the limit of requests enters, and at most the limit of tokens is reserved.
2. Tokens are reserved by an estimate before a request runs, and settled when it ends: by the true count, or by the
   received text if the engine reports no count. A surplus is returned; a shortfall counts from then on. If the result
   is unknown, the reservation counts as used. Estimates are rather too high than too low.
3. An estimate above the limit reserves the whole limit. Such a request runs when the window is empty.
4. Every operation is a single synchronous step, so no race on the event loop can exceed a limit.
5. Time is monotonic.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from dragoman.config.sections import KeyLimits
from dragoman.core.errors import RateLimited, TokensLimited
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.request import GenerationRequest

MINUTE = 60
BYTES_PER_TOKEN = 3
IMAGE_TOKENS = 1000
REPLY_TOKENS = 1024
"""For a reply without a limit."""
Clock = Callable[[], float]


class _Second:
    """The amount taken in one second. It expires a minute after the last of it was taken."""

    __slots__ = ("at", "expires", "taken")

    def __init__(self, at: int) -> None:
        self.at = at
        self.taken = 0
        self.expires = math.inf


class RateWindow:
    """The amount taken in the last minute, stored per second."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._seconds: deque[_Second] = deque()
        """Oldest first."""
        self._taken = 0

    def _expire(self, now: float) -> None:
        while self._seconds and self._seconds[0].expires <= now:
            self._taken -= self._seconds.popleft().taken

    def left(self, now: float) -> int:
        self._expire(now)
        return max(0, self.limit - self._taken)

    def take(self, amount: int, now: float) -> None:
        second = math.floor(now)
        self._taken += amount
        if not self._seconds or self._seconds[-1].at != second:
            self._seconds.append(_Second(second))
        self._seconds[-1].taken += amount
        self._seconds[-1].expires = now + MINUTE

    def release(self, amount: int, taken_at: float) -> None:
        """Return a part of what was taken at that time, if it has not expired."""
        second = math.floor(taken_at)
        for entry in reversed(self._seconds):
            if entry.at == second:
                entry.taken -= amount
                self._taken -= amount
                return

    def wait(self, amount: int, now: float) -> float:
        """Seconds until this amount is available."""
        self._expire(now)
        missing = self._taken + amount - self.limit
        if missing <= 0:
            return 0.0
        for second in self._seconds:
            missing -= second.taken
            if missing <= 0:
                return _until(second.expires, now)
        return float(MINUTE)

    def rate(self, what: str, now: float) -> RateLimitState:
        left = self.left(now)
        reset = self._seconds[-1].expires - now if self._seconds else 0.0
        return RateLimitState(what, self.limit, left, max(0.0, reset))


def _until(then: float, now: float) -> float:
    """The difference, increased so that `now + wait` is not below `then` by a rounding error."""
    wait = then - now
    while now + wait < then:
        wait = math.nextafter(wait, math.inf)
    return wait


class Quota:
    """The quota of one key."""

    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.limits = limits
        self.running = 0
        self.concurrency = limits.concurrency
        self.requests = _window(limits.requests_per_minute)
        self.tokens = _window(limits.tokens_per_minute)

    def change(self, limits: KeyLimits) -> None:
        """Apply new limits. What was taken stays taken."""
        self.limits = limits
        self.concurrency = limits.concurrency
        self.requests = _with_limit(self.requests, limits.requests_per_minute)
        self.tokens = _with_limit(self.tokens, limits.tokens_per_minute)

    @property
    def is_idle(self) -> bool:
        """Whether it is the same as a new quota."""
        now = self.clock()
        windows = [window for window in (self.requests, self.tokens) if window is not None]
        return not self.running and all(window.left(now) == window.limit for window in windows)


def _window(limit: int | None) -> RateWindow | None:
    return None if limit is None else RateWindow(limit)


def _with_limit(window: RateWindow | None, limit: int | None) -> RateWindow | None:
    if window is None or limit is None:
        return _window(limit)
    window.limit = limit
    return window


class QuotaUsage(Protocol):
    """What one request uses of a quota, in this process or in the parent."""

    def settle(self, tokens: int) -> None: ...

    def rates(self) -> list[RateLimitState]: ...


class QuotaLease:
    """What one request uses of a quota. `limited` counts refusals by kind of limit."""

    def __init__(self, quota: Quota, limited: Counter[str]) -> None:
        self._quota = quota
        self._limited = limited
        self._is_entered = False
        self._reserved = 0
        self._reserved_at = 0.0

    def enter(self) -> None:
        quota, now = self._quota, self._quota.clock()
        if quota.concurrency is not None and quota.running >= quota.concurrency:
            message = f"this key may have {quota.concurrency} requests at a time; wait until one has ended"
            raise self._count_refusal(RateLimited(message, retry_after=1))
        window = quota.requests
        if window is not None:
            if window.left(now) < 1:
                wait = window.wait(1, now)
                raise self._count_refusal(RateLimited(_message("requests", window.limit, 1, wait), retry_after=wait))
            window.take(1, now)
        quota.running += 1
        self._is_entered = True

    def reserve(self, estimate: int) -> None:
        window, now = self._quota.tokens, self._quota.clock()
        if window is None:
            return
        needed = min(max(1, estimate), window.limit)
        if window.left(now) < needed:
            wait = window.wait(needed, now)
            raise self._count_refusal(TokensLimited(_message("tokens", window.limit, needed, wait), retry_after=wait))
        window.take(needed, now)
        self._reserved, self._reserved_at = needed, now

    def _count_refusal(self, error: RateLimited) -> RateLimited:
        self._limited[error.type] += 1
        return error

    def settle(self, tokens: int) -> None:
        """Settle the quota when the request has ended, with the tokens that it used."""
        if not self._is_entered:
            return
        self._is_entered = False
        self._quota.running -= 1
        window = self._quota.tokens
        if window is None:
            return
        surplus = tokens - self._reserved
        if surplus > 0:
            window.take(surplus, self._quota.clock())
        elif surplus < 0:
            window.release(-surplus, self._reserved_at)

    def abandon(self) -> None:
        """Settle the quota when the request has ended with an unknown number of tokens."""
        self.settle(self._reserved)

    def rates(self) -> list[RateLimitState]:
        now, quota = self._quota.clock(), self._quota
        kinds = (("requests", quota.requests), ("tokens", quota.tokens))
        return [window.rate(what, now) for what, window in kinds if window is not None]


def _message(what: str, limit: int, needed: int, wait: float) -> str:
    need = "" if what == "requests" else f", and this request may need {needed}"
    return f"rate limit reached: this key may have {limit} {what} per minute{need}; try again in {math.ceil(wait)} s"


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a request may use. `reply` is the request's limit for each of its `choices`, if it has one."""

    prompt: int
    choices: int
    reply: int | None

    def total(self, default: int | None) -> int:
        """`default` is the model's limit for a reply."""
        reply = default if self.reply is None else self.reply
        return self.prompt + (REPLY_TOKENS if reply is None else reply) * self.choices


def estimate_tokens(request: GenerationRequest, weight: int) -> Estimate:
    """`weight` is the size of the body and of the stored items that it refers to."""
    choices = max(request.choices, request.best_of) * max(1, len(request.prompts))
    return Estimate(estimate_prompt_tokens(request, weight), choices, request.max_tokens)


def estimate_prompt_tokens(request: GenerationRequest, weight: int) -> int:
    images = [image for message in request.messages for image in message.images]
    text = weight - sum(len(image.data) * 4 // 3 for image in images if image.data is not None)
    return estimate_text_tokens(max(0, text)) + IMAGE_TOKENS * len(images)


def estimate_text_tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)

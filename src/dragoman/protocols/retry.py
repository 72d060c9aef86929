"""Decides whether and when to retry a request.

Rules
1. A request is not retried after the first byte of a response body has been read.
2. A request is retried if it cannot have run: the connection failed, the server rejected it (429, 529), or the server
   sent 503 with Retry-After. An idempotent request (models, counts, embeddings) is also retried after a lost
   connection, a timeout and the TRANSIENT statuses.
3. The header `x-should-retry` overrides rule 2. An exhausted quota is never retried.
4. `retry-after-ms` and `Retry-After`, in seconds or as a date, set the delay; above MAX_RETRY_AFTER there is no retry.
   Without them the delay doubles with each attempt, with a jitter of 25 %.
"""

import email.utils
import math
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Literal

import msgspec

FIRST_DELAY = 0.5
MAX_DELAY = 8.0
MAX_RETRY_AFTER = 60.0
REJECTED = frozenset({429, 529})
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

ConnectionFailure = Literal["unreached", "lost"]
"""unreached: no connection was made; lost: it ended before a response arrived."""


class ErrorResponse(msgspec.Struct, frozen=True):
    """A response with an error status. Header names are in lower case."""

    status: int
    headers: Mapping[str, str] = {}
    is_final: bool = False
    """Whether a retry cannot succeed."""


class Retries(msgspec.Struct, frozen=True):
    """A retry policy. `most` is the maximum number of retries; `chance` returns random numbers between 0 and 1."""

    most: int = 2
    first_seconds: float = FIRST_DELAY
    chance: Callable[[], float] = random.random

    def delay(self, failure: ConnectionFailure | ErrorResponse, attempt: int, is_idempotent: bool) -> float | None:
        """Return the seconds until the next attempt, or None for no retry. `attempt` counts from 1."""
        if attempt > self.most or not _may_retry(failure, is_idempotent):
            return None
        requested = retry_after(failure.headers) if isinstance(failure, ErrorResponse) else None
        if requested is not None:
            return requested if requested <= MAX_RETRY_AFTER else None
        doubled: float = self.first_seconds * 2 ** (attempt - 1)
        return min(doubled, MAX_DELAY) * (0.75 + 0.5 * self.chance())


def _may_retry(failure: ConnectionFailure | ErrorResponse, is_idempotent: bool) -> bool:
    if not isinstance(failure, ErrorResponse):
        return failure == "unreached" or is_idempotent
    if failure.is_final:
        return False
    should_retry = failure.headers.get("x-should-retry")
    if should_retry in ("true", "false"):
        return should_retry == "true"
    if is_idempotent:
        return failure.status in TRANSIENT
    return failure.status in REJECTED or (failure.status == 503 and retry_after(failure.headers) is not None)


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Return the delay that the server requests, in seconds."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        seconds = _number(headers.get(name))
        if seconds is not None:
            return max(0.0, seconds * unit)
    try:
        date = email.utils.parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now())


def _number(text: str | None) -> float | None:
    try:
        seconds = float(text) if text is not None else None
    except ValueError:
        return None
    return seconds if seconds is not None and math.isfinite(seconds) else None

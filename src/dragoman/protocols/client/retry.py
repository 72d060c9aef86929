"""Whether to ask again, and when.

Rules
1. Nobody asks again once the first byte of an answer's body has been read.
2. A request may be repeated when it cannot have run: nobody took the connection, the server sent it back (429, 529), or
   it said when to come again (503 with Retry-After). Where a second run does no harm (`harmless`: lists, counts,
   vectors), also after a lost connection, a time-out and what may be over soon (PASSING).
3. `x-should-retry`, where a server sends it, wins over that; what is used up (a quota) is never worth another try.
4. The server's `retry-after-ms` and `Retry-After`, in seconds or as a date, are obeyed; who wants us to wait longer
   than `MOST_SECONDS` is not asked again. Without them the wait doubles, give or take a quarter.
"""

import email.utils
import math
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Literal

import msgspec

FIRST_SECONDS = 0.5
LONGEST_SECONDS = 8.0
MOST_SECONDS = 60.0
NOT_RUN = frozenset({429, 529})
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})

Trouble = Literal["unreached", "lost"]
"""The connection was not made; or it was, and no answer came."""


class Refused(msgspec.Struct, frozen=True):
    """An answer that is an error. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str] = {}
    is_final: bool = False
    """Whether waiting cannot help."""


class Retries(msgspec.Struct, frozen=True):
    """`most` is how often a request is repeated."""

    most: int = 2
    first_seconds: float = FIRST_SECONDS
    chance: Callable[[], float] = random.random

    def wait(self, trouble: Trouble | Refused, attempt: int, harmless: bool) -> float | None:
        """Seconds until the next attempt; None: there is none. `attempt` counts those made, from 1."""
        if attempt > self.most or not _may_repeat(trouble, harmless):
            return None
        told = retry_after(trouble.headers) if isinstance(trouble, Refused) else None
        if told is not None:
            return told if told <= MOST_SECONDS else None
        doubled: float = self.first_seconds * 2 ** (attempt - 1)
        return min(doubled, LONGEST_SECONDS) * (0.75 + 0.5 * self.chance())


def _may_repeat(trouble: Trouble | Refused, harmless: bool) -> bool:
    if not isinstance(trouble, Refused):
        return trouble == "unreached" or harmless
    if trouble.is_final:
        return False
    told = trouble.headers.get("x-should-retry")
    if told in ("true", "false"):
        return told == "true"
    if harmless:
        return trouble.status in PASSING
    return trouble.status in NOT_RUN or (trouble.status == 503 and retry_after(trouble.headers) is not None)


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Seconds that the server wants us to wait."""
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

"""How the limits of a key stand, as headers of a response.

OpenAI     x-ratelimit-{limit,remaining,reset}-{requests,tokens}       a reset is a duration: 6m0s, 1.5s, 20ms
Anthropic  anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}   a reset is a time: 2026-01-31T12:00:00Z
"""

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from dragoman.core.rate_limits import Rate

Headers = list[tuple[bytes, bytes]]


def openai_headers(rates: Sequence[Rate]) -> Headers:
    headers = []
    for rate in rates:
        values = (("limit", str(rate.limit)), ("remaining", str(rate.remaining)), ("reset", duration(rate.reset)))
        headers += [(f"x-ratelimit-{name}-{rate.what}".encode(), value.encode()) for name, value in values]
    return headers


def anthropic_headers(rates: Sequence[Rate], clock: Callable[[], float] = time.time) -> Headers:
    headers = []
    for rate in rates:
        reset = datetime.fromtimestamp(math.ceil(clock() + rate.reset), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        values = (("limit", str(rate.limit)), ("remaining", str(rate.remaining)), ("reset", reset))
        headers += [(f"anthropic-ratelimit-{rate.what}-{name}".encode(), value.encode()) for name, value in values]
    return headers


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"

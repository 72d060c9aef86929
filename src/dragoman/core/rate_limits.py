"""The state of a rate limit, as response headers report it."""

import msgspec


class RateLimitState(msgspec.Struct, frozen=True):
    """`reset` is the number of seconds until the whole limit is available again."""

    what: str
    limit: int
    remaining: int
    reset: float

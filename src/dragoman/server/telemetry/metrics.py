"""Counters and histograms of a run, cheap to add to: plain numbers in lists that exist from the beginning.

Rules
1. A model here is one that is served. Names that callers made up, paths and keys never become labels, so that there
   are never more series than models times statuses.
2. What costs something is done when somebody asks (`exposition`).
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from dragoman.server.telemetry.record import CLIENT_LEFT, RequestRecord

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RECENT_SECONDS = 60
TOKENS = ("prompt", "completion", "cached", "reasoning", "unfinished")
TOGETHER = 64
"""Requests that have ended and may wait to be counted; whoever asks for the figures has them all."""


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bound what is not above it nor within the one before; last, what is above all of them."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_shared(self, value: float, parts: int) -> None:
        """So many equal parts of a value."""
        self.counts[bisect_left(self.bounds, value / parts)] += parts
        self.total += value

    def add_all(self, counts: Sequence[int], total: float) -> None:
        """What another one with the same bounds has counted."""
        self.counts = [own + other for own, other in zip(self.counts, counts, strict=True)]
        self.total += total

    def taken(self) -> tuple[tuple[int, ...], float] | None:
        """What it has counted, for another one; then it begins anew. None where that is nothing."""
        if not any(self.counts):
            return None
        taken = tuple(self.counts), self.total
        # In place: somebody may be holding on to the list.
        self.counts[:] = [0] * len(self.counts)
        self.total = 0.0
        return taken

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """About where it lies, as far as the buckets tell; None where nothing was added."""
        wanted = share * self.count
        so_far, below = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and so_far + count >= wanted:
                return below + (bound - below) * (wanted - so_far) / count
            so_far, below = so_far + count, bound
        return self.bounds[-1] if self.count else None


class Recent:
    """How much there was in the last minute, second by second."""

    def __init__(self) -> None:
        self._amounts = [0] * RECENT_SECONDS
        self._begun = self._last = int(time.monotonic())

    def add(self, amount: int) -> None:
        now = int(time.monotonic())
        if now != self._last:
            self._forget(now)
        self._amounts[now % RECENT_SECONDS] += amount

    def _forget(self, now: int) -> None:
        for second in range(max(self._last + 1, now - RECENT_SECONDS + 1), now + 1):
            self._amounts[second % RECENT_SECONDS] = 0
        self._last = now

    def per_second(self) -> float:
        now = int(time.monotonic())
        self._forget(now)
        return sum(self._amounts) / min(RECENT_SECONDS, max(1, now - self._begun))


class ModelMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By scope and status."""
        self.errors: Counter[str] = Counter()
        """By code, those in the middle of a stream too."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.unfinished_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.gaps = Histogram(GAPS)
        self.queue = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.recent = Recent()

    def add(self, record: RequestRecord) -> None:
        self.requests[record.scope or "other", record.status] += 1
        self.duration.add(record.duration_us / 1e6)
        if record.queue_us is not None:
            self.queue.add(record.queue_us / 1e6)
        if record.first_token_us is not None:
            self.first_token.add(record.first_token_us / 1e6)
        if record.error is not None:
            self.errors[record.error] += 1
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens
        self.cached_tokens += record.cached_tokens
        self.reasoning_tokens += record.reasoning_tokens
        self.unfinished_tokens += record.unfinished_tokens
        self.recent.add(record.completion_tokens)


class Metrics:
    def __init__(self) -> None:
        self.began = time.time()
        self._models: dict[str, ModelMetrics] = {}
        self._ended: list[RequestRecord] = []
        self._others = ModelMetrics()
        self.limited: Counter[str] = Counter()
        """Requests that the limits of a key kept out, by kind."""

    def of(self, model: str) -> ModelMetrics:
        """Of a model that is served, and of no other."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics()
        return found

    def add(self, record: RequestRecord) -> None:
        """Many together cost a fraction of what they cost one by one, between everything else that a request takes."""
        self._ended.append(record)
        if len(self._ended) >= TOGETHER:
            self._count()

    def _count(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            (self._others if record.model is None else self.of(record.model)).add(record)

    @property
    def models(self) -> dict[str, ModelMetrics]:
        self._count()
        return self._models

    @property
    def others(self) -> ModelMetrics:
        """Requests that concern no model, or none that there is."""
        self._count()
        return self._others

    def totals(self) -> dict[str, int]:
        everything = [*self.models.values(), self.others]
        left = sum(count for one in everything for (_, status), count in one.requests.items() if status == CLIENT_LEFT)
        return {
            "requests": sum(one.requests.total() for one in everything),
            "errors": sum(one.errors.total() for one in everything),
            "cancelled": left,
            **{f"{kind}_tokens": sum(getattr(one, f"{kind}_tokens") for one in everything) for kind in TOKENS},
        }

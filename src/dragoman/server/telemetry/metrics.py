"""Counters and histograms of a run.

Rules
1. Only served models become labels, never names sent by clients, paths or keys. So the number of series is bounded.
2. Adding a value is cheap. Expensive work happens when the metrics are read (see `exposition`).
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from dragoman.server.telemetry.record import CLIENT_DISCONNECTED, RequestRecord

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RECENT_SECONDS = 60
TOKENS = ("prompt", "completion", "cached", "reasoning", "unfinished")
BATCH = 64
"""Ended requests are counted in batches of this size, and before every read."""


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values per bucket. The last bucket has the values above all bounds."""
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add_shared(self, value: float, parts: int) -> None:
        """Add a value as this many equal parts."""
        self.counts[bisect_left(self.bounds, value / parts)] += parts
        self.total += value

    def add_all(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [own + other for own, other in zip(self.counts, counts, strict=True)]
        self.total += total

    def pop_counts(self) -> tuple[tuple[int, ...], float] | None:
        """Take the counts out, for another histogram; None if it is empty."""
        if not any(self.counts):
            return None
        taken = tuple(self.counts), self.total
        # In place, because meters refer to the list.
        self.counts[:] = [0] * len(self.counts)
        self.total = 0.0
        return taken

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The quantile, interpolated within its bucket; None for an empty histogram."""
        target = share * self.count
        so_far, below = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and so_far + count >= target:
                return below + (bound - below) * (target - so_far) / count
            so_far, below = so_far + count, bound
        return self.bounds[-1] if self.count else None


class RecentRate:
    """The rate over the last minute, stored per second."""

    def __init__(self) -> None:
        self._amounts = [0] * RECENT_SECONDS
        self._began = self._last = int(time.monotonic())

    def add(self, amount: int) -> None:
        now = int(time.monotonic())
        if now != self._last:
            self._expire(now)
        self._amounts[now % RECENT_SECONDS] += amount

    def _expire(self, now: int) -> None:
        for second in range(max(self._last + 1, now - RECENT_SECONDS + 1), now + 1):
            self._amounts[second % RECENT_SECONDS] = 0
        self._last = now

    def per_second(self) -> float:
        now = int(time.monotonic())
        self._expire(now)
        return sum(self._amounts) / min(RECENT_SECONDS, max(1, now - self._began))


class ModelMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By scope and status."""
        self.errors: Counter[str] = Counter()
        """By code, including failures after the start of a stream."""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.unfinished_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.gaps = Histogram(GAPS)
        self.queue = Histogram(SECONDS)
        self.duration = Histogram(SECONDS)
        self.recent = RecentRate()

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
        """Requests refused by the limits of a key, by kind."""

    def for_model(self, model: str) -> ModelMetrics:
        """The metrics of a served model."""
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics()
        return metrics

    def add(self, record: RequestRecord) -> None:
        """Counting in batches is several times cheaper than counting one by one."""
        self._ended.append(record)
        if len(self._ended) >= BATCH:
            self._count_ended()

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            (self._others if record.model is None else self.for_model(record.model)).add(record)

    @property
    def models(self) -> dict[str, ModelMetrics]:
        self._count_ended()
        return self._models

    @property
    def others(self) -> ModelMetrics:
        """Metrics of requests without a served model."""
        self._count_ended()
        return self._others

    def totals(self) -> dict[str, int]:
        all_metrics = [*self.models.values(), self.others]
        statuses = [(status, count) for one in all_metrics for (_, status), count in one.requests.items()]
        return {
            "requests": sum(one.requests.total() for one in all_metrics),
            "errors": sum(one.errors.total() for one in all_metrics),
            "cancelled": sum(count for status, count in statuses if status == CLIENT_DISCONNECTED),
            **{f"{kind}_tokens": sum(getattr(one, f"{kind}_tokens") for one in all_metrics) for kind in TOKENS},
        }

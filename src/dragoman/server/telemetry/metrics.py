"""What is measured: the record of one request, which a `Meter` fills, and the counters of the run.

Only served models become labels, never names sent by clients, paths or keys. So the number of series is bounded.
Principals become labels if `telemetry.metrics_by_principal` is set, and only the first ones that send requests.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dragoman.core.events import Usage

CLIENT_DISCONNECTED = 499
"""The status of a request whose client disconnected before the end."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
MINUTE = 60
TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "unfinished_tokens")
"""Fields of a record."""
BATCH = 64
"""Ended requests are counted in batches of this size, and before every read."""
MAX_PRINCIPALS = 200
OTHER_PRINCIPALS = "other"
"""The label of the principals above that number."""


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """Filled while the request runs, written when it has ended.

    `scope` is the kind of route. `route` is the path as sent; it is never used as a label.
    """

    id: str
    route: str
    scope: str | None = None
    principal: str = "anonymous"
    key: str = ""
    """As in `Caller`."""
    client: str | None = None
    scheme: str | None = None
    """The scheme of the client's connection, if a trusted proxy reports it."""
    model: str | None = None
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    unfinished_tokens: int = 0
    """Tokens of choices that were cut off, or whose server reports no usage. No client gets this number."""
    unfinished_prompt_tokens: int = 0
    """The part of `unfinished_tokens` that is the prompt."""
    queue_us: int | None = None
    first_event_us: int | None = None
    first_token_us: int | None = None
    duration_us: int = 0
    finish: str | None = None
    error: str | None = None
    warnings: int = 0
    ignored: tuple[str, ...] = ()
    """Parameters that the engine did not honour."""
    trace: str | None = None
    """The client's `traceparent`, if tracing is on."""
    client_request_id: str | None = None
    """The id that the client sent in `X-Request-Id`, if it is well-formed."""

    @property
    def log_id(self) -> str:
        """The id in lines of the log, with that of the client."""
        return self.id if self.client_request_id is None else f"{self.id} ({self.client_request_id})"

    def count(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.completion_tokens += usage.completion
        self.cached_tokens += usage.cached
        self.reasoning_tokens += usage.reasoning

    @property
    def used_prompt(self) -> int:
        return self.prompt_tokens + self.unfinished_prompt_tokens

    @property
    def used_completion(self) -> int:
        return self.completion_tokens + self.unfinished_tokens - self.unfinished_prompt_tokens

    @property
    def spent_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens + self.unfinished_tokens

    def line(self) -> str:
        tokens = f"{self.prompt_tokens}+{self.completion_tokens} tokens"
        parts = (self.log_id, self.principal, self.route, self.model or "-", str(self.status), tokens)
        end = self.error or self.finish or "-"
        ignored = f", ignored: {', '.join(self.ignored)}" if self.ignored else ""
        return f"{' '.join(parts)} {self.duration_us / 1000:.1f} ms {end}{ignored}"


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values per bucket. The last bucket has the values above all bounds."""
        self.total = 0.0

    def add(self, value: float, parts: int = 1) -> None:
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
        self.counts, self.total = [0] * len(self.counts), 0.0
        return taken

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The quantile, interpolated within its bucket; None for an empty histogram.

        It is never more than the sum allows: the values from the quantile upwards are at least as large.
        """
        total = self.count
        if total <= 1:
            return self.total if total else None
        target = share * total
        most = self.total / (total - math.ceil(target) + 1)
        so_far, below = 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and so_far + count >= target:
                return min(most, below + (bound - below) * (target - so_far) / count)
            so_far, below = so_far + count, bound
        return self.bounds[-1]


@dataclass(slots=True)
class _Second:
    """The amount taken in one second. It expires a minute after the last of it was taken."""

    at: int
    taken: int = 0
    expires: float = math.inf


class MinuteWindow:
    """The amount taken in the last minute, stored per second."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        """Oldest first."""
        self._taken = 0

    def taken(self, now: float) -> int:
        while self._seconds and self._seconds[0].expires <= now:
            self._taken -= self._seconds.popleft().taken
        return self._taken

    def take(self, amount: int, now: float) -> None:
        self._taken = self.taken(now) + amount
        second = math.floor(now)
        if not self._seconds or self._seconds[-1].at != second:
            self._seconds.append(_Second(second))
        self._seconds[-1].taken += amount
        self._seconds[-1].expires = now + MINUTE

    def restore(self, amount: int, taken_at: float) -> None:
        """Add what was taken before everything else, by the server that ran before this one."""
        if amount:
            self._seconds.appendleft(_Second(math.floor(taken_at), amount, taken_at + MINUTE))
            self._taken += amount

    def release(self, amount: int, taken_at: float) -> None:
        """Return a part of what was taken at that time, if it has not expired."""
        second = math.floor(taken_at)
        for entry in reversed(self._seconds):
            if entry.at == second:
                entry.taken -= amount
                self._taken -= amount
                return


class RecentRate(MinuteWindow):
    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def add(self, amount: int) -> None:
        self.take(amount, time.monotonic())

    def per_second(self) -> float:
        now = time.monotonic()
        return self.taken(now) / min(MINUTE, max(1, now - self._began))


class ModelMetrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By scope and status."""
        self.errors: Counter[str] = Counter()
        """By code, including failures after the start of a stream."""
        self.tokens = dict.fromkeys(TOKENS, 0)
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
        for kind in TOKENS:
            self.tokens[kind] += getattr(record, kind)
        self.recent.add(record.completion_tokens)


class PrincipalMetrics:
    def __init__(self) -> None:
        self.requests = 0
        self.tokens = dict.fromkeys(TOKENS, 0)

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        for kind in TOKENS:
            self.tokens[kind] += getattr(record, kind)


class Metrics:
    def __init__(self, counts_principals: bool = False) -> None:
        self.began = time.time()
        self._counts_principals = counts_principals
        self._principals: dict[str, PrincipalMetrics] = {}
        self._models: dict[str, ModelMetrics] = {}
        self._ended: list[RequestRecord] = []
        self._others = ModelMetrics()
        self.limited: Counter[str] = Counter()
        """Requests refused by the limits of a key, by kind."""
        self.batch_lines: Counter[str] = Counter()
        """Lines of batches, by result."""

    def for_model(self, model: str) -> ModelMetrics:
        metrics = self._models.get(model)
        if metrics is None:
            metrics = self._models[model] = ModelMetrics()
        return metrics

    def add(self, record: RequestRecord) -> None:
        """Count an ended request, later: counting in batches is several times cheaper."""
        self._ended.append(record)
        if len(self._ended) >= BATCH:
            self._count_ended()

    def _count_ended(self) -> None:
        ended, self._ended = self._ended, []
        for record in ended:
            (self._others if record.model is None else self.for_model(record.model)).add(record)
            if self._counts_principals:
                self._for_principal(record.principal).add(record)

    def _for_principal(self, principal: str) -> PrincipalMetrics:
        is_known = principal in self._principals or len(self._principals) < MAX_PRINCIPALS
        return self._principals.setdefault(principal if is_known else OTHER_PRINCIPALS, PrincipalMetrics())

    @property
    def principals(self) -> dict[str, PrincipalMetrics]:
        self._count_ended()
        return self._principals

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
            **{kind: sum(one.tokens[kind] for one in all_metrics) for kind in TOKENS},
        }

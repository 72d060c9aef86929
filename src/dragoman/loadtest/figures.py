"""Computes the figures of a load test from its samples. All times are in seconds.

The field names are those of the file that `dragoman bench --json` writes.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

REQUESTS_PER_CLIENT = 4


class LoadPlan(msgspec.Struct, frozen=True):
    concurrency: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    shared: float
    requests: int | None
    """Per level; None means `REQUESTS_PER_CLIENT` for each client."""
    seed: int

    def requests_at(self, concurrency: int) -> int:
        return self.requests or concurrency * REQUESTS_PER_CLIENT


class SampleUsage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them; `cached` is None if the server does not report it."""

    prompt: int
    output: int
    cached: int | None = None


class Sample(msgspec.Struct, frozen=True):
    """One request. `arrivals` has the time from the request to each piece of the reply. Pieces of one read have the
    same time."""

    seconds: float
    arrivals: tuple[float, ...] = ()
    usage: SampleUsage | None = None
    status: int | None = None
    error: str | None = None

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.arrivals)]


class Level(msgspec.Struct, frozen=True):
    """The figures at one concurrency. A figure without data is None."""

    concurrency: int
    requests: int
    errors: Mapping[str, int]
    seconds: float
    ttft_p50: float | None
    ttft_p95: float | None
    gap_p50: float | None
    gap_p99: float | None
    token_p50: float | None
    """Seconds per token after the first, by the usage. Differs from the gap if a piece has several tokens."""
    tokens_per_piece: float | None
    output_tokens_per_second: float
    requests_per_second: float
    prompt_tokens: float | None
    """The mean per request, as for the next two."""
    output_tokens: float | None
    cached_tokens: float | None
    late_p95: float | None
    """Scheduling delay of the load generator itself. Smaller differences are not meaningful."""

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


class MeasuredLevel(msgspec.Struct, frozen=True):
    figures: Level
    samples: tuple[Sample, ...]


class LoadResult(msgspec.Struct, frozen=True):
    url: str
    model: str
    plan: LoadPlan
    levels: tuple[MeasuredLevel, ...]
    refused: tuple[str, ...] = ()
    """Request fields that the server rejects."""
    uncounted: bool = False
    """The server reports no prompt tokens, so `prompt_tokens` are words."""

    @property
    def figures(self) -> list[Level]:
        return [measured.figures for measured in self.levels]


def percentile(values: Sequence[float], percent: float) -> float | None:
    # Imported late to keep the start of other commands fast.
    import numpy

    return float(numpy.percentile(values, percent)) if values else None


def summarize(concurrency: int, samples: Sequence[Sample], seconds: float, late: Sequence[float]) -> Level:
    answered = [sample for sample in samples if sample.error is None]
    usages = [sample.usage for sample in answered if sample.usage is not None]
    cached = [usage.cached for usage in usages if usage.cached is not None]
    firsts = [sample.arrivals[0] for sample in answered if sample.arrivals]
    gaps = [gap for sample in answered for gap in sample.gaps]
    pieces = sum(len(sample.arrivals) for sample in answered)
    output = sum(usage.output for usage in usages)
    return Level(
        concurrency=concurrency,
        requests=len(samples),
        errors=dict(Counter(sample.error for sample in samples if sample.error is not None).most_common()),
        seconds=seconds,
        ttft_p50=percentile(firsts, 50),
        ttft_p95=percentile(firsts, 95),
        gap_p50=percentile(gaps, 50),
        gap_p99=percentile(gaps, 99),
        token_p50=percentile(_seconds_per_token(answered), 50),
        tokens_per_piece=output / pieces if pieces else None,
        output_tokens_per_second=output / seconds,
        requests_per_second=len(answered) / seconds,
        prompt_tokens=_mean([usage.prompt for usage in usages]),
        output_tokens=_mean([usage.output for usage in usages]),
        cached_tokens=_mean(cached),
        late_p95=percentile(late, 95),
    )


def _seconds_per_token(answered: Sequence[Sample]) -> list[float]:
    return [
        (sample.arrivals[-1] - sample.arrivals[0]) / (sample.usage.output - 1)
        for sample in answered
        if sample.arrivals and sample.usage is not None and sample.usage.output > 1
    ]


def _mean(values: Sequence[int]) -> float | None:
    return statistics.fmean(values) if values else None

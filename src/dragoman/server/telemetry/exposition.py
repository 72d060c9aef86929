"""The metrics as Prometheus reads them, made anew for everyone who asks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.core.version import __version__
from dragoman.server.telemetry.metrics import TOKENS, Histogram, Metrics, ModelMetrics

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Standing(msgspec.Struct, frozen=True):
    """How a model stands at this moment; None where nobody can tell."""

    state: str
    running: int = 0
    waiting: int = 0
    slots: int | None = None
    kv_used: float | None = None
    """The part of the room for prompts and replies that is taken."""
    memory: int | None = None
    """Bytes that its own process has."""


def exposition(
    metrics: Metrics, models: Mapping[str, Standing], memory: int | None, budget: int | None = None
) -> bytes:
    """`memory` is that of the server's own process, `budget` what all models may take together."""
    registry = CollectorRegistry()
    registry.register(_Page([*_counted(metrics), *_standing(models), *_server(metrics, memory, budget)]))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counted(metrics: Metrics) -> Iterator[Metric]:
    models = metrics.models
    requests = CounterMetricFamily(
        "dragoman_requests", "Requests that have ended.", labels=["model", "route", "status"]
    )
    for name, one in [*models.items(), ("", metrics.others)]:
        for (scope, status), count in sorted(one.requests.items()):
            requests.add_metric([name, scope, str(status)], count)
    yield requests
    errors = CounterMetricFamily(
        "dragoman_errors", "Requests that failed, in mid-stream too.", labels=["model", "code"]
    )
    for name, one in [*models.items(), ("", metrics.others)]:
        for code, count in sorted(one.errors.items()):
            errors.add_metric([name, code], count)
    yield errors
    tokens = CounterMetricFamily("dragoman_tokens", "Tokens as the engines count them.", labels=["model", "kind"])
    for name, one in models.items():
        for kind in TOKENS:
            tokens.add_metric([name, kind], getattr(one, f"{kind}_tokens"))
    yield tokens
    yield from _histograms(models)
    limited = CounterMetricFamily("dragoman_limited", "Requests that the limits of a key kept out.", labels=["limit"])
    for kind, count in sorted(metrics.limited.items()):
        limited.add_metric([kind], count)
    yield limited


def _histograms(models: Mapping[str, ModelMetrics]) -> Iterator[Metric]:
    kinds: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
        ("time_to_first_token", "From a request's arrival to its first token.", lambda one: one.first_token),
        ("inter_token", "Between two tokens of a reply.", lambda one: one.gaps),
        ("queue", "Waiting for a slot.", lambda one: one.queue),
        ("request_duration", "From a request's arrival to its end.", lambda one: one.duration),
    )
    for name, words, pick in kinds:
        family = HistogramMetricFamily(f"dragoman_{name}_seconds", words, labels=["model"])
        for model, one in models.items():
            histogram = pick(one)
            family.add_metric([model], _buckets(histogram), histogram.total)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    so_far, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets


def _standing(models: Mapping[str, Standing]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[Standing], float | None]], ...] = (
        ("slots", "Generations that a model takes at once.", lambda one: one.slots),
        ("slots_busy", "Generations that run.", lambda one: one.running),
        ("queue_length", "Requests that wait for a slot, or for the model.", lambda one: one.waiting),
        ("kv_used_ratio", "The part of the room for tokens that is taken.", lambda one: one.kv_used),
        ("model_memory_bytes", "Memory of the process that a model has of its own.", lambda one: one.memory),
    )
    for name, words, pick in gauges:
        family = GaugeMetricFamily(f"dragoman_{name}", words, labels=["model"])
        for model, standing in models.items():
            value = pick(standing)
            if value is not None:
                family.add_metric([model], value)
        yield family
    states = GaugeMetricFamily("dragoman_model_state", "1 for the state that a model is in.", labels=["model", "state"])
    for model, standing in models.items():
        states.add_metric([model, standing.state], 1)
    yield states


def _server(metrics: Metrics, memory: int | None, budget: int | None) -> Iterator[Metric]:
    info = GaugeMetricFamily("dragoman_info", "The version that runs.", labels=["version"])
    info.add_metric([__version__], 1)
    yield info
    yield GaugeMetricFamily("dragoman_start_time_seconds", "When the run began.", value=metrics.began)
    if memory is not None:
        yield GaugeMetricFamily("dragoman_memory_bytes", "Memory of the server's own process.", value=memory)
    if budget is not None:
        yield GaugeMetricFamily("dragoman_memory_budget_bytes", "What all models may take together.", value=budget)

"""Renders the metrics in Prometheus format."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.core.version import __version__
from dragoman.server.telemetry.metrics import TOKENS, Histogram, Metrics, ModelMetrics

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class ModelGauges(msgspec.Struct, frozen=True):
    """The current state of a model. None means unknown."""

    state: str
    running: int = 0
    waiting: int = 0
    slots: int | None = None
    kv_used: float | None = None
    """The fraction of the KV cache in use."""
    memory: int | None = None
    """Bytes of the model's own process."""


def render_metrics(
    metrics: Metrics, models: Mapping[str, ModelGauges], memory: int | None, budget: int | None = None
) -> bytes:
    """`memory` is that of the server process, `budget` the limit for all models together."""
    registry = CollectorRegistry()
    registry.register(_Families([*_counters(metrics), *_gauges(models), *_server(metrics, memory, budget)]))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counters(metrics: Metrics) -> Iterator[Metric]:
    models = metrics.models
    requests = CounterMetricFamily(
        "dragoman_requests", "Requests that have ended.", labels=["model", "route", "status"]
    )
    for name, one in [*models.items(), ("", metrics.others)]:
        for (scope, status), count in sorted(one.requests.items()):
            requests.add_metric([name, scope, str(status)], count)
    yield requests
    errors = CounterMetricFamily(
        "dragoman_errors", "Requests that failed, including after the start of a stream.", labels=["model", "code"]
    )
    for name, one in [*models.items(), ("", metrics.others)]:
        for code, count in sorted(one.errors.items()):
            errors.add_metric([name, code], count)
    yield errors
    tokens = CounterMetricFamily("dragoman_tokens", "Tokens as counted by the engines.", labels=["model", "kind"])
    for name, one in models.items():
        for kind in TOKENS:
            tokens.add_metric([name, kind], getattr(one, f"{kind}_tokens"))
    yield tokens
    yield from _histograms(models)
    limited = CounterMetricFamily("dragoman_limited", "Requests refused by the limits of a key.", labels=["limit"])
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
    for name, text, pick in kinds:
        family = HistogramMetricFamily(f"dragoman_{name}_seconds", text, labels=["model"])
        for model, one in models.items():
            histogram = pick(one)
            family.add_metric([model], _buckets(histogram), histogram.total)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    cumulative, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        cumulative += count
        buckets.append((bound, float(cumulative)))
    return buckets


def _gauges(models: Mapping[str, ModelGauges]) -> Iterator[Metric]:
    gauges: tuple[tuple[str, str, Callable[[ModelGauges], float | None]], ...] = (
        ("slots", "Generations that a model can run at once.", lambda one: one.slots),
        ("slots_busy", "Running generations.", lambda one: one.running),
        ("queue_length", "Requests waiting for a slot or for the model.", lambda one: one.waiting),
        ("kv_used_ratio", "Fraction of the KV cache in use.", lambda one: one.kv_used),
        ("model_memory_bytes", "Memory of the model's own process.", lambda one: one.memory),
    )
    for name, text, pick in gauges:
        family = GaugeMetricFamily(f"dragoman_{name}", text, labels=["model"])
        for model, status in models.items():
            value = pick(status)
            if value is not None:
                family.add_metric([model], value)
        yield family
    states = GaugeMetricFamily("dragoman_model_state", "1 for the current state of a model.", labels=["model", "state"])
    for model, status in models.items():
        states.add_metric([model, status.state], 1)
    yield states


def _server(metrics: Metrics, memory: int | None, budget: int | None) -> Iterator[Metric]:
    info = GaugeMetricFamily("dragoman_info", "The running version.", labels=["version"])
    info.add_metric([__version__], 1)
    yield info
    yield GaugeMetricFamily("dragoman_start_time_seconds", "Start time of the run.", value=metrics.began)
    if memory is not None:
        yield GaugeMetricFamily("dragoman_memory_bytes", "Memory of the server process.", value=memory)
    if budget is not None:
        yield GaugeMetricFamily("dragoman_memory_budget_bytes", "Memory limit for all models together.", value=budget)

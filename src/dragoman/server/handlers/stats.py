"""Handlers for `/metrics` (Prometheus) and `/stats` (JSON)."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dragoman.core.version import __version__
from dragoman.models import ServedModel
from dragoman.models.memory import resident_memory
from dragoman.server.app import App
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.telemetry.metrics import TOKENS, Histogram, Metrics, ModelMetrics, PrincipalMetrics

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


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


HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("time_to_first_token", "From a request's arrival to its first token.", lambda one: one.first_token),
    ("inter_token", "Between two tokens of a reply.", lambda one: one.gaps),
    ("queue", "Waiting for a slot.", lambda one: one.queue),
    ("request_duration", "From a request's arrival to its end.", lambda one: one.duration),
)
GAUGES: tuple[tuple[str, str, Callable[[ModelGauges], float | None]], ...] = (
    ("slots", "Generations that a model can run at once.", lambda one: one.slots),
    ("slots_busy", "Running generations.", lambda one: one.running),
    ("queue_length", "Requests waiting for a slot or for the model.", lambda one: one.waiting),
    ("kv_used_ratio", "Fraction of the KV cache in use.", lambda one: one.kv_used),
    ("model_memory_bytes", "Memory of the model's own process.", lambda one: one.memory),
)


async def metrics(app: App, exchange: HttpExchange) -> None:
    if app.settings.telemetry.metrics == "off":
        raise exchange.not_found_error()
    page = render_metrics(app.telemetry.metrics, await _gauges(app), _memory(), app.catalog.lifecycle.budget)
    await exchange.response.send(page, CONTENT_TYPE)


async def stats(app: App, exchange: HttpExchange) -> None:
    counted = app.telemetry.metrics
    await exchange.response.send_json(
        {
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - app.started, 3),
            "memory_bytes": _memory(),
            "memory_budget_bytes": app.catalog.lifecycle.budget,
            "totals": counted.totals(),
            "limited": dict(counted.limited),
            "models": {name: _stats(one, counted.models.get(name)) for name, one in (await _gauges(app)).items()},
        }
    )


async def _gauges(app: App) -> dict[str, ModelGauges]:
    """The state of all models of the configuration and of the model directories."""
    return {model.name: await _gauges_of(model) for model in app.catalog.list_models()}


async def _gauges_of(model: ServedModel) -> ModelGauges:
    host = model.host
    return ModelGauges(
        state=host.state,
        running=host.admission.running,
        waiting=host.admission.waiting + host.waiting,
        slots=host.admission.slots,
        kv_used=None if host.engine is None else host.engine.kv_used,
        # The memory of a model is known only if it has its own process.
        memory=await host.measure() if host.pid is not None else None,
    )


def _stats(gauges: ModelGauges, counted: ModelMetrics | None) -> dict[str, Any]:
    counted = counted or ModelMetrics()
    return {
        **msgspec.to_builtins(gauges),
        "requests": counted.requests.total(),
        "errors": dict(counted.errors),
        **counted.tokens,
        "tokens_per_second": round(counted.recent.per_second(), 3),
        "time_to_first_token": _summary(counted.first_token),
        "inter_token": _summary(counted.gaps),
        "queue": _summary(counted.queue),
        "duration": _summary(counted.duration),
    }


def _summary(histogram: Histogram) -> dict[str, float | None]:
    """Mean and quantiles in seconds."""
    mean = histogram.total / histogram.count if histogram.count else None
    values = {"mean": mean, **{name: histogram.quantile(share) for name, share in QUANTILES}}
    return {name: None if value is None else round(value, 6) for name, value in values.items()}


def _memory() -> int | None:
    """Bytes of the server process; None if the system does not report it."""
    return resident_memory(os.getpid()) or None


def render_metrics(
    metrics: Metrics, models: Mapping[str, ModelGauges], memory: int | None, budget: int | None = None
) -> bytes:
    """`memory` is that of the server process, `budget` the limit for all models together."""
    families = [*_counters(metrics), *_model_gauges(models), *_server_gauges(metrics, memory, budget)]
    return generate_latest(_Families(families))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _counters(metrics: Metrics) -> Iterator[Metric]:
    models = metrics.models
    requests = CounterMetricFamily(
        "dragoman_requests", "Requests that have ended.", labels=["model", "route", "status"]
    )
    errors = CounterMetricFamily(
        "dragoman_errors", "Requests that failed, including after the start of a stream.", labels=["model", "code"]
    )
    for name, one in [*models.items(), ("", metrics.others)]:
        for (scope, status), count in sorted(one.requests.items()):
            requests.add_metric([name, scope, str(status)], count)
        for code, count in sorted(one.errors.items()):
            errors.add_metric([name, code], count)
    tokens = CounterMetricFamily("dragoman_tokens", "Tokens as counted by the engines.", labels=["model", "kind"])
    for name, one in models.items():
        for kind in TOKENS:
            tokens.add_metric([name, kind.removesuffix("_tokens")], one.tokens[kind])
    yield from (requests, errors, tokens)
    if metrics.principals:
        yield from _principal_counters(metrics.principals)
    for name, text, pick in HISTOGRAMS:
        family = HistogramMetricFamily(f"dragoman_{name}_seconds", text, labels=["model"])
        for model, one in models.items():
            histogram = pick(one)
            family.add_metric([model], _buckets(histogram), histogram.total)
        yield family
    limited = CounterMetricFamily("dragoman_limited", "Requests refused by the limits of a key.", labels=["limit"])
    for limit, count in sorted(metrics.limited.items()):
        limited.add_metric([limit], count)
    yield limited
    batch_lines = CounterMetricFamily("dragoman_batch_lines", "Lines of batches with a result.", labels=["result"])
    for result, count in sorted(metrics.batch_lines.items()):
        batch_lines.add_metric([result], count)
    yield batch_lines


def _principal_counters(principals: Mapping[str, PrincipalMetrics]) -> Iterator[Metric]:
    requests = CounterMetricFamily("dragoman_principal_requests", "Requests that have ended.", labels=["principal"])
    tokens = CounterMetricFamily(
        "dragoman_principal_tokens", "Tokens as counted by the engines.", labels=["principal", "kind"]
    )
    for name, one in principals.items():
        requests.add_metric([name], one.requests)
        for kind in TOKENS:
            tokens.add_metric([name, kind.removesuffix("_tokens")], one.tokens[kind])
    yield from (requests, tokens)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return [(bound, float(total)) for bound, total in zip(bounds, accumulate(histogram.counts), strict=True)]


def _model_gauges(models: Mapping[str, ModelGauges]) -> Iterator[Metric]:
    for name, text, pick in GAUGES:
        family = GaugeMetricFamily(f"dragoman_{name}", text, labels=["model"])
        for model, gauges in models.items():
            value = pick(gauges)
            if value is not None:
                family.add_metric([model], value)
        yield family
    states = GaugeMetricFamily("dragoman_model_state", "1 for the current state of a model.", labels=["model", "state"])
    for model, gauges in models.items():
        states.add_metric([model, gauges.state], 1)
    yield states


def _server_gauges(metrics: Metrics, memory: int | None, budget: int | None) -> Iterator[Metric]:
    info = GaugeMetricFamily("dragoman_info", "The running version.", labels=["version"])
    info.add_metric([__version__], 1)
    yield info
    yield GaugeMetricFamily("dragoman_start_time_seconds", "Start time of the run.", value=metrics.began)
    if memory is not None:
        yield GaugeMetricFamily("dragoman_memory_bytes", "Memory of the server process.", value=memory)
    if budget is not None:
        yield GaugeMetricFamily("dragoman_memory_budget_bytes", "Memory limit for all models together.", value=budget)

"""Handlers for `/metrics` (Prometheus) and `/stats` (JSON)."""

import os
import time
from typing import Any

import msgspec

from dragoman.core.version import __version__
from dragoman.models import ServedModel
from dragoman.models.process_memory import resident_memory
from dragoman.server.app import App
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routing import not_found_error
from dragoman.server.telemetry.exposition import CONTENT_TYPE, ModelGauges, render_metrics
from dragoman.server.telemetry.metrics import Histogram, ModelMetrics


async def metrics(app: App, exchange: HttpExchange) -> None:
    if app.settings.telemetry.metrics == "off":
        raise not_found_error(exchange)
    page = render_metrics(app.telemetry.metrics, await _statuses(app), _memory(), app.catalog.lifecycle.budget)
    await exchange.response.send(page, CONTENT_TYPE)


async def stats(app: App, exchange: HttpExchange) -> None:
    counted = app.telemetry.metrics
    statuses = await _statuses(app)
    await exchange.response.send_json(
        {
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - app.started, 3),
            "memory_bytes": _memory(),
            "memory_budget_bytes": app.catalog.lifecycle.budget,
            "totals": counted.totals(),
            "limited": dict(counted.limited),
            "models": {name: _stats(status, counted.models.get(name)) for name, status in statuses.items()},
        }
    )


async def _statuses(app: App) -> dict[str, ModelGauges]:
    """The status of all models of the configuration and of the model directories."""
    return {model.name: await _status(model) for model in app.catalog.list_models()}


async def _status(model: ServedModel) -> ModelGauges:
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


def _stats(status: ModelGauges, counted: ModelMetrics | None) -> dict[str, Any]:
    counted = counted or ModelMetrics()
    return {
        **msgspec.to_builtins(status),
        "requests": sum(counted.requests.values()),
        "errors": dict(counted.errors),
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "cached_tokens": counted.cached_tokens,
        "reasoning_tokens": counted.reasoning_tokens,
        "unfinished_tokens": counted.unfinished_tokens,
        "tokens_per_second": round(counted.recent.per_second(), 3),
        "time_to_first_token": _summary(counted.first_token),
        "inter_token": _summary(counted.gaps),
        "queue": _summary(counted.queue),
        "duration": _summary(counted.duration),
    }


def _summary(histogram: Histogram) -> dict[str, float | None]:
    """Mean and quantiles in seconds."""
    quantiles = {name: histogram.quantile(share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    mean = histogram.total / histogram.count if histogram.count else None
    return {name: None if value is None else round(value, 6) for name, value in {"mean": mean, **quantiles}.items()}


def _memory() -> int | None:
    """Bytes of the server process; None if the system does not report it."""
    return resident_memory(os.getpid()) or None

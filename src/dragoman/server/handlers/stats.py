"""The state of the server: `/metrics` for Prometheus, `/stats` for people and scripts."""

import os
import time
from typing import Any

import msgspec

from dragoman.core.errors import NotFound
from dragoman.core.version import __version__
from dragoman.models import Model
from dragoman.models.process_memory import resident
from dragoman.server.app import App
from dragoman.server.base_app import METRICS_PATH
from dragoman.server.http_exchange import Exchange
from dragoman.server.telemetry.exposition import CONTENT_TYPE, Standing, exposition
from dragoman.server.telemetry.metrics import Histogram, ModelMetrics


async def metrics(app: App, exchange: Exchange) -> None:
    if app.settings.telemetry.metrics == "off":
        raise NotFound(f"there is nothing at {METRICS_PATH}")
    page = exposition(app.telemetry.metrics, await standings(app), _memory(), app.catalog.lifecycle.budget)
    await exchange.reply(page, CONTENT_TYPE)


async def stats(app: App, exchange: Exchange) -> None:
    counted = app.telemetry.metrics
    standing = await standings(app)
    await exchange.reply_json(
        {
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - app.started, 3),
            "memory_bytes": _memory(),
            "memory_budget_bytes": app.catalog.lifecycle.budget,
            "totals": counted.totals(),
            "limited": dict(counted.limited),
            "models": {name: _stats(standing[name], counted.models.get(name)) for name in standing},
        }
    )


async def standings(app: App) -> dict[str, Standing]:
    """Of the models of the configuration and of those that lie in the folders."""
    return {model.name: await _standing(model) for model in app.catalog.listed()}


async def _standing(model: Model) -> Standing:
    host = model.host
    return Standing(
        state=host.state,
        running=host.admission.running,
        waiting=host.admission.waiting + host.waiting,
        slots=host.admission.slots,
        kv_used=None if host.engine is None else host.engine.kv_used,
        # Only of an engine with a process of its own is it known how much is the model's.
        memory=await host.measure() if host.pid is not None else None,
    )


def _stats(standing: Standing, counted: ModelMetrics | None) -> dict[str, Any]:
    counted = counted or ModelMetrics()
    return {
        **msgspec.to_builtins(standing),
        "requests": sum(counted.requests.values()),
        "errors": dict(counted.errors),
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "cached_tokens": counted.cached_tokens,
        "reasoning_tokens": counted.reasoning_tokens,
        "unfinished_tokens": counted.unfinished_tokens,
        "tokens_per_second": round(counted.recent.per_second(), 3),
        "time_to_first_token": _spread(counted.first_token),
        "inter_token": _spread(counted.gaps),
        "queue": _spread(counted.queue),
        "duration": _spread(counted.duration),
    }


def _spread(histogram: Histogram) -> dict[str, float | None]:
    """In seconds, as far as the buckets tell."""
    quantiles = {name: histogram.quantile(share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    mean = histogram.total / histogram.count if histogram.count else None
    return {name: None if value is None else round(value, 6) for name, value in {"mean": mean, **quantiles}.items()}


def _memory() -> int | None:
    """Bytes that the server's own process has; None where the system does not tell."""
    return resident(os.getpid()) or None

"""Handlers for model listings, health, readiness, and administration.

The routes below `/admin` list, load and unload models, reload the configuration, and drain upstream servers. They need
a key with the scope `admin`, or the admin token if no keys are configured (see `admin_token`). A connection from this
machine is not enough.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, InvalidConfig, ModelFailed, ModelLoading, NotFound, quote
from dragoman.core.version import __version__
from dragoman.engines.upstream.pool import UpstreamState
from dragoman.models import ModelHost, ServedModel
from dragoman.protocols import models as wire_models
from dragoman.protocols.registry import ANTHROPIC
from dragoman.server.app import App
from dragoman.server.http_exchange import HttpExchange

ADMIN_ROOT = "/admin/models"
POLL_SECONDS = 0.05
ACTIVE = "active"
"""The only stage of a model's life in Anthropic's list."""
UNLOAD_SECONDS = 5.0
"""Time that the reply waits for a model to unload."""


async def root(app: App, exchange: HttpExchange) -> None:
    await exchange.response.send_json({"name": "dragoman", "version": __version__})


async def version(app: App, exchange: HttpExchange) -> None:
    await exchange.response.send_json({"version": __version__})


async def health(app: App, exchange: HttpExchange) -> None:
    await exchange.response.send_json({"status": "ok"})


async def ready(app: App, exchange: HttpExchange) -> None:
    """Ready means that the default model, or a fallback for it, can answer; it may be unloaded while idle.

    A failed model, or one whose process is restarting, cannot answer. A stopping server is not ready.
    This route also loads the default model, and retries after a failure, because a server that is not ready gets no
    other requests.
    """
    default = await app.catalog.find("")
    host = default.host
    can_answer = any(not _is_unavailable(model.host) for model in (default, *app.catalog.fallbacks(default)))
    is_ready = host.is_known and can_answer and not app.is_stopping
    if host.state == "cold" and not host.is_known:
        host.load()
    host.retry_load()
    # Load balancers need only the status. Callers with a key also see the models of that key.
    caller = app.valid_caller(exchange)
    visible = () if caller is None else [model for model in app.catalog.models.values() if caller.may_use(model.name)]
    states = {model.name: _state(model) for model in visible}
    status = {"status": "ready" if is_ready else "not ready", "models": states}
    await exchange.response.send_json(status, 200 if is_ready else 503)


def _is_unavailable(host: ModelHost) -> bool:
    return host.failure is not None or host.is_restarting or _is_out(host.engine)


def _state(model: ServedModel) -> str:
    """The state of the host; `out` if no server behind a ready model can answer."""
    return "out" if model.host.state == "ready" and _is_out(model.host.engine) else model.host.state


async def _describe(app: App, model: ServedModel) -> wire_models.ModelEntry:
    engine = model.host.engine
    known = model.info if engine is not None else await model.static_info()
    return wire_models.ModelEntry(
        id=model.name,
        created=app.created,
        owned_by=model.info.owner,
        state=_state(model),
        max_model_len=known.context,
        format=known.format,
        device=None if engine is None else engine.device,
        loading_seconds=_round(model.host.loading_seconds),
        loading_progress=model.host.progress,
        architecture=None if model.found is None else model.found.architecture,
        size=None if model.found is None else model.found.size,
        quantization=None if model.found is None else model.found.quantization,
    )


async def _describe_known(app: App, model: ServedModel) -> wire_models.KnownModel:
    return wire_models.KnownModel(await _describe(app, model), model.host.supports if model.host.is_known else None)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


async def list_models(app: App, exchange: HttpExchange) -> None:
    await app.catalog.refresh()
    await app.catalog.scan()
    visible = [
        model
        for entry in app.catalog.list_models()
        for model in await entry.all()
        if exchange.caller.may_use(model.name)
    ]
    if exchange.response.family is ANTHROPIC:
        stages = exchange.query_list("lifecycle")
        known = [await _describe_known(app, model) for model in visible if not stages or ACTIVE in stages]
        await exchange.response.send_json(wire_models.encode_anthropic_models(known, exchange.query()))
    else:
        await exchange.response.send_json(wire_models.encode_list([await _describe(app, model) for model in visible]))


async def one_model(app: App, exchange: HttpExchange) -> None:
    await app.catalog.refresh()
    model = await app.model(exchange, exchange.path.removeprefix("/v1/models/"))
    if exchange.response.family is ANTHROPIC:
        known = await _describe_known(app, model)
        await exchange.response.send_json(wire_models.encode_anthropic_model(known))
    else:
        await exchange.response.send_json(await _describe(app, model))


async def model_states(app: App, exchange: HttpExchange) -> None:
    await app.catalog.refresh()
    await app.catalog.scan()
    visible = [model for model in app.catalog.list_models() if exchange.caller.may_use(model.name)]
    served = [await _describe_state(app, model) for model in visible]
    # Models that share an engine share its memory.
    used = {model.host.key: status.memory or 0 for model, status in zip(visible, served, strict=True)}
    memory = {"memory": app.catalog.lifecycle.budget, "used": sum(used.values())}
    await exchange.response.send_json(wire_models.encode_list(served, **memory))


async def change(app: App, exchange: HttpExchange) -> None:
    # The body is ignored, but its checks stop requests from web pages of other origins.
    await exchange.read_body(app.settings.limits, bytes)
    name, _, action = exchange.path.removeprefix(f"{ADMIN_ROOT}/").rpartition("/")
    if action not in ("load", "unload") or not name:
        raise exchange.not_found_error(f"; try {ADMIN_ROOT}/NAME/load or {ADMIN_ROOT}/NAME/unload")
    model = await app.model(exchange, name)
    done = await (_load(model) if action == "load" else _unload(app, model))
    status = await _describe_state(app, model)
    await exchange.response.send_json(status, 200 if done else 202)


async def reload(app: App, exchange: HttpExchange) -> None:
    await exchange.read_body(app.settings.limits, bytes)
    try:
        await exchange.response.send_json(await app.reload())
    except ConfigError as error:
        raise InvalidConfig(f"configuration not reloaded: {error}") from error


async def _load(model: ServedModel) -> bool:
    """Load a model and wait as long as a request would. True if it is ready. A failed model is retried immediately."""
    try:
        if model.host.state == "failed":
            model.host.load()
        await model.host.ready()
    except ModelLoading:
        return False
    except ModelFailed as error:
        # The operator may see the reason.
        raise ModelFailed(model.host.failure or error.message, retry_after=error.retry_after or 1) from error
    return True


async def _unload(app: App, model: ServedModel) -> bool:
    """Unload a model; True if it is done. Running requests finish first. A load in progress is aborted."""
    host, before = model.host, model.host.engine
    app.catalog.lifecycle.request_unload(host)
    deadline = time.monotonic() + UNLOAD_SECONDS
    while not (is_gone := _is_unloaded(host, before)) and time.monotonic() < deadline:  # noqa: ASYNC110 (seldom)
        await asyncio.sleep(POLL_SECONDS)
    return is_gone


def _is_unloaded(host: ModelHost, before: Engine | None) -> bool:
    """Whether the engine was unloaded. Waiting requests may already be loading the model again."""
    if host.state == "loading":
        return before is not None and host.engine is not before
    return host.state != "unloading" and (host.engine is None or host.engine is not before)


async def _describe_state(app: App, model: ServedModel) -> wire_models.ModelStatus:
    host = model.host
    residency = app.catalog.lifecycle.residency_of(host)
    is_here = host.engine is not None and not host.is_restarting
    return wire_models.ModelStatus(
        id=model.name,
        state=host.state,
        engine=None if model.spec is None else model.spec.engine,
        memory=await host.measure() if is_here else None,
        slots=host.admission.slots,
        running=host.admission.running,
        waiting=host.admission.waiting + host.waiting,
        tokens_per_second=_round(host.tokens_per_second),
        keep_alive=None if residency.is_pinned or residency.keep_alive == math.inf else residency.keep_alive,
        idle_seconds=round(time.monotonic() - residency.idle_since, 1) if is_here and not residency.running else None,
        loading_seconds=_round(host.loading_seconds),
        loading_progress=host.progress,
        failure=host.failure,
    )


@runtime_checkable
class PooledEngine(Protocol):
    """An engine with several upstream servers."""

    def states(self) -> Sequence[UpstreamState]: ...

    def drain(self, url: str, drained: bool) -> None: ...


async def upstreams(app: App, exchange: HttpExchange) -> None:
    await exchange.response.send_json(wire_models.encode_list(_list_upstreams(app)))


async def drain(app: App, exchange: HttpExchange) -> None:
    request = await exchange.read_body(app.settings.limits, wire_models.decode_drain)
    engine = await (await app.model(exchange, request.model)).host.ready()
    try:
        if not isinstance(engine, PooledEngine):
            raise ConfigError(f"model {quote(request.model)} has no upstream servers")
        engine.drain(request.url, request.drain)
    except ConfigError as error:
        raise NotFound(str(error)) from error
    await exchange.response.send_json(wire_models.encode_list(_list_upstreams(app)))


def _is_out(engine: object) -> bool:
    """Whether the engine has upstream servers, but none that accepts requests."""
    states = _upstream_states(engine)
    return bool(states) and all(server.state in ("out", "draining", "drained") for server in states)


def _list_upstreams(app: App) -> list[wire_models.UpstreamStatus]:
    return [
        wire_models.UpstreamStatus(
            model.name, server.url, server.state, server.running, server.failures, server.weight, server.rank
        )
        for model in app.catalog.models.values()
        for server in _upstream_states(model.host.engine)
    ]


def _upstream_states(engine: object) -> Sequence[UpstreamState]:
    return engine.states() if isinstance(engine, PooledEngine) else ()

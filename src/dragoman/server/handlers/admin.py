"""Admin handlers: list, load and unload models, reload the configuration, drain upstream servers.

They need a key with the scope `admin`, or the admin token if no keys are configured (see `admin_token`). A connection
from this machine is not enough.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, InvalidConfig, ModelFailed, ModelLoading, NotFound, Unauthorized, quote
from dragoman.engines.upstream.pool import UpstreamState
from dragoman.models import ModelHost, ServedModel
from dragoman.protocols import admin_fields as wire
from dragoman.server.app import App
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, has_token
from dragoman.server.auth.scopes import UNRESTRICTED
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routing import not_found_error

ROOT = "/admin/models"
POLL_SECONDS = 0.05
UNLOAD_SECONDS = 5.0
"""Time that the reply waits for a model to unload."""


async def models(app: App, exchange: HttpExchange) -> None:
    check_operator(app, exchange)
    await app.catalog.scan()
    visible = [model for model in app.catalog.list_models() if exchange.caller.may_use(model.name)]
    served = [await _describe(app, model) for model in visible]
    # Models that share an engine share its memory.
    used = {model.host.key: status.memory or 0 for model, status in zip(visible, served, strict=True)}
    await exchange.response.send_json(
        wire.encode_model_statuses(served, sum(used.values()), app.catalog.lifecycle.budget)
    )


async def change(app: App, exchange: HttpExchange) -> None:
    check_operator(app, exchange)
    # The body is ignored, but its checks stop requests from web pages of other origins.
    await exchange.read_body(app.settings.limits, bytes)
    name, _, action = exchange.path.removeprefix(f"{ROOT}/").rpartition("/")
    if action not in ("load", "unload") or not name:
        raise not_found_error(exchange, f"; try {ROOT}/NAME/load or {ROOT}/NAME/unload")
    model = await app.model(exchange, name)
    done = await (_load(model) if action == "load" else _unload(app, model))
    await exchange.response.send_json(wire.encode_model_status(await _describe(app, model)), 200 if done else 202)


async def reload(app: App, exchange: HttpExchange) -> None:
    check_operator(app, exchange)
    await exchange.read_body(app.settings.limits, bytes)
    try:
        await exchange.response.send_json(wire.encode_reload_result(await app.reload()))
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


async def _describe(app: App, model: ServedModel) -> wire.ModelStatus:
    host = model.host
    seat = app.catalog.lifecycle.residency_of(host)
    is_here = host.engine is not None and not host.is_restarting
    return wire.ModelStatus(
        id=model.name,
        state=host.state,
        engine=None if model.spec is None else model.spec.engine,
        memory=await host.measure() if is_here else None,
        slots=host.admission.slots,
        running=host.admission.running,
        waiting=host.admission.waiting + host.waiting,
        tokens_per_second=None if host.tokens_per_second is None else round(host.tokens_per_second, 1),
        keep_alive=None if seat.stays or seat.keep_alive == math.inf else seat.keep_alive,
        idle_seconds=round(time.monotonic() - seat.idle_since, 1) if is_here and not seat.running else None,
        loading_seconds=None if host.loading_seconds is None else round(host.loading_seconds, 1),
        loading_progress=host.progress,
        failure=host.failure,
    )


def check_operator(app: App, exchange: HttpExchange) -> None:
    """Require the admin token if no key is needed. The scope of a key has been checked already."""
    if exchange.caller is not UNRESTRICTED or has_token(exchange.headers, app.admin_token):
        return
    raise Unauthorized(
        "this route needs a key with the scope admin. As no keys are configured, it also accepts the header "
        f"{ADMIN_TOKEN_HEADER} with the token from the run directory of the server's home. "
        "`dragoman models` and `dragoman drain` send it."
    )


@runtime_checkable
class PooledEngine(Protocol):
    """An engine with several upstream servers."""

    def states(self) -> Sequence[UpstreamState]: ...

    def drain(self, url: str, drained: bool) -> None: ...


async def upstreams(app: App, exchange: HttpExchange) -> None:
    check_operator(app, exchange)
    await exchange.response.send_json(wire.encode_upstreams(_list_upstreams(app)))


async def drain(app: App, exchange: HttpExchange) -> None:
    check_operator(app, exchange)
    request = await exchange.read_body(app.settings.limits, wire.decode_drain)
    engine = await (await app.model(exchange, request.model)).host.ready()
    try:
        if not isinstance(engine, PooledEngine):
            raise ConfigError(f"model {quote(request.model)} has no upstream servers")
        engine.drain(request.url, request.drain)
    except ConfigError as error:
        raise NotFound(str(error)) from error
    await exchange.response.send_json(wire.encode_upstreams(_list_upstreams(app)))


def is_out(engine: object) -> bool:
    """Whether the engine has upstream servers, but none that accepts requests."""
    states = _upstream_states(engine)
    return bool(states) and all(server.state in ("out", "draining", "drained") for server in states)


def _list_upstreams(app: App) -> list[wire.UpstreamStatus]:
    return [
        wire.UpstreamStatus(
            model.name, server.url, server.state, server.running, server.failures, server.weight, server.rank
        )
        for model in app.catalog.models.values()
        for server in _upstream_states(model.host.engine)
    ]


def _upstream_states(engine: object) -> Sequence[UpstreamState]:
    return engine.states() if isinstance(engine, PooledEngine) else ()

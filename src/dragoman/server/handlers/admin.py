"""The operator's routes: which models are loaded, loading and unloading them, and a new configuration.

They need a key with the scope `admin`. Where no keys are configured they need the server's own token (see
`admin_token`): a connection from this machine is not enough.
"""

import asyncio
import math
import time

from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, InvalidConfig, ModelFailed, ModelLoading, NotFound, Unauthorized
from dragoman.models import Host, Model
from dragoman.protocols import admin as wire
from dragoman.server.app import App
from dragoman.server.auth.admin_token import HEADER, has_token
from dragoman.server.auth.scopes import ANYBODY
from dragoman.server.http_exchange import Exchange

ROOT = "/admin/models"
LOOK_SECONDS = 0.05
UNLOAD_SECONDS = 5.0
"""How long the answer waits for a model to go."""


async def models(app: App, exchange: Exchange) -> None:
    check_operator(app, exchange)
    await app.catalog.look()
    seen = [model for model in app.catalog.listed() if exchange.caller.may_ask(model.name)]
    served = [await _served(app, model) for model in seen]
    # Models that share an engine share its memory.
    used = {model.host.key: told.memory or 0 for model, told in zip(seen, served, strict=True)}
    await exchange.reply_json(wire.encode_fleet(served, sum(used.values()), app.catalog.lifecycle.budget))


async def change(app: App, exchange: Exchange) -> None:
    check_operator(app, exchange)
    # Its body means nothing; but no web page of another origin can send one that passes.
    await exchange.decoded(app.settings.limits, bytes)
    name, _, action = exchange.path.removeprefix(f"{ROOT}/").rpartition("/")
    if action not in ("load", "unload") or not name:
        raise NotFound(f"there is nothing at {exchange.path[:100]}; try {ROOT}/NAME/load or {ROOT}/NAME/unload")
    model = await app.model(exchange, name)
    done = await (_load(model) if action == "load" else _unload(app, model))
    await exchange.reply_json(wire.encode_served(await _served(app, model)), 200 if done else 202)


async def reload(app: App, exchange: Exchange) -> None:
    check_operator(app, exchange)
    await exchange.decoded(app.settings.limits, bytes)
    try:
        await exchange.reply_json(wire.encode_reloaded(await app.reload()))
    except ConfigError as error:
        raise InvalidConfig(f"the configuration stays as it was: {error}") from error


async def _load(model: Model) -> bool:
    """Whether it is there, after waiting as long as a request would. One that has failed is tried again at once."""
    try:
        if model.host.state == "failed":
            model.host.load()
        await model.host.ready()
    except ModelLoading:
        return False
    except ModelFailed as error:
        # Who may ask for this may read the reason.
        raise ModelFailed(model.host.failure or error.message, retry_after=error.retry_after or 1) from error
    return True


async def _unload(app: App, model: Model) -> bool:
    """Whether the model is unloaded. Its running requests finish first, however long they take; a load is aborted."""
    host, before = model.host, model.host.engine
    app.catalog.lifecycle.dismiss(host)
    patience = time.monotonic() + UNLOAD_SECONDS
    while not (has_gone := _has_gone(host, before)) and time.monotonic() < patience:  # noqa: ASYNC110 (seldom)
        await asyncio.sleep(LOOK_SECONDS)
    return has_gone


def _has_gone(host: Host, before: Engine | None) -> bool:
    """Whether it was out once since; for those who wait it may be on its way back."""
    if host.state == "loading":
        return before is not None and host.engine is not before
    return host.state != "unloading" and (host.engine is None or host.engine is not before)


async def _served(app: App, model: Model) -> wire.ServedModel:
    host = model.host
    seat = app.catalog.lifecycle.seat(host)
    is_here = host.engine is not None and not host.is_returning
    return wire.ServedModel(
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


def check_operator(app: App, exchange: Exchange) -> None:
    """Require the admin token if no key is needed. The scope of a key has been checked already."""
    if exchange.caller is not ANYBODY or has_token(exchange.headers, app.admin_token):
        return
    raise Unauthorized(
        f"this route needs a key with the scope admin, or, since no keys are configured, the header {HEADER} with the "
        "token that the server keeps in the folder run of its home; `dragoman models` and `dragoman drain` send it"
    )

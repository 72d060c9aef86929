"""The operator's view of the servers behind models: which there are, and which of them get nothing new."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dragoman.core.errors import ConfigError, NotFound, quote
from dragoman.engines.upstream.pool import PlaceState
from dragoman.protocols import admin as wire
from dragoman.server.app import App
from dragoman.server.handlers.admin import check_operator
from dragoman.server.http_exchange import Exchange


@runtime_checkable
class Pooled(Protocol):
    """An engine that has places."""

    def states(self) -> "Sequence[PlaceState]": ...

    def drain(self, url: str, drained: bool) -> None: ...


async def show(app: App, exchange: Exchange) -> None:
    check_operator(app, exchange)
    await exchange.reply_json(wire.encode_upstreams(_listed(app)))


async def drain(app: App, exchange: Exchange) -> None:
    check_operator(app, exchange)
    asked = await exchange.decoded(app.settings.limits, wire.decode_drain)
    engine = await (await app.model(exchange, asked.model)).host.ready()
    try:
        if not isinstance(engine, Pooled):
            raise ConfigError(f"model {quote(asked.model)} runs here")
        engine.drain(asked.url, asked.drain)
    except ConfigError as error:
        raise NotFound(str(error)) from error
    await exchange.reply_json(wire.encode_upstreams(_listed(app)))


def is_out(engine: object) -> bool:
    """Whether it has servers, and none of them can be asked."""
    states = _states(engine)
    return bool(states) and all(place.state in ("out", "draining", "drained") for place in states)


def _listed(app: App) -> list[wire.ListedPlace]:
    return [
        wire.ListedPlace(model.name, place.url, place.state, place.running, place.failures, place.weight, place.rank)
        for model in app.catalog.models.values()
        for place in _states(model.host.engine)
    ]


def _states(engine: object) -> "Sequence[PlaceState]":
    return engine.states() if isinstance(engine, Pooled) else ()

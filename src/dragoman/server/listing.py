"""The routes that generate nothing: models, health, tokens, prompts."""

from typing import TYPE_CHECKING

import msgspec

from dragoman import __version__
from dragoman.catalog import Model
from dragoman.engines.interface import Engine
from dragoman.engines.run import call
from dragoman.errors import NotSupported
from dragoman.generate import check
from dragoman.protocols import ANTHROPIC, PROTOCOLS
from dragoman.protocols import models as wire_models
from dragoman.protocols import tokens as wire_tokens
from dragoman.protocols.render import encode_prompt
from dragoman.server.exchange import Exchange
from dragoman.server.respond import silent_engine

if TYPE_CHECKING:
    from dragoman.server.app import App


async def root(app: "App", exchange: Exchange) -> None:
    await exchange.reply_json({"name": "dragoman", "version": __version__})


async def health(app: "App", exchange: Exchange) -> None:
    await exchange.reply_json({"status": "ok"})


async def ready(app: "App", exchange: Exchange) -> None:
    """Ready: the default model can answer now. Asking is enough for it to be loaded."""
    default = app.catalog.resolve("")
    is_ready = default.host.state == "ready"
    if default.host.state == "cold":
        default.host.load()
    states = {model.name: model.host.state for model in app.catalog.models.values()}
    status = {"status": "ready" if is_ready else "not ready", "models": states}
    await exchange.reply_json(status, 200 if is_ready else 503)


def _listed(app: "App", model: Model) -> wire_models.ListedModel:
    info, engine = model.info, model.host.engine
    return wire_models.ListedModel(
        name=model.name,
        created=app.created,
        owner=info.owner,
        context=info.context,
        format=None if engine is None else info.format,
        device=None if engine is None else engine.device,
        state=model.host.state,
    )


async def models(app: "App", exchange: Exchange) -> None:
    listed = [_listed(app, model) for model in app.catalog.models.values()]
    if exchange.family is ANTHROPIC:
        await exchange.reply_json(wire_models.encode_anthropic_models(listed, exchange.query()))
    else:
        await exchange.reply_json(wire_models.encode_models(listed))


async def one_model(app: "App", exchange: Exchange) -> None:
    model = app.catalog.resolve(exchange.path.removeprefix("/v1/models/"))
    is_anthropic = exchange.family is ANTHROPIC
    encode = wire_models.encode_anthropic_model if is_anthropic else wire_models.encode_model
    await exchange.reply_json(encode(_listed(app, model)))


async def render(app: "App", exchange: Exchange) -> None:
    """The prompt that a chat would begin with: decoded and checked as the chat would be."""
    decoded = await exchange.decoded(app.settings.limits, PROTOCOLS["chat"].decode)
    model = app.catalog.resolve(decoded.model)
    exchange.record.model = model.name
    engine = await _able(app, exchange, model, "render", "its prompts")
    request = msgspec.structs.replace(decoded, id=exchange.record.id, model=model.name)
    ignored = check(request, model.host.supports, app.is_strict(exchange))
    if ignored:
        exchange.ignore(ignored)
    shown = await call(engine.render, request)
    await exchange.reply_json(encode_prompt(model.name, shown.text, shown.tokens, shown.format))


async def tokenize(app: "App", exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_text)
    model = app.catalog.resolve(asked.model)
    engine = await _able(app, exchange, model, "tokenize", "its tokens")
    tokens = await call(engine.tokenize, asked.text, asked.special)
    await exchange.reply_json(wire_tokens.encode_tokens(tokens, model.info.context))


async def detokenize(app: "App", exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_tokens)
    engine = await _able(app, exchange, app.catalog.resolve(asked.model), "tokenize", "its tokens")
    await exchange.reply_json(wire_tokens.encode_text(await call(engine.detokenize, asked.tokens)))


async def _able(app: "App", exchange: Exchange, model: Model, feature: str, told: str) -> Engine:
    """The model's engine, if it tells that, with the time it has for it running."""
    engine = await model.host.ready()
    if feature not in model.host.supports:
        raise NotSupported(f"model '{model.name}' does not tell {told}")
    exchange.expect(app.settings.limits.stall_seconds, silent_engine)
    return engine

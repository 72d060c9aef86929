"""The routes that generate nothing: models, health, tokens."""

from typing import TYPE_CHECKING

from dragoman import __version__
from dragoman.catalog import Model
from dragoman.engines.interface import Engine
from dragoman.engines.run import call
from dragoman.errors import NotSupported
from dragoman.protocols import ANTHROPIC
from dragoman.protocols import models as wire_models
from dragoman.protocols import tokens as wire_tokens
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


async def _listed(app: "App", model: Model) -> wire_models.ListedModel:
    engine = model.host.engine
    known = model.info if engine is not None else await model.foreseen()
    return wire_models.ListedModel(
        name=model.name,
        created=app.created,
        owner=model.info.owner,
        context=known.context,
        format=known.format,
        device=None if engine is None else engine.device,
        state=model.host.state,
    )


async def models(app: "App", exchange: Exchange) -> None:
    listed = [await _listed(app, model) for model in await app.catalog.listed()]
    if exchange.family is ANTHROPIC:
        await exchange.reply_json(wire_models.encode_anthropic_models(listed, exchange.query()))
    else:
        await exchange.reply_json(wire_models.encode_models(listed))


async def one_model(app: "App", exchange: Exchange) -> None:
    model = app.catalog.resolve(exchange.path.removeprefix("/v1/models/"))
    is_anthropic = exchange.family is ANTHROPIC
    encode = wire_models.encode_anthropic_model if is_anthropic else wire_models.encode_model
    await exchange.reply_json(encode(await _listed(app, model)))


async def tokenize(app: "App", exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_text)
    model, engine = await _tokenizer(app, exchange, asked.model)
    tokens = await call(engine.tokenize, asked.text, asked.special)
    await exchange.reply_json(wire_tokens.encode_tokens(tokens, model.info.context))


async def detokenize(app: "App", exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_tokens)
    _, engine = await _tokenizer(app, exchange, asked.model)
    await exchange.reply_json(wire_tokens.encode_text(await call(engine.detokenize, asked.tokens)))


async def _tokenizer(app: "App", exchange: Exchange, name: str) -> tuple[Model, Engine]:
    """The model and its engine, if it tells its tokens, with the time it has for it running."""
    model = app.catalog.resolve(name)
    exchange.record.model = model.name
    engine = await model.host.ready()
    if "tokenize" not in model.host.supports:
        raise NotSupported(f"model '{model.name}' does not tell its tokens")
    exchange.expect(app.settings.limits.stall_seconds, silent_engine)
    return model, engine

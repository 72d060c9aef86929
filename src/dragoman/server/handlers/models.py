"""The routes that generate nothing: models, health, tokens."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported
from dragoman.core.version import __version__
from dragoman.models import Host, Model
from dragoman.pipeline.event_stream import call
from dragoman.protocols import models as wire_models
from dragoman.protocols import tokenize as wire_tokens
from dragoman.protocols.registry import ANTHROPIC
from dragoman.server.app import App
from dragoman.server.handlers.generation import silent_engine
from dragoman.server.handlers.upstreams import is_out
from dragoman.server.http_exchange import Exchange


async def root(app: App, exchange: Exchange) -> None:
    await exchange.reply_json({"name": "dragoman", "version": __version__})


async def health(app: App, exchange: Exchange) -> None:
    await exchange.reply_json({"status": "ok"})


async def ready(app: App, exchange: Exchange) -> None:
    """Ready: the default model can answer, at once or, where it has been unloaded in between, after a moment.

    One that has failed, or whose process has died and is being started again, cannot, unless another answers for it.

    Asking is enough for it to be loaded the first time, and now and then again where it has failed: who is not ready is
    asked by nobody else. A server that is stopping is not ready.
    """
    default = await app.catalog.find("")
    host = default.host
    can_answer = any(not _is_away(model.host) for model in (default, *app.catalog.fallbacks(default)))
    is_ready = host.is_known and can_answer and not app.is_stopping
    if host.state == "cold" and not host.is_known:
        host.load()
    host.load_again()
    # Load balancers need only the status. Callers with a key also see the models of that key.
    caller = app.valid_caller(exchange)
    seen = () if caller is None else [model for model in app.catalog.models.values() if caller.may_ask(model.name)]
    states = {model.name: _state(model) for model in seen}
    status = {"status": "ready" if is_ready else "not ready", "models": states}
    await exchange.reply_json(status, 200 if is_ready else 503)


def _is_away(host: Host) -> bool:
    return host.failure is not None or host.is_returning or is_out(host.engine)


def _state(model: Model) -> str:
    """`out`: it is there, but nobody behind it is."""
    return "out" if model.host.state == "ready" and is_out(model.host.engine) else model.host.state


async def _listed(app: App, model: Model) -> wire_models.ListedModel:
    engine = model.host.engine
    known = model.info if engine is not None else await model.foreseen()
    return wire_models.ListedModel(
        name=model.name,
        created=app.created,
        owner=model.info.owner,
        context=known.context,
        format=known.format,
        device=None if engine is None else engine.device,
        state=_state(model),
        loading_seconds=model.host.loading_seconds,
        loading_progress=model.host.progress,
        architecture=None if model.found is None else model.found.architecture,
        size=None if model.found is None else model.found.size,
        quantization=None if model.found is None else model.found.quantisation,
    )


async def models(app: App, exchange: Exchange) -> None:
    await app.catalog.look()
    seen = [
        model for entry in app.catalog.listed() for model in await entry.all() if exchange.caller.may_ask(model.name)
    ]
    listed = [await _listed(app, model) for model in seen]
    if exchange.family is ANTHROPIC:
        await exchange.reply_json(wire_models.encode_anthropic_models(listed, exchange.query()))
    else:
        await exchange.reply_json(wire_models.encode_models(listed))


async def one_model(app: App, exchange: Exchange) -> None:
    model = await app.model(exchange, exchange.path.removeprefix("/v1/models/"))
    is_anthropic = exchange.family is ANTHROPIC
    encode = wire_models.encode_anthropic_model if is_anthropic else wire_models.encode_model
    await exchange.reply_json(encode(await _listed(app, model)))


async def tokenize(app: App, exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_text)
    async with _tokenizer(app, exchange, asked.model) as (model, engine):
        tokens = await call(engine.tokenize, asked.text, asked.special)
        context = model.info.context
    await exchange.reply_json(wire_tokens.encode_tokens(tokens, context))


async def detokenize(app: App, exchange: Exchange) -> None:
    asked = await exchange.decoded(app.settings.limits, wire_tokens.decode_tokens)
    async with _tokenizer(app, exchange, asked.model) as (_, engine):
        text = await call(engine.detokenize, asked.tokens)
    await exchange.reply_json(wire_tokens.encode_text(text))


@asynccontextmanager
async def _tokenizer(app: App, exchange: Exchange, name: str) -> AsyncIterator[tuple[Model, Engine]]:
    """The model and its engine, if it tells its tokens, with the time it has for it running."""
    model = await app.model(exchange, name)
    async with model.host.engaged() as engine:
        if "tokenize" not in model.host.supports:
            raise NotSupported(f"model '{model.name}' does not tell its tokens")
        exchange.expect(app.settings.limits.stall_seconds, silent_engine)
        yield model, engine

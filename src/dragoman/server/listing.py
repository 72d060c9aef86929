"""The routes that generate nothing: models, health, tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from dragoman import __version__
from dragoman.catalog import Model
from dragoman.engines.run import call
from dragoman.errors import BadRequest
from dragoman.protocols import wire
from dragoman.server.exchange import Exchange

if TYPE_CHECKING:
    from dragoman.server.app import App


async def root(app: "App", exchange: Exchange) -> None:
    await exchange.reply_json({"name": "dragoman", "version": __version__})


async def health(app: "App", exchange: Exchange) -> None:
    await exchange.reply_json({"status": "ok"})


async def ready(app: "App", exchange: Exchange) -> None:
    """Ready: the default model can answer now."""
    states = {model.name: model.host.state for model in app.catalog.models.values()}
    default = app.catalog.default
    is_ready = default is not None and states[app.catalog.resolve(default).name] == "ready"
    status = {"status": "ready" if is_ready else "not ready", "models": states}
    await exchange.reply_json(status, 200 if is_ready else 503)


def _model(app: "App", model: Model) -> dict[str, Any]:
    info = model.info
    listed: dict[str, Any] = {"id": model.name, "object": "model", "created": app.created, "owned_by": info.owner}
    if info.context is not None:
        listed["max_model_len"] = info.context
    return {**listed, "state": model.host.state}


async def models(app: "App", exchange: Exchange) -> None:
    data = [_model(app, model) for model in app.catalog.models.values()]
    await exchange.reply_json({"object": "list", "data": data})


async def one_model(app: "App", exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    await exchange.reply_json(_model(app, app.catalog.resolve(name)))


class TokenizeFields(msgspec.Struct, frozen=True):
    """`content` and `prompt` are two names for the text; control tokens in it are text unless `parse_special`."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    parse_special: bool = False


class DetokenizeFields(msgspec.Struct, frozen=True):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


async def tokenize(app: "App", exchange: Exchange) -> None:
    fields = wire.convert(wire.parse(await exchange.body(app.settings.limits)), TokenizeFields)
    text = fields.content if fields.content is not None else fields.prompt
    if text is None:
        raise BadRequest("content: required, but missing", param="content")
    model = app.catalog.resolve(fields.model or "")
    engine = await model.host.ready()
    tokens: Sequence[int] = await call(engine.tokenize, text, fields.parse_special)
    await exchange.reply_json({"tokens": tokens, "count": len(tokens), "max_model_len": model.info.context})


async def detokenize(app: "App", exchange: Exchange) -> None:
    fields = wire.convert(wire.parse(await exchange.body(app.settings.limits)), DetokenizeFields)
    engine = await app.catalog.resolve(fields.model or "").host.ready()
    text = await call(engine.detokenize, fields.tokens)
    await exchange.reply_json({"content": text, "prompt": text})

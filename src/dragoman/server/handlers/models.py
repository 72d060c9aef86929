"""Handlers for model listings, health and readiness."""

from dragoman.core.version import __version__
from dragoman.models import ModelHost, ServedModel
from dragoman.protocols import model_list as wire_models
from dragoman.protocols.registry import ANTHROPIC
from dragoman.server.app import App
from dragoman.server.handlers.admin import is_out
from dragoman.server.http_exchange import HttpExchange


async def root(app: App, exchange: HttpExchange) -> None:
    await exchange.response.send_json({"name": "dragoman", "version": __version__})


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
    return host.failure is not None or host.is_restarting or is_out(host.engine)


def _state(model: ServedModel) -> str:
    """The state of the host; `out` if no server behind a ready model can answer."""
    return "out" if model.host.state == "ready" and is_out(model.host.engine) else model.host.state


async def _describe(app: App, model: ServedModel) -> wire_models.ModelEntry:
    engine = model.host.engine
    known = model.info if engine is not None else await model.foreseen()
    return wire_models.ModelEntry(
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


async def models(app: App, exchange: HttpExchange) -> None:
    await app.catalog.scan()
    visible = [
        model
        for entry in app.catalog.list_models()
        for model in await entry.all()
        if exchange.caller.may_use(model.name)
    ]
    listed = [await _describe(app, model) for model in visible]
    if exchange.response.family is ANTHROPIC:
        await exchange.response.send_json(wire_models.encode_anthropic_models(listed, exchange.query()))
    else:
        await exchange.response.send_json(wire_models.encode_models(listed))


async def one_model(app: App, exchange: HttpExchange) -> None:
    model = await app.model(exchange, exchange.path.removeprefix("/v1/models/"))
    is_anthropic = exchange.response.family is ANTHROPIC
    encode = wire_models.encode_anthropic_model if is_anthropic else wire_models.encode_model
    await exchange.response.send_json(encode(await _describe(app, model)))

"""The routes of the server, and the app that serves them."""

from collections.abc import Sequence
from functools import partial

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.models import EngineFactory
from dragoman.protocols.registry import ANTHROPIC, OPENAI, PROTOCOLS, ServerProtocol
from dragoman.protocols.responses.items import PREFIX
from dragoman.server.app import App, SettingsLoader
from dragoman.server.base_app import METRICS_PATH, RESPONSES_PATH, Methods, Route, RouteTable, SharedRoute
from dragoman.server.handlers import embeddings, models, responses, stats, tokens
from dragoman.server.handlers.generation import answer

ENGINES_ONLY = Settings(models_dir=())
"""Settings for an app that serves only the given engines."""


def _generation_route(protocol: ServerProtocol) -> SharedRoute:
    return SharedRoute(partial(answer, protocol=protocol), protocol.id_prefix, protocol.family)


PATHS: dict[str, Methods[App]] = {
    "/": {"GET": Route(models.root, is_open=True)},
    "/health": {"GET": Route(models.health, is_open=True)},
    "/ready": {"GET": Route(models.ready, is_open=True)},
    "/v1/models": {"GET": Route(models.list_models)},
    "/v1/chat/completions": {"POST": _generation_route(PROTOCOLS["chat"])},
    "/v1/chat/completions/render": {"POST": Route(tokens.render)},
    "/v1/completions": {"POST": _generation_route(PROTOCOLS["completions"])},
    "/v1/messages": {"POST": _generation_route(PROTOCOLS["messages"])},
    "/v1/messages/count_tokens": {"POST": Route(tokens.messages_count, family=ANTHROPIC)},
    RESPONSES_PATH: {
        "POST": SharedRoute(responses.create, PREFIX, OPENAI),
        "GET": Route(responses.no_websocket, family=OPENAI),
    },
    f"{RESPONSES_PATH}/input_tokens": {"POST": Route(responses.count, family=OPENAI)},
    "/v1/embeddings": {"POST": Route(embeddings.embeddings, "emb-", OPENAI)},
    "/v1/rerank": {"POST": Route(embeddings.rerank, "rerank-", OPENAI)},
    "/tokenize": {"POST": Route(tokens.tokenize)},
    "/detokenize": {"POST": Route(tokens.detokenize)},
    METRICS_PATH: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    models.ADMIN_ROOT: {"GET": Route(models.model_states)},
    "/admin/reload": {"POST": Route(models.reload)},
    "/admin/upstreams": {"GET": Route(models.upstreams)},
    "/admin/upstreams/drain": {"POST": Route(models.drain)},
}

PREFIX_PATHS: dict[str, Methods[App]] = {
    "/v1/models/": {"GET": Route(models.one_model)},
    f"{RESPONSES_PATH}/": {
        "GET": Route(responses.show, family=OPENAI),
        "DELETE": Route(responses.delete, family=OPENAI),
        "POST": Route(responses.cancel, family=OPENAI),
    },
    f"{models.ADMIN_ROOT}/": {"POST": Route(models.change)},
}

ROUTES = RouteTable(PATHS, PREFIX_PATHS)


def build_app(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reload_settings: SettingsLoader | None = None,
    engine_factory: EngineFactory | None = None,
) -> App:
    """`reload_settings` loads the settings again; `engine_factory` makes engines that run elsewhere."""
    return App(ROUTES, settings, engines, reload_settings, engine_factory)


def create_app(*engines: Engine, settings: Settings | None = None) -> App:
    """Make an ASGI app that serves the engines and the models of the settings. It can be mounted into another app."""
    return build_app(settings or ENGINES_ONLY, engines)

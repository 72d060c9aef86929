"""The routes of the server, and the app that serves them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import get_args

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError
from dragoman.core.types import RouteScope
from dragoman.models import EngineFactory
from dragoman.protocols.registry import ANTHROPIC, PROTOCOLS, load_protocol
from dragoman.protocols.responses.items import PREFIX
from dragoman.protocols.wire_protocol import OPENAI, WireProtocol
from dragoman.server.app import App, SettingsLoader
from dragoman.server.auth.host_user import Identify
from dragoman.server.base_app import METRICS_PATH, RESPONSES_PATH, Methods, Route, RouteTable, SharedRoute
from dragoman.server.handlers import (
    batches,
    conversations,
    embeddings,
    files,
    models,
    responses,
    stats,
    stored_responses,
    tokens,
    usage,
    websocket,
)
from dragoman.server.handlers.generation import answer
from dragoman.server.hooks import Hooks

ENGINES_ONLY = Settings(models_dir=())
"""Settings for an app that serves only the given engines."""


def _generation_paths(protocols: Iterable[WireProtocol]) -> Iterator[tuple[str, Methods[App]]]:
    for protocol in protocols:
        handler = partial(answer, protocol=protocol)
        route = SharedRoute(handler, protocol.id_prefix, protocol.own_family(), scope=protocol.scope, is_recorded=True)
        yield from ((path, {"POST": route}) for path in protocol.paths)


PATHS: dict[str, Methods[App]] = {
    "/": {"GET": Route(models.root, is_open=True)},
    "/health": {"GET": Route(models.health, is_open=True)},
    "/ping": {"GET": Route(models.health, is_open=True)},
    "/version": {"GET": Route(models.version, is_open=True)},
    "/ready": {"GET": Route(models.ready, is_open=True)},
    "/v1/models": {"GET": Route(models.list_models)},
    **dict(_generation_paths(PROTOCOLS.values())),
    "/v1/chat/completions/render": {"POST": Route(tokens.render)},
    "/v1/chat/completions/input_tokens": {"POST": Route(tokens.chat_count, is_recorded=True)},
    "/v1/messages/count_tokens": {"POST": Route(tokens.messages_count, family=ANTHROPIC, is_recorded=True)},
    RESPONSES_PATH: {
        "POST": SharedRoute(responses.create, PREFIX, OPENAI, is_recorded=True),
        "GET": SharedRoute(websocket.connect, family=OPENAI, opens_websocket=True),
    },
    f"{RESPONSES_PATH}/input_tokens": {"POST": Route(responses.count, family=OPENAI, is_recorded=True)},
    f"{RESPONSES_PATH}/compact": {"POST": SharedRoute(responses.compact, PREFIX, OPENAI, is_recorded=True)},
    conversations.PATH: {"POST": Route(conversations.create, family=OPENAI)},
    batches.PATH: {"POST": Route(batches.create, family=OPENAI), "GET": Route(batches.list_batches, family=OPENAI)},
    batches.ANTHROPIC_PATH: {
        "POST": SharedRoute(batches.create_anthropic, family=ANTHROPIC),
        "GET": Route(batches.list_anthropic, family=ANTHROPIC),
    },
    files.PATH: {"POST": SharedRoute(files.create), "GET": Route(files.list_files)},
    "/v1/embeddings": {"POST": Route(embeddings.embeddings, "emb-", OPENAI, is_recorded=True)},
    "/v1/rerank": {"POST": Route(embeddings.rerank, "rerank-", OPENAI, is_recorded=True)},
    "/tokenize": {"POST": Route(tokens.tokenize)},
    "/detokenize": {"POST": Route(tokens.detokenize)},
    METRICS_PATH: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    models.ADMIN_ROOT: {"GET": Route(models.model_states)},
    "/admin/usage": {"GET": Route(usage.usage)},
    "/v1/organization/usage/completions": {"GET": Route(usage.completions, family=OPENAI)},
    "/admin/reload": {"POST": Route(models.reload)},
    "/admin/upstreams": {"GET": Route(models.upstreams)},
    "/admin/upstreams/drain": {"POST": Route(models.drain)},
}

PREFIX_PATHS: dict[str, Methods[App]] = {
    "/v1/models/": {"GET": Route(models.one_model)},
    f"{RESPONSES_PATH}/": {
        "GET": SharedRoute(stored_responses.show, family=OPENAI),
        "DELETE": Route(stored_responses.delete, family=OPENAI),
        "POST": Route(stored_responses.cancel, family=OPENAI),
    },
    f"{conversations.PATH}/": {
        "GET": Route(conversations.show, family=OPENAI),
        "POST": Route(conversations.change, family=OPENAI),
        "DELETE": Route(conversations.delete, family=OPENAI),
    },
    f"{files.PATH}/": {"GET": SharedRoute(files.show), "DELETE": Route(files.delete)},
    f"{batches.PATH}/": {"GET": Route(batches.show, family=OPENAI), "POST": Route(batches.cancel, family=OPENAI)},
    f"{batches.ANTHROPIC_PATH}/": {
        "GET": SharedRoute(batches.show_anthropic, family=ANTHROPIC),
        "POST": Route(batches.cancel_anthropic, family=ANTHROPIC),
        "DELETE": Route(batches.delete_anthropic, family=ANTHROPIC),
    },
    f"{models.ADMIN_ROOT}/": {"POST": Route(models.change)},
}


def _check_protocol(protocol: WireProtocol) -> None:
    name, paths = type(protocol).__name__, getattr(protocol, "paths", ())
    if not paths or not isinstance(paths, tuple | list):
        raise ConfigError(f'protocol {name}: `paths` must list at least one path, as in ("/complete",)')
    if protocol.scope not in get_args(RouteScope):
        raise ConfigError(
            f"protocol {name}: unknown scope {protocol.scope!r}; one of {', '.join(get_args(RouteScope))}"
        )


def build_routes(settings: Settings, protocols: Sequence[WireProtocol] = ()) -> RouteTable[App]:
    """The routes of the server, of the given protocols, and of those that the settings name."""
    paths = dict(PATHS)
    added = [*protocols, *map(load_protocol, settings.protocols)]
    for protocol in added:
        _check_protocol(protocol)
    for path, methods in _generation_paths(added):
        if path in paths or any(path.startswith(prefix) for prefix in PREFIX_PATHS):
            raise ConfigError(f"the path {path} is taken; give the protocol another one")
        if not path.startswith("/"):
            raise ConfigError(f"the path {path!r} of a protocol does not begin with /")
        paths[path] = methods
    return RouteTable(paths, PREFIX_PATHS)


def build_app(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reload_settings: SettingsLoader | None = None,
    engine_factory: EngineFactory | None = None,
    protocols: Sequence[WireProtocol] = (),
) -> App:
    """`reload_settings` loads the settings again; `engine_factory` makes engines that run elsewhere."""
    return App(build_routes(settings, protocols), settings, engines, reload_settings, engine_factory)


def create_app(
    *engines: Engine,
    settings: Settings | None = None,
    protocols: Sequence[WireProtocol] = (),
    identify: Identify | None = None,
    hooks: Hooks | None = None,
) -> App:
    """Make an ASGI app that serves the engines and the models of the settings. It can be mounted into another app.

    `protocols` are wire protocols of your own, beside those that the settings name. `identify` gets the ASGI scope of a
    request and returns its user in the outer app; without it, that is `scope["user"]`.
    """
    app = build_app(settings or ENGINES_ONLY, engines, protocols=protocols)
    app.identify, app.hooks = identify, hooks
    return app

"""The routes of the server."""

from functools import partial

from dragoman.protocols.registry import ANTHROPIC, OPENAI, PROTOCOLS, Protocol
from dragoman.protocols.responses import PREFIX
from dragoman.server.base_app import METRICS_PATH
from dragoman.server.handlers import admin, embeddings, models, responses, stats, tokens
from dragoman.server.handlers.generation import answer
from dragoman.server.routing import RESPONSES_PATH, Route, RouteTable


def _generation_route(protocol: Protocol) -> Route:
    handler = partial(answer, protocol=protocol)
    return Route(handler, protocol.id_prefix, protocol.family, runs_in_frontend=True)


PATHS = {
    "/": {"GET": Route(models.root, is_open=True)},
    "/health": {"GET": Route(models.health, is_open=True)},
    "/ready": {"GET": Route(models.ready, is_open=True)},
    "/v1/models": {"GET": Route(models.models)},
    "/v1/chat/completions": {"POST": _generation_route(PROTOCOLS["chat"])},
    "/v1/chat/completions/render": {"POST": Route(tokens.render)},
    "/v1/completions": {"POST": _generation_route(PROTOCOLS["completions"])},
    "/v1/messages": {"POST": _generation_route(PROTOCOLS["messages"])},
    "/v1/messages/count_tokens": {"POST": Route(tokens.messages_count, family=ANTHROPIC)},
    RESPONSES_PATH: {
        "POST": Route(responses.create, PREFIX, OPENAI, runs_in_frontend=True),
        "GET": Route(responses.no_websocket, family=OPENAI),
    },
    f"{RESPONSES_PATH}/input_tokens": {"POST": Route(responses.count, family=OPENAI)},
    "/v1/embeddings": {"POST": Route(embeddings.embeddings, "emb-", OPENAI)},
    "/v1/rerank": {"POST": Route(embeddings.rerank, "rerank-", OPENAI)},
    "/tokenize": {"POST": Route(tokens.tokenize)},
    "/detokenize": {"POST": Route(tokens.detokenize)},
    METRICS_PATH: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    admin.ROOT: {"GET": Route(admin.models)},
    "/admin/reload": {"POST": Route(admin.reload)},
    "/admin/upstreams": {"GET": Route(admin.upstreams)},
    "/admin/upstreams/drain": {"POST": Route(admin.drain)},
}

PREFIX_PATHS = {
    "/v1/models/": {"GET": Route(models.one_model)},
    f"{RESPONSES_PATH}/": {
        "GET": Route(responses.show, family=OPENAI),
        "DELETE": Route(responses.delete, family=OPENAI),
        "POST": Route(responses.cancel, family=OPENAI),
    },
    f"{admin.ROOT}/": {"POST": Route(admin.change)},
}

ROUTES = RouteTable(PATHS, PREFIX_PATHS)

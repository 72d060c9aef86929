"""The routes of the server: path, method, handler."""

from functools import partial

from dragoman.protocols.registry import ANTHROPIC, OPENAI, PROTOCOLS, Protocol
from dragoman.protocols.responses import PREFIX
from dragoman.server.base_app import METRICS_PATH
from dragoman.server.handlers import admin, embeddings, models, prompts, responses, stats, upstreams
from dragoman.server.handlers.generation import answer
from dragoman.server.http.websocket import RESPONSES_PATH
from dragoman.server.routing import Route, RouteTable


def _generates(protocol: Protocol) -> Route:
    handler = partial(answer, protocol=protocol)
    return Route(handler, protocol.id_prefix, protocol.family, is_fronted=True)


PATHS = {
    "/": {"GET": Route(models.root, is_open=True)},
    "/health": {"GET": Route(models.health, is_open=True)},
    "/ready": {"GET": Route(models.ready, is_open=True)},
    "/v1/models": {"GET": Route(models.models)},
    "/v1/chat/completions": {"POST": _generates(PROTOCOLS["chat"])},
    "/v1/chat/completions/render": {"POST": Route(prompts.render)},
    "/v1/completions": {"POST": _generates(PROTOCOLS["completions"])},
    "/v1/messages": {"POST": _generates(PROTOCOLS["messages"])},
    "/v1/messages/count_tokens": {"POST": Route(prompts.messages_count, family=ANTHROPIC)},
    RESPONSES_PATH: {
        "POST": Route(responses.create, PREFIX, OPENAI, is_fronted=True),
        "GET": Route(responses.no_websocket, family=OPENAI),
    },
    f"{RESPONSES_PATH}/input_tokens": {"POST": Route(responses.count, family=OPENAI)},
    "/v1/embeddings": {"POST": Route(embeddings.embeddings, "emb-", OPENAI)},
    "/v1/rerank": {"POST": Route(embeddings.rerank, "rerank-", OPENAI)},
    "/tokenize": {"POST": Route(models.tokenize)},
    "/detokenize": {"POST": Route(models.detokenize)},
    METRICS_PATH: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    admin.ROOT: {"GET": Route(admin.models)},
    "/admin/reload": {"POST": Route(admin.reload)},
    "/admin/upstreams": {"GET": Route(upstreams.show)},
    "/admin/upstreams/drain": {"POST": Route(upstreams.drain)},
}

BELOW = {
    "/v1/models/": {"GET": Route(models.one_model)},
    f"{RESPONSES_PATH}/": {
        "GET": Route(responses.show, family=OPENAI),
        "DELETE": Route(responses.delete, family=OPENAI),
        "POST": Route(responses.cancel, family=OPENAI),
    },
    f"{admin.ROOT}/": {"POST": Route(admin.change)},
}

ROUTES = RouteTable(PATHS, BELOW)

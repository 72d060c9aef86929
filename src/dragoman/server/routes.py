"""What there is to ask for: paths, methods, and who answers."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dragoman.core.errors import DragomanError, MethodNotAllowed, NotFound
from dragoman.protocols.registry import ANTHROPIC, OPENAI, PROTOCOLS, Family, Protocol
from dragoman.protocols.responses import PREFIX
from dragoman.server.handlers import admin, embeddings, models, prompts, responses, stats, upstreams
from dragoman.server.handlers.generation import answer
from dragoman.server.http_exchange import Exchange

Handler = Callable[..., Awaitable[None]]
"""Is given the door that the request came in by, and the exchange."""


@dataclass(frozen=True)
class Route:
    handler: Handler
    id_prefix: str = "req-"
    family: Family | None = None
    """In whose words it tells of errors; None: in those of whoever asks."""
    is_open: bool = False
    """Whether it needs no key."""
    is_fronted: bool = False
    """Whether a front end answers it itself: what takes the most work, and has no state of its own."""


def _generates(protocol: Protocol) -> Route:
    handler = partial(answer, protocol=protocol)
    return Route(handler, protocol.id_prefix, protocol.family, is_fronted=True)


ROUTES = {
    "/": {"GET": Route(models.root, is_open=True)},
    "/health": {"GET": Route(models.health, is_open=True)},
    "/ready": {"GET": Route(models.ready, is_open=True)},
    "/v1/models": {"GET": Route(models.models)},
    "/v1/chat/completions": {"POST": _generates(PROTOCOLS["chat"])},
    "/v1/chat/completions/render": {"POST": Route(prompts.render)},
    "/v1/completions": {"POST": _generates(PROTOCOLS["completions"])},
    "/v1/messages": {"POST": _generates(PROTOCOLS["messages"])},
    "/v1/messages/count_tokens": {"POST": Route(prompts.messages_count, family=ANTHROPIC)},
    responses.ROOT: {
        "POST": Route(responses.create, PREFIX, OPENAI, is_fronted=True),
        "GET": Route(responses.no_websocket, family=OPENAI),
    },
    f"{responses.ROOT}/input_tokens": {"POST": Route(responses.count, family=OPENAI)},
    "/v1/embeddings": {"POST": Route(embeddings.embeddings, "emb-", OPENAI)},
    "/v1/rerank": {"POST": Route(embeddings.rerank, "rerank-", OPENAI)},
    "/tokenize": {"POST": Route(models.tokenize)},
    "/detokenize": {"POST": Route(models.detokenize)},
    stats.METRICS: {"GET": Route(stats.metrics)},
    "/stats": {"GET": Route(stats.stats)},
    admin.ROOT: {"GET": Route(admin.models)},
    "/admin/reload": {"POST": Route(admin.reload)},
    "/admin/upstreams": {"GET": Route(upstreams.show)},
    "/admin/upstreams/drain": {"POST": Route(upstreams.drain)},
}
"""Path, method, route."""

ROUTES_BELOW = {
    "/v1/models/": {"GET": Route(models.one_model)},
    f"{responses.ROOT}/": {
        "GET": Route(responses.show, family=OPENAI),
        "DELETE": Route(responses.delete, family=OPENAI),
        "POST": Route(responses.cancel, family=OPENAI),
    },
    f"{admin.ROOT}/": {"POST": Route(admin.change)},
}
"""The same for everything below a path."""


def methods_at(path: str) -> Mapping[str, Route]:
    """The routes at a path, by method; none where there is nothing."""
    methods = ROUTES.get(path)
    if methods is not None:
        return methods
    for pattern, methods in ROUTES_BELOW.items():
        if path.startswith(pattern) and len(path) > len(pattern):
            return methods
    return {}


def no_route(exchange: Exchange, methods: Mapping[str, Route]) -> DragomanError:
    if not methods:
        return NotFound(f"there is nothing at {exchange.path[:100]}")
    exchange.extra_headers.append((b"allow", ", ".join(methods).encode()))
    return MethodNotAllowed(f"{exchange.path} takes {' or '.join(methods)}, not {exchange.method[:20]}")

"""The targets, and how many of a run's requests each gets."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.fuzz import http, requests, schemas, sse, websocket
from tools.fuzz.cases import HttpCase, RawCase, SocketCase
from tools.fuzz.servers import scripted_config, smollm2_config


class HttpTarget(NamedTuple):
    """`case` takes the engine, the seed and the number."""

    case: Callable[[str, str, int], HttpCase | RawCase | SocketCase]
    connections: int
    body_seconds: float = 20
    """How long a body may take. Raw bytes often promise a body that never comes."""


HTTP_TARGETS: Mapping[str, HttpTarget] = {
    "requests": HttpTarget(requests.case, 8),
    "http": HttpTarget(http.case, 32, 2),
    "websocket": HttpTarget(websocket.case, 16, 2),
    "sse": HttpTarget(sse.case, 16),
    "schemas": HttpTarget(schemas.http_case, 8),
}
LOCAL_SHARES: Mapping[str, float] = {"schemas": 0.04, "templates": 0.02, "gguf": 0.04, "ipc": 0.1}
"""Cases of the in-process targets, which need no server: so many for each request on the scripted engine."""
SHARES: Mapping[str, Mapping[str, float]] = {
    "scripted": {"requests": 0.8, "http": 0.15, "websocket": 0.03, "sse": 0.05, **LOCAL_SHARES},
    "smollm2": {"requests": 0.7, "schemas": 0.3},
}
"""How many cases each target has, for each request of a run on this engine."""
TARGETS = tuple(dict.fromkeys((*HTTP_TARGETS, *LOCAL_SHARES)))


@contextmanager
def config(target: str, model: Path | None) -> Iterator[dict[str, Any]]:
    """The configuration of the server; for `sse` with an upstream that runs until the end of the block."""
    with ExitStack() as stack:
        if target == "sse":
            made = stack.enter_context(sse.Upstream()).config()
        else:
            made = scripted_config() if model is None else smollm2_config(model)
        yield made | {"limits": {**made["limits"], "body_seconds": HTTP_TARGETS[target].body_seconds}}

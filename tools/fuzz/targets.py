"""The targets, and how many of a run's requests each gets."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools.fuzz import http, requests
from tools.fuzz.cases import HttpCase, RawCase
from tools.fuzz.servers import scripted_config, smollm2_config


class HttpTarget(NamedTuple):
    """`case` takes the engine, the seed and the number."""

    case: Callable[[str, str, int], HttpCase | RawCase]
    connections: int
    body_seconds: float = 20
    """How long a body may take. Raw bytes often promise a body that never comes."""


HTTP_TARGETS: Mapping[str, HttpTarget] = {
    "requests": HttpTarget(requests.case, 8),
    "http": HttpTarget(http.case, 32, 2),
}
SHARES: Mapping[str, Mapping[str, float]] = {
    "scripted": {"requests": 0.8, "http": 0.2},
    "smollm2": {"requests": 1.0},
}
"""Of the requests of a run, by engine."""
TARGETS = tuple(HTTP_TARGETS)


def config(engine: str, target: HttpTarget, model: Path | None) -> dict[str, Any]:
    made = scripted_config() if model is None else smollm2_config(model)
    return made | {"limits": {**made["limits"], "body_seconds": target.body_seconds}}

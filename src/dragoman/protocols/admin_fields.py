"""Requests and replies of the admin API: model status, reload, and the upstream servers of models."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dragoman.protocols import json_body


class ModelStatus(msgspec.Struct, frozen=True):
    id: str
    state: str
    engine: str | None = None
    memory: int | None = None
    """Bytes used by the model's processes."""
    slots: int | None = None
    running: int = 0
    waiting: int = 0
    tokens_per_second: float | None = None
    keep_alive: float | None = None
    """Seconds; None means forever."""
    idle_seconds: float | None = None
    loading_seconds: float | None = None
    loading_progress: float | None = None
    failure: str | None = None


class ReloadResult(msgspec.Struct, frozen=True):
    """The result of a configuration reload."""

    models: tuple[str, ...]
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restart_needed: tuple[str, ...] = ()
    """Changed keys that take effect only after a restart."""


class DrainFields(msgspec.Struct, frozen=True):
    """Stop sending requests to an upstream server, or resume if `drain` is false."""

    model: str
    url: str
    drain: bool = True


class UpstreamStatus(msgspec.Struct, frozen=True):
    """The status of one upstream server."""

    model: str
    url: str
    state: str
    running: int
    failures: int
    weight: float
    rank: int


def encode_model_status(model: ModelStatus) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(model).items() if value is not None}


def encode_model_statuses(models: Sequence[ModelStatus], used: int, budget: int | None) -> dict[str, Any]:
    return {"object": "list", "memory": budget, "used": used, "data": [encode_model_status(model) for model in models]}


def encode_reload_result(reloaded: ReloadResult) -> dict[str, Any]:
    return msgspec.structs.asdict(reloaded)


def decode_drain(body: bytes) -> DrainFields:
    return json_body.convert(json_body.parse(body), DrainFields)


def encode_upstreams(upstreams: Iterable[UpstreamStatus]) -> dict[str, Any]:
    return {"object": "list", "data": [msgspec.structs.asdict(upstream) for upstream in upstreams]}

"""What an operator is told of the models: where each stands, and what it takes."""

from collections.abc import Sequence
from typing import Any

import msgspec


class ServedModel(msgspec.Struct, frozen=True):
    id: str
    state: str
    engine: str | None = None
    memory: int | None = None
    """Bytes that its processes take now."""
    slots: int | None = None
    running: int = 0
    waiting: int = 0
    tokens_per_second: float | None = None
    keep_alive: float | None = None
    """Seconds; None: for ever."""
    idle_seconds: float | None = None
    loading_seconds: float | None = None
    loading_progress: float | None = None
    failure: str | None = None


class Reloaded(msgspec.Struct, frozen=True):
    """What became of a new configuration."""

    models: tuple[str, ...]
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    restart_needed: tuple[str, ...] = ()
    """Keys that hold only from the next start on."""


def encode_served(model: ServedModel) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(model)
    return {key: value for key, value in told.items() if value is not None}


def encode_fleet(models: Sequence[ServedModel], used: int, budget: int | None) -> dict[str, Any]:
    return {"object": "list", "memory": budget, "used": used, "data": [encode_served(model) for model in models]}


def encode_reloaded(reloaded: Reloaded) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(reloaded)
    return told

"""Encodes the model list for OpenAI, with extra fields such as context and state, and for Anthropic.

Anthropic's list is paginated: the first `limit` models after `after_id`, or the last `limit` before `before_id`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.protocols.openai import decode_limit

DEFAULT_PAGE_SIZE = 20
MAX_PAGE_SIZE = 1000


class ModelEntry(msgspec.Struct, frozen=True):
    name: str
    created: int
    owner: str
    context: int | None
    format: str | None
    device: str | None
    state: str
    loading_seconds: float | None = None
    """Time since loading started; None unless the model is loading."""
    loading_progress: float | None = None
    """Fraction from 0 to 1, if the engine reports it."""
    architecture: str | None = None
    """`architecture`, `size` and `quantization` are known for files in the models folder."""
    size: int | None = None
    quantization: str | None = None


def encode_model(model: ModelEntry) -> dict[str, Any]:
    listed = {"id": model.name, "object": "model", "created": model.created, "owned_by": model.owner}
    known = {
        "max_model_len": model.context,
        "format": model.format,
        "device": model.device,
        "state": model.state,
        "loading_seconds": None if model.loading_seconds is None else round(model.loading_seconds, 1),
        "loading_progress": model.loading_progress,
        "architecture": model.architecture,
        "size": model.size,
        "quantization": model.quantization,
    }
    return listed | {key: value for key, value in known.items() if value is not None}


def encode_models(models: Sequence[ModelEntry]) -> dict[str, Any]:
    return {"object": "list", "data": [encode_model(model) for model in models]}


def encode_anthropic_model(model: ModelEntry) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }


def encode_anthropic_models(models: Sequence[ModelEntry], query: Mapping[str, str]) -> dict[str, Any]:
    page, has_more = _page(models, query)
    return {
        "data": [encode_anthropic_model(model) for model in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _page(models: Sequence[ModelEntry], query: Mapping[str, str]) -> tuple[Sequence[ModelEntry], bool]:
    """Return the requested page and whether more models follow in that direction."""
    limit = decode_limit(query, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if "before_id" in query:
        end = _find(models, query, "before_id")
        return models[max(0, end - limit) : end], end > limit
    start = _find(models, query, "after_id") + 1 if "after_id" in query else 0
    return models[start : start + limit], len(models) > start + limit


def _find(models: Sequence[ModelEntry], query: Mapping[str, str], name: str) -> int:
    index = next((at for at, model in enumerate(models) if model.name == query[name]), None)
    if index is None:
        raise BadRequest(f"{name}: no model named {quote(query[name])}", param=name)
    return index

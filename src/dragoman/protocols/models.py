"""The list of models: OpenAI's, with what else is known of each (context, format, state, file), and Anthropic's.

Anthropic's comes in pages: the first `limit` models after `after_id`, or the last before `before_id`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.protocols.pages import decode_limit

PAGE = 20
LARGEST_PAGE = 1000


class ListedModel(msgspec.Struct, frozen=True):
    name: str
    created: int
    owner: str
    context: int | None
    format: str | None
    device: str | None
    state: str
    loading_seconds: float | None = None
    """While it is loading: for how long, and how much of it is there, where its engine tells."""
    loading_progress: float | None = None
    architecture: str | None = None
    """This and the next of a model that was found in the models folder."""
    size: int | None = None
    quantization: str | None = None


def encode_model(model: ListedModel) -> dict[str, Any]:
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


def encode_models(models: Sequence[ListedModel]) -> dict[str, Any]:
    return {"object": "list", "data": [encode_model(model) for model in models]}


def encode_anthropic_model(model: ListedModel) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }


def encode_anthropic_models(models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
    page, has_more = _page(models, query)
    return {
        "data": [encode_anthropic_model(model) for model in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _page(models: Sequence[ListedModel], query: Mapping[str, str]) -> tuple[Sequence[ListedModel], bool]:
    """The models asked for, and whether there are more in that direction."""
    limit = decode_limit(query, PAGE, LARGEST_PAGE)
    if "before_id" in query:
        end = _place(models, query, "before_id")
        return models[max(0, end - limit) : end], end > limit
    start = _place(models, query, "after_id") + 1 if "after_id" in query else 0
    return models[start : start + limit], len(models) > start + limit


def _place(models: Sequence[ListedModel], query: Mapping[str, str], name: str) -> int:
    places = [at for at, model in enumerate(models) if model.name == query[name]]
    if not places:
        raise BadRequest(f"{name}: no model is called {quote(query[name])}", param=name)
    return places[0]

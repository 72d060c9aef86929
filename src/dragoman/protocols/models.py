"""Requests and replies of the model list and of the admin API: model status, reload, upstream servers.

OpenAI's model list has extra fields such as context and state. Anthropic's list is paginated. Its models have
capabilities once they have been loaded.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.protocols import json_body
from dragoman.protocols.messages.context import CLEAR_THINKING, CLEAR_TOOL_USES, COMPACT
from dragoman.protocols.openai import decode_limit

DEFAULT_PAGE_SIZE = 20
MAX_PAGE_SIZE = 1000


class ModelEntry(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="object", tag="model"):
    """A model in OpenAI's list."""

    id: str
    created: int
    owned_by: str
    state: str
    max_model_len: int | None = None
    format: str | None = None
    device: str | None = None
    loading_seconds: float | None = None
    """Time since loading started; None unless the model is loading."""
    loading_progress: float | None = None
    """Fraction from 0 to 1, if the engine reports it."""
    architecture: str | None = None
    """`architecture`, `size` and `quantization` are known for files in the models folder."""
    size: int | None = None
    quantization: str | None = None


class KnownModel(NamedTuple):
    """A model, and the features of its engine if they are known."""

    entry: ModelEntry
    features: frozenset[str] | None


def encode_anthropic_model(known: KnownModel) -> dict[str, Any]:
    model = known.entry
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
        "capabilities": None if known.features is None else _encode_capabilities(known.features),
    }


def _encode_capabilities(features: frozenset[str]) -> dict[str, Any]:
    no, thinks = {"supported": False}, {"supported": Feature.THINKING in features}
    counts, chats = {"supported": Feature.COUNT_TOKENS in features}, {"supported": Feature.CHAT in features}
    efforts = dict.fromkeys(("low", "medium", "high", "xhigh", "max"), thinks)
    modes = {"enabled": thinks, "adaptive": thinks, "disabled": {"supported": True}, "between_tools": no}
    return {
        "batch": {"supported": True},
        "citations": no,
        "code_execution": no,
        "compaction": chats | {"summarize": chats},
        "context_management": counts | dict.fromkeys((CLEAR_THINKING, CLEAR_TOOL_USES, COMPACT), counts),
        "effort": thinks | efforts,
        "image_input": {"supported": Feature.IMAGES in features},
        "pdf_input": no,
        "server_tools": no | {"code_execution": no, "web_search": no},
        "structured_outputs": {"supported": Feature.CONSTRAINT in features},
        "thinking": thinks | {"types": modes},
    }


def encode_anthropic_models(models: Sequence[KnownModel], query: Mapping[str, str]) -> dict[str, Any]:
    """Encode a page of models: the first `limit` after `after_id`, or the last `limit` before `before_id`."""
    limit = decode_limit(query, DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if "before_id" in query:
        end = _find(models, query, "before_id")
        page, has_more = models[max(0, end - limit) : end], end > limit
    else:
        start = _find(models, query, "after_id") + 1 if "after_id" in query else 0
        page, has_more = models[start : start + limit], len(models) > start + limit
    return {
        "data": [encode_anthropic_model(model) for model in page],
        "has_more": has_more,
        "first_id": page[0].entry.id if page else None,
        "last_id": page[-1].entry.id if page else None,
    }


def _find(models: Sequence[KnownModel], query: Mapping[str, str], name: str) -> int:
    index = next((at for at, model in enumerate(models) if model.entry.id == query[name]), None)
    if index is None:
        raise BadRequest(f"{name}: no model named {quote(query[name])}", param=name)
    return index


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    state: str
    running: int
    waiting: int
    engine: str | None = None
    memory: int | None = None
    """Bytes used by the model's processes."""
    slots: int | None = None
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


def decode_drain(body: bytes) -> DrainFields:
    return json_body.convert(json_body.parse(body), DrainFields)


def encode_list(data: Sequence[object], **fields: Any) -> dict[str, Any]:
    return {"object": "list", **fields, "data": data}

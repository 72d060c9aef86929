"""Calls that are answered with one JSON body: models, embeddings and token counts."""

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dragoman.client.planner import CallPlanner, PlannedCall
from dragoman.core.embeddings import Embedding, EmbeddingRequest, Input
from dragoman.core.errors import BadAnswer, BadRequest
from dragoman.core.events import Usage
from dragoman.core.request import GenerationRequest
from dragoman.protocols import embeddings, reply_fields
from dragoman.protocols.chat import client as chat
from dragoman.protocols.messages import client as messages
from dragoman.protocols.responses import client as responses

PAGE_SIZE = 1000
CONTEXT_FIELDS = (
    "max_model_len",
    "context_length",
    "max_context_length",
    "context_window",
    "max_input_tokens",
    "n_ctx_train",
)


class ServerModel(msgspec.Struct, frozen=True):
    name: str
    context: int | None = None
    """In tokens, if the server reports it."""


class Embeddings(msgspec.Struct, frozen=True):
    """One vector for each text, in the same order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


class EmbeddingResult(msgspec.Struct, frozen=True):
    """Embeddings in the packed form that engines use."""

    vectors: tuple[Embedding, ...]
    usage: Usage

    def as_floats(self) -> Embeddings:
        return Embeddings(tuple(tuple(vector.values) for vector in self.vectors), self.usage)


def check_texts(texts: str | Sequence[str]) -> list[str]:
    checked = [texts] if isinstance(texts, str) else list(texts) if isinstance(texts, Iterable) else [texts]
    if not all(isinstance(text, str) for text in checked):
        raise BadRequest("texts: expected a string or a list of strings", param="texts")
    return checked


class ModelPage(msgspec.Struct, frozen=True):
    models: tuple[ServerModel, ...]
    next: str | None = None
    """The last name of this page, if there are more pages."""


def models_call(planner: CallPlanner, after: str | None = None) -> PlannedCall:
    query = f"?limit={PAGE_SIZE}" + (f"&after_id={quote(after)}" if after else "")
    has_pages = planner.protocol == "messages" or after
    return planner.json_call("models", f"/models{query if has_pages else ''}", protocol=planner.protocol or "chat")


def read_models(body: bytes) -> ModelPage:
    parsed = reply_fields.parse(body)
    entries = parsed.get("data", parsed.get("models")) if isinstance(parsed, dict) else parsed
    if not isinstance(entries, list):
        raise BadAnswer(f"the server sent no list of models: {reply_fields.excerpt(body)!r}")
    models = tuple(_model(entry) for entry in entries if isinstance(entry, dict) and _name(entry))
    has_more = isinstance(parsed, dict) and parsed.get("has_more") is True and bool(models)
    return ModelPage(models, models[-1].name if has_more else None)


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("id") or entry.get("name") or "")


def _model(entry: dict[str, Any]) -> ServerModel:
    meta = entry.get("meta")
    objects = [entry, meta if isinstance(meta, dict) else {}]
    sizes = (fields.get(name) for fields in objects for name in CONTEXT_FIELDS)
    return ServerModel(_name(entry), next((size for size in sizes if isinstance(size, int)), None))


def embeddings_call(planner: CallPlanner, texts: Sequence[Input], model: str, dimensions: int | None) -> PlannedCall:
    request = EmbeddingRequest(tuple(texts), model or planner.model or "", dimensions, listed=True)
    return planner.json_call("embeddings", embeddings.PATH, embeddings.encode_request(request))


def read_embeddings(body: bytes, count: int) -> EmbeddingResult:
    return EmbeddingResult(*embeddings.decode_reply(body, count))


def count_calls(planner: CallPlanner, request: GenerationRequest) -> list[PlannedCall]:
    """Return the calls of Anthropic, OpenAI and vLLM that count tokens. vLLM's does not support tools."""
    count = {name: value for name, value in messages.encode(request, False).items() if name != "max_tokens"}
    items = {
        name: value for name, value in responses.encode(request, False).items() if name not in ("store", "include")
    }
    return [
        planner.json_call("messages", "/messages/count_tokens", count, protocol="messages"),
        planner.json_call("responses", "/responses/input_tokens", items),
        planner.json_call("tokenize", "/tokenize", chat.encode(request, False), at_root=True),
    ]


def read_count(body: bytes) -> int:
    parsed = reply_fields.parse_object(body)
    for name in ("input_tokens", "count", "total_tokens"):
        count = parsed.get(name)
        if isinstance(count, int):
            return count
    raise BadAnswer(f"the server sent no token count: {reply_fields.excerpt(body)!r}")

"""Models, vectors and counts: questions that one JSON body answers."""

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dragoman.client.planner import Call, Talk
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import BadAnswer, BadRequest
from dragoman.core.events import Usage
from dragoman.core.request import GenerationRequest
from dragoman.protocols.chat import client as chat
from dragoman.protocols.client import reply_fields, usage_fields
from dragoman.protocols.messages import client as messages
from dragoman.protocols.responses import client as responses

PAGE = 1000


class Model(msgspec.Struct, frozen=True):
    name: str
    context: int | None = None
    """Tokens, where the server tells."""


class Embeddings(msgspec.Struct, frozen=True):
    """A vector of numbers for each text, in their order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


class Made(msgspec.Struct, frozen=True):
    """The same as engines have it."""

    vectors: tuple[Embedding, ...]
    usage: Usage

    @property
    def plain(self) -> Embeddings:
        return Embeddings(tuple(tuple(vector.values) for vector in self.vectors), self.usage)


def texts(given: str | Sequence[str]) -> list[str]:
    """What shall have vectors."""
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(text, str) for text in found):
        raise BadRequest("texts: expected a text, or a list of texts", param="texts")
    return found


class Page(msgspec.Struct, frozen=True):
    models: tuple[Model, ...]
    next: str | None = None
    """The last name, where there are more."""


def models_call(talk: Talk, after: str | None = None) -> Call:
    paged = f"?limit={PAGE}" + (f"&after_id={quote(after)}" if after else "")
    is_anthropic = talk.protocol == "messages"
    return talk.plain("models", f"/models{paged if is_anthropic or after else ''}", protocol=talk.protocol or "chat")


def read_models(body: bytes) -> Page:
    parsed = reply_fields.parse(body)
    entries = parsed.get("data", parsed.get("models")) if isinstance(parsed, dict) else parsed
    if not isinstance(entries, list):
        raise BadAnswer(f"what the server sent is no list of models: {reply_fields.excerpt(body)!r}")
    found = tuple(_model(entry) for entry in entries if isinstance(entry, dict) and _name(entry))
    more = isinstance(parsed, dict) and parsed.get("has_more") is True and bool(found)
    return Page(found, found[-1].name if more else None)


def _name(entry: dict[str, Any]) -> str:
    return str(entry.get("id") or entry.get("name") or "")


def _model(entry: dict[str, Any]) -> Model:
    meta = entry.get("meta")
    places = [entry, meta if isinstance(meta, dict) else {}]
    names = (
        "max_model_len",
        "context_length",
        "max_context_length",
        "context_window",
        "max_input_tokens",
        "n_ctx_train",
    )
    sizes = (place.get(name) for place in places for name in names)
    return Model(_name(entry), next((size for size in sizes if isinstance(size, int)), None))


def embeddings_call(talk: Talk, texts: Sequence[Input], model: str, dimensions: int | None) -> Call:
    body: dict[str, Any] = {"input": list(texts), "model": model or talk.model or None, "dimensions": dimensions}
    return talk.plain("embeddings", "/embeddings", {name: value for name, value in body.items() if value is not None})


def read_embeddings(body: bytes, count: int) -> Made:
    """In the order of the texts, whatever the order they came in."""
    parsed = reply_fields.parse_object(body)
    data = parsed.get("data")
    entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    if len(entries) != count:
        raise BadAnswer(f"{count} vectors were asked for, and {len(entries)} came: {reply_fields.excerpt(body)!r}")
    placed = sorted(enumerate(entries), key=lambda pair: _place(pair[1].get("index"), pair[0]))
    vectors = tuple(_vector(entry.get("embedding")) for _, entry in placed)
    return Made(vectors, usage_fields.read(parsed.get("usage")) or Usage())


def _place(index: object, at: int) -> int:
    return index if isinstance(index, int) else at


def _vector(told: object) -> Embedding:
    try:
        if isinstance(told, str):
            return Embedding.of(Embedding(base64.b64decode(told, validate=True)).values)
        return Embedding.of(msgspec.convert(told, list[float]))
    except (ValueError, binascii.Error) as error:
        raise BadAnswer(f"a vector cannot be read: {error}") from error


def count_calls(talk: Talk, request: GenerationRequest) -> list[Call]:
    """Anthropic's way, OpenAI's, and vLLM's, which has no word for tools."""
    count = {name: value for name, value in messages.encode(request, False).items() if name != "max_tokens"}
    items = {
        name: value for name, value in responses.encode(request, False).items() if name not in ("store", "include")
    }
    entries = chat.encode(request, False)
    return [
        talk.plain("messages", "/messages/count_tokens", count, protocol="messages"),
        talk.plain("responses", "/responses/input_tokens", items),
        talk.plain("tokenize", "/tokenize", entries, at_root=True),
    ]


def read_count(body: bytes) -> int:
    parsed = reply_fields.parse_object(body)
    for name in ("input_tokens", "count", "total_tokens"):
        if isinstance(parsed.get(name), int):
            found: int = parsed[name]
            return found
    raise BadAnswer(f"what the server sent is no count: {reply_fields.excerpt(body)!r}")

"""Client side of OpenAI embeddings: encodes requests and decodes replies."""

import base64
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding, EmbeddingRequest
from dragoman.core.errors import BadAnswer
from dragoman.core.events import Usage
from dragoman.protocols import reply_fields
from dragoman.protocols.json_body import without_nulls

PATH = "/embeddings"


def encode(request: EmbeddingRequest) -> dict[str, Any]:
    inputs: Any = list(request.inputs) if request.listed else request.inputs[0]
    encoding = "base64" if request.base64 else None
    fields = {"input": inputs, "model": request.model or None, "dimensions": request.dimensions}
    return without_nulls({**fields, "encoding_format": encoding})


def decode_reply(body: bytes, count: int) -> tuple[tuple[Embedding, ...], Usage]:
    """Return the vectors in the order of the inputs, sorted by `index`."""
    parsed = reply_fields.parse_object(body)
    entries = [entry for entry in reply_fields.list_of(parsed.get("data")) if isinstance(entry, dict)]
    if len(entries) != count:
        raise BadAnswer(f"expected {count} embeddings, received {len(entries)}: {reply_fields.excerpt(body)!r}")
    indexes = [entry.get("index") for entry in entries]
    order = sorted(range(count), key=lambda at: index if isinstance(index := indexes[at], int) else at)
    vectors = tuple(_vector(entries[at].get("embedding")) for at in order)
    return vectors, reply_fields.read_usage(parsed.get("usage")) or Usage()


def _vector(value: object) -> Embedding:
    try:
        if isinstance(value, str):
            return Embedding.of(Embedding(base64.b64decode(value, validate=True)).values)
        return Embedding.of(msgspec.convert(value, list[float]))
    except ValueError as error:
        raise BadAnswer(f"invalid embedding: {error}") from error

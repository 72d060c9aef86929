"""OpenAI embeddings, in both directions.

input := text | token ids | (text | token ids)+         each non-empty, at most 2,048
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.embeddings import MAX_INPUTS, Embedding, EmbeddingRequest, Input
from dragoman.core.errors import BadAnswer, BadRequest
from dragoman.core.events import Usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked
from dragoman.protocols import json_body, reply_fields
from dragoman.protocols.openai import TokenIds

PATH = "/embeddings"


class EmbeddingFields(msgspec.Struct, frozen=True):
    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None


def decode(body: bytes) -> EmbeddingRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, EmbeddingFields)
    return EmbeddingRequest(
        inputs=_inputs(fields.input),
        model=fields.model or "",
        dimensions=fields.dimensions,
        base64=fields.encoding_format == "base64",
        listed=isinstance(fields.input, list) and not isinstance(fields.input[0], int),
        asked=unknown_features(parsed, EmbeddingFields),
    )


def input_path(request: EmbeddingRequest, at: int) -> str:
    """Return the path of an input."""
    return f"input[{at}]" if request.listed else "input"


def unknown_features(parsed: dict[str, Any], struct: type[msgspec.Struct]) -> tuple[Asked, ...]:
    return tuple(Asked(Feature.UNKNOWN, name) for name in json_body.unknown_fields(parsed, struct))


def _inputs(field: str | list[Any]) -> tuple[Input, ...]:
    if isinstance(field, str) or not field or isinstance(field[0], int):
        return (_input(field, "input"),)
    if len(field) > MAX_INPUTS:
        raise BadRequest(f"input: at most {MAX_INPUTS} texts in one request, not {len(field)}", param="input")
    return tuple(_input(entry, f"input[{at}]") for at, entry in enumerate(field))


def _input(entry: object, path: str) -> Input:
    if not isinstance(entry, str | list):
        raise BadRequest(f"{path}: expected a string or a list of token ids", param=path)
    if not entry:
        raise BadRequest(f"{path}: must not be empty", param=path)
    return entry if isinstance(entry, str) else json_body.convert(entry, TokenIds, path)


def encode_reply(request: EmbeddingRequest, embeddings: Sequence[Embedding]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": at, "embedding": _encode_vector(request, embedding)}
            for at, embedding in enumerate(embeddings)
        ],
        "model": request.model,
        "usage": encode_usage(embeddings),
    }


def encode_usage(embeddings: Sequence[Embedding]) -> dict[str, int]:
    tokens = sum(embedding.tokens for embedding in embeddings)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _encode_vector(request: EmbeddingRequest, embedding: Embedding) -> msgspec.Raw:
    """Encode to JSON here, in a worker thread, so that the event loop only copies the bytes of a long reply."""
    if request.dimensions is not None:
        embedding = embedding.cut(request.dimensions)
    encoded = base64.b64encode(embedding.vector).decode() if request.base64 else embedding.values
    return msgspec.Raw(msgspec.json.encode(encoded))


def encode_request(request: EmbeddingRequest) -> dict[str, Any]:
    return json_body.without_nulls(
        {
            "input": list(request.inputs) if request.listed else request.inputs[0],
            "model": request.model or None,
            "dimensions": request.dimensions,
            "encoding_format": "base64" if request.base64 else None,
        }
    )


def decode_reply(body: bytes, count: int) -> tuple[tuple[Embedding, ...], Usage]:
    """Return the vectors in the order of the inputs, sorted by `index`."""
    parsed = reply_fields.parse_object(body)
    entries = [entry for entry in reply_fields.list_of(parsed.get("data")) if isinstance(entry, dict)]
    if len(entries) != count:
        raise BadAnswer(f"expected {count} embeddings, received {len(entries)}: {reply_fields.excerpt(body)!r}")
    indexes = [entry.get("index") for entry in entries]
    order = sorted(range(count), key=lambda at: index if isinstance(index := indexes[at], int) else at)
    vectors = tuple(_decode_vector(entries[at].get("embedding")) for at in order)
    return vectors, reply_fields.read_usage(parsed.get("usage")) or Usage()


def _decode_vector(value: object) -> Embedding:
    try:
        if isinstance(value, str):
            return Embedding.of(Embedding(base64.b64decode(value, validate=True)).values)
        return Embedding.of(msgspec.convert(value, list[float]))
    except ValueError as error:
        raise BadAnswer(f"invalid embedding: {error}") from error

"""Documents in the order in which they answer a query, as Cohere and Jina ask for it.

document := text | {"text": text}
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dragoman.core.embeddings import MAX_INPUTS, Embedding, RerankRequest
from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body
from dragoman.protocols.embeddings.server import encode_usage, unknown


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankFields(msgspec.Struct, frozen=True):
    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: Annotated[list[str | Document], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    user: str | None = None


def decode(body: bytes) -> RerankRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, RerankFields)
    documents = [entry if isinstance(entry, str) else entry.text for entry in fields.documents]
    empty = next((at for at, text in enumerate(documents) if not text), None)
    if empty is not None:
        raise BadRequest(f"documents[{empty}]: must not be empty", param=f"documents[{empty}]")
    return RerankRequest(
        query=fields.query,
        documents=tuple(documents),
        model=fields.model or "",
        top=fields.top_n,
        return_documents=bool(fields.return_documents),
        asked=unknown(parsed, RerankFields),
    )


def place(at: int) -> str:
    """Where one of the inputs stands: the query, then the documents."""
    return f"documents[{at - 1}]" if at else "query"


def encode_reply(request: RerankRequest, request_id: str, made: Sequence[Embedding]) -> dict[str, Any]:
    """`made` is the query, then the documents. Those that are equally alike stay in their order."""
    query, *documents = made
    scores = [query.likeness(document) for document in documents]
    ranked = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top]
    return {
        "id": request_id,
        "model": request.model,
        "results": [_result(request, at, scores[at]) for at in ranked],
        "usage": encode_usage(made),
    }


def _result(request: RerankRequest, at: int, score: float) -> dict[str, Any]:
    result = {"index": at, "relevance_score": score}
    return {**result, "document": {"text": request.documents[at]}} if request.return_documents else result

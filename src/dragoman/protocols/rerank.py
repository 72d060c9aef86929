"""Server side of rerank, as defined by Cohere and Jina: sorts documents by similarity to a query.

document := text | {"text": text}
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dragoman.core.embeddings import MAX_INPUTS, Embedding, RerankRequest
from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body
from dragoman.protocols.embeddings import encode_usage, unknown_features


class DocumentField(msgspec.Struct, frozen=True):
    text: str


class RerankFields(msgspec.Struct, frozen=True):
    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: Annotated[list[str | DocumentField], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
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
        asked=unknown_features(parsed, RerankFields),
    )


def input_path(at: int) -> str:
    """Return the path of an input: the query is input 0, the documents follow."""
    return f"documents[{at - 1}]" if at else "query"


def encode_reply(request: RerankRequest, request_id: str, embeddings: Sequence[Embedding]) -> dict[str, Any]:
    """Rank the documents. `embeddings` has the query first; documents with equal scores keep their order."""
    query, *documents = embeddings
    scores = [query.cosine_similarity(document) for document in documents]
    ranked = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top]
    return {
        "id": request_id,
        "model": request.model,
        "results": [
            {"index": at, "relevance_score": scores[at]}
            | ({"document": {"text": request.documents[at]}} if request.return_documents else {})
            for at in ranked
        ],
        "usage": encode_usage(embeddings),
    }

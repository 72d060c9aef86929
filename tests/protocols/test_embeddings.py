"""Server side of embeddings and rerank."""

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.embeddings import Embedding, EmbeddingRequest, RerankRequest
from dragoman.core.errors import BadRequest
from dragoman.protocols import embeddings, rerank
from tests.protocols.wire import invalid

RERANK = {"query": "q", "documents": ["a", "b"]}


def decode(**fields: Any) -> EmbeddingRequest:
    return embeddings.decode(json.dumps(fields).encode())


def decode_rerank(**fields: Any) -> RerankRequest:
    return rerank.decode(json.dumps(RERANK | fields).encode())


def encode(request: EmbeddingRequest, embedded: list[Embedding]) -> Any:
    return json.loads(msgspec.json.encode(embeddings.encode_reply(request, embedded)))


@pytest.mark.parametrize(
    ("field", "inputs"),
    [
        ("one text", ("one text",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["text", [1, 2]], ("text", (1, 2))),
        ([1.0, 2], ((1, 2),)),
        (["x"] * 2048, ("x",) * 2048),
    ],
)
def test_input_types(field: object, inputs: object) -> None:
    assert decode(input=field).inputs == inputs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        *invalid("input", "input", None, "", [], 7, ["x"] * 2049),
        *invalid("input", "input[0]", [[]], [True], [{"text": "a"}]),
        *invalid("input", "input[1]", ["a", ""], [[1], []], [1, "a"], [1, -1]),
        ({"input": [[1.5]]}, "input[0][0]"),
        ({"input": ["a", [1, 2, -3]]}, "input[1][2]"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "model": 7}, "model"),
        (RERANK | {"query": ""}, "query"),
        (RERANK | {"query": None}, "query"),
        (RERANK | {"documents": []}, "documents"),
        (RERANK | {"documents": ["a", ""]}, "documents[1]"),
        (RERANK | {"documents": [{"title": "a"}]}, "documents[0].text"),
        (RERANK | {"documents": ["a"] * 2049}, "documents"),
        (RERANK | {"top_n": 0}, "top_n"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        (decode_rerank if "query" in fields else decode)(**fields)
    assert caught.value.param == param
    assert "$" not in caught.value.message


def test_other_request_fields() -> None:
    plain = decode(input="a", encoding_format=None, dimensions=None, user="me")
    assert plain == EmbeddingRequest(("a",))
    full = decode(input="a", model="m", encoding_format="base64", dimensions=8, flavour="sweet", nothing=None)
    assert (full.model, full.base64, full.dimensions) == ("m", True, 8)
    assert [(asked.feature, asked.param) for asked in full.asked] == [("unknown", "flavour")]


@given(
    st.lists(st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6), min_size=1, max_size=5), st.integers(1, 6)
)
def test_float_and_base64_are_equal(vectors: list[list[float]], dimensions: int) -> None:
    embedded = [Embedding.of(vector, tokens=2) for vector in vectors]
    request = EmbeddingRequest(("x",) * len(embedded), "m", dimensions)
    plain = encode(request, embedded)
    packed = encode(msgspec.structs.replace(request, base64=True), embedded)
    assert plain["usage"] == packed["usage"] == {"prompt_tokens": 2 * len(embedded), "total_tokens": 2 * len(embedded)}
    assert [entry["index"] for entry in plain["data"]] == list(range(len(embedded)))
    for entry, other, whole in zip(plain["data"], packed["data"], embedded, strict=True):
        data = base64.b64decode(other["embedding"], validate=True)
        numbers = list(struct.unpack(f"<{dimensions}f", data))
        assert entry["embedding"] == numbers == whole.cut(dimensions).values


def test_reply() -> None:
    reply = encode(EmbeddingRequest(("x",), "m"), [Embedding.of([0, 2], tokens=1)])
    assert reply == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 1.0]}],
        "model": "m",
        "usage": {"prompt_tokens": 1, "total_tokens": 1},
    }


def test_decode_rerank() -> None:
    request = decode_rerank(documents=["a", {"text": "b", "title": "t"}], top_n=1, return_documents=True, max_chunks=3)
    assert (request.documents, request.top, request.return_documents) == (("a", "b"), 1, True)
    assert request.inputs == ("q", "a", "b")
    assert [asked.param for asked in request.asked] == ["max_chunks"]


def test_rerank_sorts_by_score_and_keeps_order_of_equals() -> None:
    embedded = [Embedding.of(values, tokens=1) for values in ([1, 0], [0, 1], [1, 1], [1, 0], [1, 1])]
    documents = ["none", "half", "same", "half again"]
    reply = rerank.encode_reply(decode_rerank(documents=documents, return_documents=True), "id-1", embedded)
    assert [result["index"] for result in reply["results"]] == [2, 1, 3, 0]
    assert [result["relevance_score"] for result in reply["results"]] == pytest.approx([1, 0.5**0.5, 0.5**0.5, 0])
    assert [result["document"]["text"] for result in reply["results"]] == ["same", "half", "half again", "none"]
    assert (reply["id"], reply["usage"]) == ("id-1", {"prompt_tokens": 5, "total_tokens": 5})
    short = rerank.encode_reply(decode_rerank(documents=documents, top_n=2), "id-1", embedded)
    assert [list(result) for result in short["results"]] == [["index", "relevance_score"]] * 2
    assert len(rerank.encode_reply(decode_rerank(documents=documents, top_n=99), "id-1", embedded)["results"]) == 4

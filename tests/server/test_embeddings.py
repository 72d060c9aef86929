"""Embeddings and rerank over HTTP, with the scripted engine and custom engines."""

import asyncio
import base64
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from openai import OpenAI

from dragoman import Engine, create_app
from dragoman.config.settings import Limits, Settings
from dragoman.core.embeddings import Embedding, Input
from dragoman.server.handlers.embeddings import BATCH_INPUTS
from tests.support.requests import recorded, refused, talk
from tests.support.sdk import sdk
from tests.support.server_process import Running

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


@pytest.fixture
def openai(scripted: Running) -> Iterator[OpenAI]:
    with sdk(scripted) as made:
        yield made


def ask(client: httpx.Client, given: object = "hello", **fields: Any) -> httpx.Response:
    return client.post(EMBEDDINGS, json={"input": given, **fields})


def vector(response: httpx.Response, index: int = 0) -> list[float]:
    assert response.status_code == 200, response.text
    found: list[float] = response.json()["data"][index]["embedding"]
    return found


def test_float_and_base64_are_equal(openai: OpenAI) -> None:
    # By default the SDK requests base64 and decodes it.
    packed = openai.embeddings.create(model="echo", input=["hello world", "good bye"])
    plain = openai.embeddings.create(model="echo", input=["hello world", "good bye"], encoding_format="float")
    assert [entry.index for entry in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert len(one.embedding) == 384
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-6)
    raw = openai.embeddings.with_raw_response.create(model="echo", input="hello world", encoding_format="base64")
    encoded = raw.http_response.json()["data"][0]["embedding"]
    assert list(struct.unpack("<384f", base64.b64decode(encoded, validate=True))) == plain.data[0].embedding
    assert (packed.model, packed.object, packed.data[0].object) == ("echo", "list", "embedding")
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (5, 5)


def test_dimensions(openai: OpenAI) -> None:
    whole = openai.embeddings.create(model="echo", input="hello").data[0].embedding
    part = openai.embeddings.create(model="echo", input="hello", dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert part == pytest.approx([number / length for number in whole[:8]], abs=1e-6)
    assert openai.embeddings.create(model="echo", input="hello", dimensions=384).data[0].embedding == whole


def test_too_many_dimensions(client: httpx.Client) -> None:
    words = refused(ask(client, dimensions=385), 400, param="dimensions", code="invalid_value")
    assert "384, fewer than 385" in words


def test_largest_number_of_inputs(client: httpx.Client) -> None:
    texts = [f"text number {index}" for index in range(2048)]
    reply = ask(client, texts, encoding_format="base64")
    assert [entry["index"] for entry in reply.json()["data"]] == list(range(2048))
    assert (
        reply.json()["data"][2047]["embedding"]
        == ask(client, texts[-1], encoding_format="base64").json()["data"][0]["embedding"]
    )
    refused(ask(client, [*texts, "one more"]), 400, param="input")


def test_too_long(client: httpx.Client) -> None:
    assert ask(client, "x" * 80, model="short").status_code == 200
    many = ["a"] * (BATCH_INPUTS + 5)
    for given, param in (
        ("x" * 81, "input"),
        (["x" * 81], "input[0]"),
        (["a", "x" * 81], "input[1]"),
        ([*many, "x" * 81, *many], f"input[{len(many)}]"),
        (list(range(21)), "input"),
        ([[1], list(range(21))], "input[1]"),
    ):
        words = refused(ask(client, given, model="short"), 400, param=param, code="context_length_exceeded")
        assert "maximum context length is 20 tokens" in words


def test_unknown_fields_are_reported_or_refused(client: httpx.Client) -> None:
    assert ask(client, flavour="sweet", user="me").headers["x-dragoman-ignored"] == "flavour"
    strict = client.post(EMBEDDINGS, json={"input": "a", "flavour": "sweet"}, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="flavour", code="unsupported_parameter")


def test_usage_in_event_log(client: httpx.Client, scripted: Running) -> None:
    reply = ask(client, "x" * 40)
    (record,) = recorded(scripted, id=reply.headers["x-request-id"])
    assert (record["model"], record["status"], record["prompt_tokens"]) == ("echo", 200, 10)


def test_rerank(client: httpx.Client) -> None:
    documents = ["a red car", "the blue house", {"text": "the house by the sea"}]
    body = {"query": "the blue house", "documents": documents, "top_n": 2, "return_documents": True, "model": "echo"}
    reply = client.post(RERANK, json=body).json()
    first, second = reply["results"]
    assert (first["index"], first["document"]) == (1, {"text": "the blue house"})
    assert first["relevance_score"] == pytest.approx(1, abs=1e-6)
    assert (second["index"], second["document"]) == (2, {"text": "the house by the sea"})
    assert 0 < second["relevance_score"] < 1
    assert reply["usage"]["total_tokens"] > 0
    assert reply["model"] == "echo"
    plain = client.post(RERANK, json={"query": "q", "documents": ["a", "b"]}).json()
    assert [list(result) for result in plain["results"]] == [["index", "relevance_score"]] * 2


def test_rerank_too_long(client: httpx.Client) -> None:
    for query, documents, param in (("q", ["x" * 81], "documents[0]"), ("x" * 81, ["a"], "query")):
        body = {"query": query, "documents": documents, "model": "short"}
        refused(client.post(RERANK, json=body), 400, param=param, code="context_length_exceeded")


class Writing(Engine):
    def generate(self, request: object) -> Iterator[str]:
        yield "text"


class Measuring(Engine):
    """Supports embeddings only, and records its batches."""

    def __init__(self, made: Sequence[Embedding] | None = None) -> None:
        self.made = made
        self.given: list[int] = []
        self.gone = asyncio.Event()

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        self.given.append(len(inputs))
        if inputs[0] == "wait":
            try:
                await asyncio.sleep(60)
            finally:
                self.gone.set()
        return [Embedding.of([len(entry), 1]) for entry in inputs] if self.made is None else self.made


def post(engine: Engine, path: str, body: dict[str, Any], settings: Settings | None = None) -> httpx.Response:
    response: httpx.Response = talk(create_app(engine, settings=settings), lambda client: client.post(path, json=body))
    return response


def test_engine_without_embeddings() -> None:
    for path, body in ((EMBEDDINGS, {"input": "a"}), (RERANK, {"query": "a", "documents": ["b"]})):
        response = post(Writing(), path, body)
        refused(response, 501, param="model", code="not_implemented")
        assert response.headers["x-should-retry"] == "false"


def test_engine_with_embeddings_only() -> None:
    engine = Measuring()
    response = post(engine, EMBEDDINGS, {"input": ["ab"] * (BATCH_INPUTS + 1)})
    assert vector(response, BATCH_INPUTS) == pytest.approx([2 / 5**0.5, 1 / 5**0.5])
    assert engine.given == [BATCH_INPUTS, 1]
    refused(
        post(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), 501, param="messages"
    )


@pytest.mark.parametrize(
    "made", [[], [Embedding(b"")], [Embedding.of([1])] * 2, [Embedding.of([1]), Embedding.of([1, 2])]]
)
def test_engine_with_wrong_vectors(made: list[Embedding]) -> None:
    response = post(Measuring(made), EMBEDDINGS, {"input": "a" if len(made) != 2 or made[0] == made[1] else ["a", "b"]})
    refused(response, 500, code="inference_error")


def test_stalled_engine() -> None:
    settings = Settings(limits=Limits(stall_seconds=0.2))
    engine = Measuring()
    refused(post(engine, EMBEDDINGS, {"input": "wait"}, settings), 504, code="engine_timeout")
    assert engine.gone.is_set()

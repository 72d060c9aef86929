"""Real sentence embeddings through the official SDK, beside a chat model."""

import math
import struct
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from dragoman.core.embeddings import Embedding
from tests.support.openai_sdk import sdk
from tests.support.requests import eventually, refused, talking, under_way
from tests.support.server_process import Running, serving

TEXTS = ["How do I reset my password?", "I forgot my login and need a new one.", "The cat sleeps on the sofa."]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path, smollm2_path: Path) -> Iterator[Running]:
    config = {
        "models": {
            "smollm2": {"source": str(smollm2_path), "context": 1024, "slots": 2, "layout": "as-is"},
            "minilm": {"source": str(minilm_path)},
        },
        "aliases": {"text-embedding-*": "minilm"},
    }
    with serving(tmp_path_factory.mktemp("minilm"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with sdk(server) as made:
        yield made


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


def vectors(client: OpenAI, texts: list[str], model: str = "minilm") -> list[Embedding]:
    reply = client.embeddings.create(model=model, input=texts)
    return [Embedding.of(entry.embedding) for entry in reply.data]


def test_similar_sentences_have_similar_vectors(client: OpenAI) -> None:
    password, login, cat = vectors(client, TEXTS, "text-embedding-3-small")
    assert password.dimensions == 384
    assert password.likeness(login) > 0.4 > 0.2 > password.likeness(cat)


def test_base64_float_and_dimensions(client: OpenAI) -> None:
    packed = client.embeddings.create(model="minilm", input=TEXTS)
    plain = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    short = client.embeddings.create(model="minilm", input=TEXTS, dimensions=64)
    raw = client.embeddings.with_raw_response.create(
        model="minilm", input=TEXTS, encoding_format="base64"
    ).http_response
    for index in range(3):
        whole = plain.data[index].embedding
        assert packed.data[index].embedding == pytest.approx(whole, abs=1e-7)
        assert list(struct.unpack("<384f", b64decode(raw.json()["data"][index]["embedding"]))) == whole
        length = math.hypot(*whole[:64])
        assert short.data[index].embedding == pytest.approx([number / length for number in whole[:64]], abs=1e-6)
    assert packed.model == "minilm"
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == 9 + 12 + 10
    with pytest.raises(openai.BadRequestError, match="has 384, fewer than 512"):
        client.embeddings.create(model="minilm", input=TEXTS, dimensions=512)


def test_token_ids(client: OpenAI, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"model": "minilm", "content": TEXTS[0]}).json()["tokens"]
    text, ids = (
        client.embeddings.create(model="minilm", input=given).data[0].embedding
        for given in (TEXTS[0], [[101, *tokens, 102]])
    )
    assert text == ids


def test_too_long(http: httpx.Client) -> None:
    body = {"model": "minilm", "input": ["fine", "word " * 600]}
    words = refused(http.post("/v1/embeddings", json=body), 400, param="input[1]", code="context_length_exceeded")
    assert "maximum context length is 512 tokens, but the input has 602" in words


def test_embedding_model_refuses_chat(http: httpx.Client) -> None:
    body = {"model": "minilm", "messages": [{"role": "user", "content": "hello"}]}
    refused(http.post("/v1/chat/completions", json=body), 501, param="messages")


def test_rerank(http: httpx.Client) -> None:
    documents = [TEXTS[2], "Open the account settings and choose a new password.", "Invoices are sent monthly."]
    body = {"model": "minilm", "query": TEXTS[0], "documents": documents, "return_documents": True, "top_n": 2}
    best, second = http.post("/v1/rerank", json=body).json()["results"]
    assert best["document"]["text"] == documents[1]
    assert best["relevance_score"] > 0.4 > second["relevance_score"]


def test_chat_model_can_embed(client: OpenAI) -> None:
    password, login, cat = vectors(client, TEXTS, "smollm2")
    assert password.dimensions == 576
    assert password.likeness(login) > password.likeness(cat)


def test_stream_of_same_model_continues(server: Running, client: OpenAI) -> None:
    texts = ["The old clockmaker wound the clock of the tower every morning. " * 8] * 10
    with ThreadPoolExecutor(1) as pool:
        embedding = pool.submit(vectors, client, texts, "smollm2")
        under_way(server, "smollm2")
        with client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=24, stream=True
        ) as chunks:
            assert len(list(chunks)) >= 24
        assert not embedding.done()
        assert len(embedding.result(60)) == 10


def test_disconnect_stops_embedding(server: Running, client: OpenAI) -> None:
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        # This would take minutes.
        impatient.embeddings.create(model="smollm2", input=["word " * 900] * 200)
    assert eventually(lambda: any(event.get("status") == 499 for event in server.events()))
    assert vectors(client, ["short"], "smollm2")

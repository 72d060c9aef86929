"""Real sentence embeddings through the official SDK, beside a chat model."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from dragoman.core.embeddings import Embedding
from tests.support.requests import eventually, refused, talking
from tests.support.sdk import sdk
from tests.support.server_process import Running, Serving

TEXTS = ["How do I reset my password?", "I forgot my login and need a new one.", "The cat sleeps on the sofa."]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, minilm_path: Path, smollm2_path: Path, serving: Serving
) -> Iterator[Running]:
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
    assert password.cosine_similarity(login) > 0.4 > 0.2 > password.cosine_similarity(cat)


def test_usage_and_maximum_dimensions(client: OpenAI) -> None:
    whole = client.embeddings.create(model="minilm", input=TEXTS)
    assert whole.model == "minilm"
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == 9 + 12 + 10
    with pytest.raises(openai.BadRequestError, match="has 384, fewer than 512"):
        client.embeddings.create(model="minilm", input=TEXTS, dimensions=512)


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


def test_disconnect_stops_embedding(server: Running, client: OpenAI) -> None:
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        # This would take minutes.
        impatient.embeddings.create(model="smollm2", input=["word " * 900] * 200)
    assert eventually(lambda: any(event.get("status") == 499 for event in server.events()))
    assert vectors(client, ["short"], "smollm2")


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]
)
def test_error_of_a_chat_with_an_embedding_model_names_the_route_for_embeddings(
    http: httpx.Client, path: str, field: str
) -> None:
    body = {"model": "minilm", "max_tokens": 5, field: [{"role": "user", "content": "hello"}]}
    message = http.post(path, json=body).json()["error"]["message"]
    assert "model 'minilm' makes embeddings only; use /v1/embeddings, or another model" in message


def test_error_of_an_image_for_a_model_that_reads_only_text(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    response = http.post(
        "/v1/chat/completions", json={"model": "smollm2", "messages": [{"role": "user", "content": [image]}]}
    )
    refused(response, 501, param="messages[0].content[0]")
    assert (
        "model 'smollm2' does not accept images; remove messages[0].content[0]" in response.json()["error"]["message"]
    )


def test_error_of_an_unknown_model_suggests_an_alias_for_it(http: httpx.Client) -> None:
    for name, target in (("gpt-4o", "smollm2"), ("my-embed-3", "minilm"), ("it's", None)):
        message = http.post("/v1/embeddings", json={"model": name, "input": "x"}).json()["error"]["message"]
        alias = f"{name}={target}" if target else "NAME=smollm2"
        assert message.endswith(f"Start with --alias '{alias}' to map it.")

"""What clients of an OpenAI server in Ruby rely on: served by Dragoman, and by Dragoman in front of such a server."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import Client, Engine, ModelInfo
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Output
from dragoman.core.errors import NotSupported
from dragoman.core.events import TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.storage.keys import KeyStore
from tests.support.compat_servers import CompatServer, ruby
from tests.support.requests import CHAT, COMPLETIONS, HELLO, PATIENCE, ask, frames, recorded, refused, talking, text_of
from tests.support.server_process import Running, Serving

EMBEDDINGS = "/v1/embeddings"


class Chatty(Engine):
    """What a backend overrides for chats. The rest are defaults."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield from request.last_user_text.upper()


class Tokens(Engine):
    """Generates from tokens, and only from tokens."""

    device = "cuda"

    def models(self) -> list[ModelInfo]:
        return [ModelInfo("tokens", owner="lab")]

    def supports(self) -> frozenset[str]:
        return frozenset({"token_prompt", "token_ids"})

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        assert isinstance(request.prompt, tuple)
        for token in request.prompt:
            yield TextDelta(f"{token} ", tokens=(token,))


class Raising(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield from request.last_user_text.split("!")[:-1]
        raise RuntimeError("the secret of the backend")


class Vectors(Engine):
    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return [Embedding.of((0.6, 0.8), len(one)) for one in inputs]


@pytest.fixture(scope="module")
def upstream() -> Iterator[CompatServer]:
    with CompatServer(ruby).running() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving, upstream: CompatServer) -> Iterator[Running]:
    config = {
        "models": {
            "toy": {"engine": "upstream", "url": upstream.url, "protocol": "chat"},
            "echo": {"engine": "scripted"},
            "chatty": {"engine": f"{__name__}:Chatty"},
            "vectors": {"engine": f"{__name__}:Vectors"},
            "tokens": {"engine": f"{__name__}:Tokens"},
            "raising": {"engine": f"{__name__}:Raising"},
        },
        "keys": {"store": "keys.db"},
        "api_keys": ["secret"],
        "default": "echo",
    }
    with serving(tmp_path_factory.mktemp("ruby"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server, {"authorization": "Bearer secret"}) as made:
        yield made


def test_routes(client: httpx.Client) -> None:
    names = {model["id"] for model in client.get("/v1/models").json()["data"]}
    assert {"toy", "echo", "chatty", "vectors", "tokens"} <= names
    for path in (CHAT, COMPLETIONS):
        assert text_of(ask(client, path)) == "hello"
    assert client.post(EMBEDDINGS, json={"input": "hello"}).status_code == 200


def test_backend_class_with_safe_defaults(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="chatty")) == "HELLO"
    whole = frames(ask(client, CHAT, model="chatty", stream=True).text)
    assert whole[-1] == "[DONE]"


def test_device_kind_and_model_owner(client: httpx.Client) -> None:
    for name, device, owner in (("tokens", "cuda", "lab"), ("chatty", "cpu", "dragoman")):
        ask(client, COMPLETIONS, model=name, prompt=[1])
        model = client.get(f"/v1/models/{name}").json()
        assert (model["device"], model["owned_by"]) == (device, owner)


def test_missing_capability_is_not_implemented(client: httpx.Client) -> None:
    refused(client.post(EMBEDDINGS, json={"model": "chatty", "input": "x"}), 501, param="model", code="not_implemented")
    refused(client.post(EMBEDDINGS, json={"model": "toy", "input": "x"}), 501, code="not_implemented")


def test_token_ids_as_prompt_text_and_ids_as_reply(client: httpx.Client) -> None:
    response = ask(client, COMPLETIONS, model="toy", prompt=[1, 2, 3])
    assert text_of(response) == "1 2 3"
    assert response.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_generate_from_tokens_whole_and_streaming_with_ids(client: httpx.Client, is_streamed: bool) -> None:
    fields = {"model": "tokens", "prompt": [3, 1, 2], "return_token_ids": True, "stream": is_streamed}
    response = ask(client, COMPLETIONS, **fields)
    replies = frames(response.text)[:-1] if is_streamed else [response.json()]
    choices = [reply["choices"][0] for reply in replies]
    assert "".join(choice["text"] for choice in choices).strip() == "3 1 2"
    for field in ("ids", "token_ids"):
        assert [token for choice in choices for token in choice.get(field) or ()] == [3, 1, 2]
    refused(ask(client, COMPLETIONS, model="tokens", prompt="3 1 2"), 501, param="prompt", code="not_implemented")
    refused(ask(client, CHAT, model="tokens"), 501, param="messages", code="not_implemented")


def test_string_prompt_is_not_empty(client: httpx.Client) -> None:
    assert text_of(ask(client, COMPLETIONS, model="echo", prompt="not empty")) == "not empty"


@pytest.mark.parametrize("model", ["toy", "chatty"])
def test_chat_stream(client: httpx.Client, model: str) -> None:
    *chunks, done = frames(ask(client, CHAT, model=model, stream=True).text)
    assert done == "[DONE]"
    first, last = chunks[0]["choices"][0], chunks[-1]["choices"][0]
    assert first["delta"]["role"] == "assistant"
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "HELLO"
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_of_a_whole_reply(client: httpx.Client) -> None:
    for is_streamed in (False, True, False):
        response = ask(client, CHAT, model="toy", stream=is_streamed)
        assert is_streamed or response.json()["usage"]["total_tokens"] == 3


def test_usage_of_a_stream_if_requested(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        for options, count in (({"include_usage": True}, 1), (None, 0)):
            *chunks, _ = frames(ask(client, path, model="echo", stream=True, stream_options=options).text)
            usages = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
            assert len(usages) == count
            assert all(usage["completion_tokens"] > 0 for usage in usages)


def test_finish_reason_is_not_always_stop(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        for limit, reason in ((1, "length"), (50, "stop")):
            response = ask(client, path, model="echo", max_tokens=limit)
            assert response.json()["choices"][0]["finish_reason"] == reason
            chunks = frames(ask(client, path, model="echo", max_tokens=limit, stream=True).text)
            assert chunks[-2]["choices"][0]["finish_reason"] == reason


def test_stream_is_a_field_and_not_a_substring(client: httpx.Client) -> None:
    said = '"stream":true'
    assert text_of(ask(client, CHAT, messages=[{"role": "user", "content": said}])) == said


def test_ids_are_unique(client: httpx.Client) -> None:
    replies = [ask(client, CHAT, model="toy") for _ in range(3)]
    ids = [reply.json()["id"] for reply in replies]
    assert len(set(ids)) == 3
    assert [reply.headers["x-request-id"] for reply in replies] == ids


def test_embeddings_of_token_ids(client: httpx.Client) -> None:
    body = client.post(EMBEDDINGS, json={"model": "vectors", "input": [5, 6, 7]}).json()
    assert [entry["embedding"] for entry in body["data"]] == [pytest.approx([0.6, 0.8])]
    assert body["usage"]["prompt_tokens"] == 3
    assert client.post(EMBEDDINGS, json={"model": "vectors", "input": []}).status_code == 400


def test_event_log_and_principal(client: httpx.Client, server: Running) -> None:
    response = ask(client, CHAT)
    [event] = recorded(server, id=response.json()["id"])
    usage = response.json()["usage"]
    assert (event["model"], event["completion_tokens"]) == ("echo", usage["completion_tokens"])
    assert event["principal"] not in ("", None, "anonymous")
    # Latencies are in microseconds.
    assert 0 < event["first_token_us"] <= event["duration_us"]
    start = server.events()[0]
    assert start["event"] == "run_start"
    assert {"schema", "time", "host"} <= start.keys()


@pytest.mark.parametrize("principal", ["user:ada", "agent:crawler/ada"])
def test_user_and_agent_identities(server: Running, principal: str) -> None:
    secret, _ = KeyStore(server.log.parent / "keys.db").create(principal)
    with talking(server, {"authorization": f"Bearer {secret}"}) as client:
        reply = ask(client, CHAT)
    [event] = recorded(server, id=reply.json()["id"])
    assert event["principal"] == principal


def test_event_log_ends_with_totals(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": {"echo": {"engine": "scripted"}}}) as running, talking(running) as client:
        response = ask(client, CHAT)
        running.process.terminate()
        assert running.process.wait(PATIENCE) == 0
        start, *requests, end = running.events()
    assert (start["event"], end["event"]) == ("run_start", "run_end")
    assert start["config"]
    assert response.json()["id"] in [event["id"] for event in requests]
    assert end["requests"] == len(requests)


def test_errors_are_counted(client: httpx.Client, server: Running) -> None:
    response = ask(client, CHAT, model="nothing")
    refused(response, 404, param="model", code="model_not_found")
    [event] = recorded(server, id=response.headers["x-request-id"])
    assert event["status"] == 404


def test_exceptions_of_the_backend_are_errors(client: httpx.Client) -> None:
    for is_streamed in (False, True):
        failed = ask(client, CHAT, model="raising", stream=is_streamed)
        assert "secret" not in refused(failed, 500, code="inference_error")
    words = [{"role": "user", "content": "one!two!"}]
    *chunks, last = frames(ask(client, CHAT, model="raising", messages=words, stream=True).text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:]] == ["one", "two"]
    assert last["error"]["code"] == "inference_error"


def test_client_of_the_server(upstream: CompatServer) -> None:
    with Client(upstream.url, model="toy", protocol="chat") as client:
        assert [model.name for model in client.models()] == ["toy"]
        with client.stream("hello") as events:
            list(events)
        messages: Any = HELLO
        for reply in (client.complete(messages), events.reply()):
            assert (reply.text, reply.reason) == ("HELLO", "stop")
        assert not events.reply().is_counted
        with pytest.raises(NotSupported, match="not supported by this backend"):
            client.embed("hello")

"""The statuses and bodies of errors."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.requests import CHAT, COMPLETIONS, HELLO, ask, eventually, frames, refused, talking, text_of
from tests.support.server_process import Running, server_fixture

ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET"),
    ],
)
def test_wrong_method(client: httpx.Client, method: str, path: str, allow: str) -> None:
    response = client.request(method, path)
    refused(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == allow


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/v1/chat/completion", CHAT),
        ("/api/v1/messages/", "/v1/messages"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_error_of_a_wrong_base_url_names_the_path_that_was_meant(client: httpx.Client, path: str, meant: str) -> None:
    response = client.post(path, json={})
    refused(response, 404, code="not_found")
    assert response.json()["error"]["message"] == f"there is nothing at {path}; did you mean {meant}?"


def test_error_of_an_unknown_path_suggests_nothing(client: httpx.Client) -> None:
    assert client.post("/some/where/else", json={}).json()["error"]["message"] == "there is nothing at /some/where/else"


def test_head_request_without_get_route(client: httpx.Client) -> None:
    response = client.head(CHAT)
    assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")


class TestHonestParameters:
    @ROUTES
    @pytest.mark.parametrize("stream", [False, True])
    def test_ignored_parameters_are_named(self, client: httpx.Client, path: str, stream: bool) -> None:
        response = ask(client, path, temperature=0, top_k=5, seed=1, guess_me=True, stream=stream)
        assert response.is_success
        assert response.headers["x-dragoman-ignored"] == "temperature, top_k, seed, guess_me"

    @ROUTES
    @pytest.mark.parametrize("field", ["temperature", "min_p", "seed", "logit_bias", "stop_token_ids", "guess_me"])
    def test_strict_by_header(self, client: httpx.Client, path: str, field: str) -> None:
        values: dict[str, Any] = {"logit_bias": {"1": 1}, "stop_token_ids": [1]}
        fields = {field: values.get(field, 1)}
        strict = {"x-dragoman-strict": "true"}
        body = {"messages": HELLO, "prompt": "hello"} | fields
        del body["prompt" if path == CHAT else "messages"]
        refused(client.post(path, json=body, headers=strict), 400, param=field, code="unsupported_parameter")
        assert client.post(path, json=body, headers={"x-dragoman-strict": "false"}).is_success

    def test_logprobs(self, client: httpx.Client) -> None:
        response = ask(client, CHAT, logprobs=True, top_logprobs=2)
        assert response.headers["x-dragoman-ignored"] == "logprobs"
        response = ask(client, COMPLETIONS, logprobs=2, return_token_ids=True)
        assert response.headers["x-dragoman-ignored"] == "logprobs, return_token_ids"

    def test_server_features_are_honoured_in_strict_mode(self, client: httpx.Client) -> None:
        fields = {"messages": HELLO, "n": 2, "stop": ["o"], "max_tokens": 5, "user": "me"}
        response = client.post(CHAT, json=fields, headers={"x-dragoman-strict": "true"})
        assert text_of(response, 1) == "hell"

    def test_strict_by_configuration(self, faulty: Running) -> None:
        with talking(faulty) as client:
            refused(ask(client, CHAT, temperature=1), 400, param="temperature", code="unsupported_parameter")
            lenient = client.post(
                CHAT, json={"messages": HELLO, "temperature": 1}, headers={"x-dragoman-strict": "false"}
            )
            assert lenient.headers["x-dragoman-ignored"] == "temperature"


faulty = server_fixture(
    {
        "models": {
            "echo": {"engine": "scripted"},
            "hanging": {"engine": "scripted", "hang_after": 1, "slots": 1},
            "crashing": {
                "engine": "scripted",
                "crash_after": 3,
                "replies": [{"match": "die", "output": "one two three four"}],
            },
        },
        "strict": True,
        "limits": {"stall_seconds": 1},
    }
)
"""A strict server with models that hang and crash."""


class TestFaults:
    @pytest.fixture
    def client(self, faulty: Running) -> Iterator[httpx.Client]:
        with talking(faulty) as made:
            yield made
            assert text_of(ask(made, CHAT)) == "hello"

    def test_silence_in_mid_stream_is_an_error_frame_and_frees_the_slot(self, client: httpx.Client) -> None:
        for _ in range(2):
            begun = time.monotonic()
            response = ask(client, CHAT, model="hanging", stream=True)
            assert response.status_code == 200
            *_, content, last = frames(response.text)
            assert content["choices"][0]["delta"]["content"] == "hell"
            assert last["error"]["code"] == "engine_timeout"
            assert time.monotonic() - begun > 0.9

    def test_death_without_a_stream_is_a_502_and_the_engine_comes_back(
        self, faulty: Running, client: httpx.Client
    ) -> None:
        refused(ask(client, COMPLETIONS, model="crashing", prompt="die"), 502, code="engine_died")
        assert text_of(ask(client, COMPLETIONS, model="crashing", prompt="a")) == "a"
        assert eventually(lambda: bool(faulty.workers()))

    def test_death_in_mid_stream_is_an_error_frame(self, client: httpx.Client) -> None:
        response = ask(client, COMPLETIONS, model="crashing", prompt="die", stream=True)
        assert response.status_code == 200
        *content, last = frames(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in content) == "one two thre"
        assert last["error"]["code"] == "engine_died"

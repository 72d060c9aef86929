"""Rendered prompts, of an engine in the server process and of one in a worker."""

from typing import Any

import httpx
import pytest

from tests.support.requests import HELLO, refused
from tests.support.server_process import server_fixture

RENDER = "/v1/chat/completions/render"
TOOL = {"type": "function", "function": {"name": "f"}}


server = server_fixture(
    {
        "models": {
            "showing": {"engine": "tests.support.engines:Showing"},
            "showing-from-afar": {"engine": "tests.support.engines:ShowingFromAfar"},
            "mute": {"engine": "tests.support.engines:NeverStops"},
            "unloaded": {"engine": "tests.support.engines:ShowingFromAfar"},
        }
    }
)


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post(RENDER, json={"messages": HELLO, **fields})


SHOWING = pytest.mark.parametrize("model", ["showing", "showing-from-afar"])


@SHOWING
def test_prompt_and_tokens(client: httpx.Client, model: str) -> None:
    response = ask(client, model=model, tools=[TOOL], temperature=0, stream=True)
    text = "tool: f\nuser: hello\n"
    assert response.json() == {
        "object": "chat.completion.prompt",
        "model": model,
        "prompt": text,
        "tokens": [ord(letter) for letter in text],
        "token_count": len(text),
        "format": "hermes",
    }
    assert "x-dragoman-ignored" not in response.headers
    assert response.headers["x-request-id"]


@SHOWING
def test_errors_are_those_of_chat(client: httpx.Client, model: str) -> None:
    long = [{"role": "user", "content": "x" * 200}]
    refused(ask(client, model=model, messages=long), 400, param="messages", code="context_length_exceeded")
    refused(ask(client, model=model, messages=[]), 400, param="messages")
    refused(ask(client, model=model, guided_choice=["a"]), 501, param="guided_choice", code="not_implemented")


def test_unsupported_parameters_are_reported(client: httpx.Client) -> None:
    response = ask(client, reasoning_effort="low", seed=1)
    assert response.headers["x-dragoman-ignored"] == "seed, reasoning_effort"
    strict = client.post(RENDER, json={"messages": HELLO, "seed": 1}, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="seed", code="unsupported_parameter")


def test_model_without_render_is_a_501(client: httpx.Client) -> None:
    assert "prompts" in refused(ask(client, model="mute"), 501, code="not_implemented")
    refused(ask(client, model="unknown"), 404, param="model", code="model_not_found")
    refused(client.get(RENDER), 405, code="method_not_allowed")


def test_format_known_only_to_engine_is_shown_after_loading(client: httpx.Client) -> None:
    listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
    ask(client, model="showing-from-afar")
    assert client.get("/v1/models/showing-from-afar").json()["format"] == listed["showing"]["format"] == "hermes"
    assert listed["unloaded"]["state"] == "cold"
    assert "format" not in listed["unloaded"]


@SHOWING
def test_tokens_of_an_engine_without_generation_prompts(client: httpx.Client, model: str) -> None:
    fields = {"model": model, "messages": HELLO, "add_generation_prompt": False}
    response = client.post("/tokenize", json=fields)
    assert response.json()["count"] == len("user: hello\n")
    assert response.headers["x-dragoman-ignored"] == "add_generation_prompt"
    strict = client.post("/tokenize", json=fields, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="add_generation_prompt", code="unsupported_parameter")

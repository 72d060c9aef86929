"""Tokens of texts and of chats, under the names of llama.cpp's server and vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.requests import CHAT, HELLO, ask, refused, talking
from tests.support.server_process import Running, Serving

TOKENIZE = "/tokenize"
EMOJI = "a 😀"
TOOL = {"type": "function", "function": {"name": "current_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, minilm_path: Path, smollm2_path: Path, serving: Serving
) -> Iterator[Running]:
    config = {
        "models": {
            "smollm2": {"source": str(smollm2_path), "context": 1024, "slots": 2, "layout": "as-is"},
            "minilm": {"source": str(minilm_path)},
            "own": {"engine": "tests.ipc.engines:Apart"},
        }
    }
    with serving(tmp_path_factory.mktemp("tokenize"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


def tokenize(client: httpx.Client, **fields: Any) -> Any:
    response = client.post(TOKENIZE, json=fields)
    assert response.status_code == 200, response.text
    assert "x-dragoman-ignored" not in response.headers
    return response.json()


def test_texts_of_tokens(client: httpx.Client) -> None:
    plain = tokenize(client, content=EMOJI)
    assert all(isinstance(token, int) for token in plain["tokens"])
    assert plain["token_strs"] is None
    named = tokenize(client, prompt=EMOJI, with_pieces=True, return_token_strs=True)
    assert (named["count"], named["max_model_len"]) == (plain["count"], plain["max_model_len"])
    assert [entry["id"] for entry in named["tokens"]] == plain["tokens"]
    pieces = [entry["piece"] for entry in named["tokens"]]
    assert b"".join(bytes(p) if isinstance(p, list) else p.encode() for p in pieces) == EMOJI.encode()
    assert any(isinstance(piece, list) for piece in pieces)
    assert named["token_strs"][0] == pieces[0] == "a"
    assert len(named["token_strs"]) == plain["count"]


@pytest.mark.parametrize("field", ["add_special", "add_special_tokens"])
def test_special_tokens_around_a_text(client: httpx.Client, field: str) -> None:
    inner = tokenize(client, model="minilm", content="hello")["tokens"]
    assert tokenize(client, **{"model": "minilm", "content": "hello", field: True})["tokens"] == [101, *inner, 102]
    with_names = {"model": "minilm", "content": "[MASK]", "parse_special": True}
    masked = tokenize(client, **with_names)["tokens"]
    assert len(masked) == 1
    assert tokenize(client, **with_names, add_special=True)["tokens"] == [101, *masked, 102]
    # SmolLM2 needs none.
    assert tokenize(client, **{"content": "hello", field: True}) == tokenize(client, content="hello")


def test_tokens_of_a_chat_are_its_prompt(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    rendered = client.post(f"{CHAT}/render", json=fields).json()
    defaults = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
    found = tokenize(client, **fields, **defaults, return_token_strs=True)
    assert found["tokens"] == rendered["tokens"]
    assert "".join(found["token_strs"]) == rendered["prompt"]
    assert "current_weather" in rendered["prompt"]
    counted = client.post(f"{CHAT}/input_tokens", json=fields)
    assert counted.json() == {"input_tokens": found["count"]}
    usage = ask(client, CHAT, **fields, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == found["count"]


def test_generation_prompt_is_left_out(client: httpx.Client) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Hi."}]
    for messages in (HELLO, turns):
        whole, with_prompt, without = (
            tokenize(client, messages=messages, return_token_strs=True, **fields)
            for fields in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": False})
        )
        assert whole == with_prompt
        assert "".join(whole["token_strs"]) == "".join(without["token_strs"]) + "<|im_start|>assistant\n"
        assert without["tokens"] == whole["tokens"][: without["count"]]


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"content": "x", "colour": "red"}, "colour"),
    ({"content": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": HELLO, "colour": "red"}, "colour"),
    ({"messages": HELLO, "add_special": True}, "add_special"),
    ({"content": "x", "add_generation_prompt": False}, "add_generation_prompt"),
    ({"content": "x", "continue_final_message": True}, "continue_final_message"),
    ({"messages": HELLO, "documents": [{"text": "x"}]}, "documents"),
    ({"model": "own", "content": "x", "with_pieces": True}, "with_pieces"),
    ({"model": "own", "content": "x", "add_special": True}, "add_special"),
]


@pytest.mark.parametrize(("fields", "name"), IGNORED)
def test_ignored_fields_are_reported(client: httpx.Client, fields: dict[str, Any], name: str) -> None:
    response = client.post(TOKENIZE, json=fields)
    assert (response.status_code, response.headers["x-dragoman-ignored"]) == (200, name)
    assert all(isinstance(token, int) for token in response.json()["tokens"])
    strict = client.post(TOKENIZE, json=fields, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param=name, code="unsupported_parameter")


def test_invalid_requests(client: httpx.Client) -> None:
    refused(client.post(TOKENIZE, json={}), 400, param="content")
    refused(client.post(TOKENIZE, json={"content": "x", "messages": HELLO}), 400, param="messages")
    refused(client.post(TOKENIZE, json={"messages": [{"role": "bob"}]}), 400, param="messages[0].role")
    refused(client.post(TOKENIZE, json={"model": "minilm", "messages": HELLO}), 501, param="messages")
    wrong: list[Any] = ["false", 0, [], {}]
    for value in wrong:
        fields = {"messages": HELLO, "add_generation_prompt": value}
        refused(client.post(TOKENIZE, json=fields), 400, param="add_generation_prompt")
    refused(client.post(f"{CHAT}/input_tokens", json={"messages": []}), 400, param="messages")

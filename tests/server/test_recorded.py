"""Recorded requests of real clients: each is accepted, and each stream is well-formed."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tools.websocket import CLOSE, KEY, frame

from tests.protocols import anthropic_stream, response_events
from tests.support.raw_http import raw
from tests.support.requests import frames
from tests.support.server_process import Running, server_fixture
from tests.support.websocket import handshake

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCRIPT = f"<think>Better look.</think>Let me see.\n{CALL}"
LOCAL_HEADERS = ("authorization", "x-api-key", "connection", "upgrade", "content-length", "host", "accept-encoding")
"""Headers that belong to the recorded connection."""
FILES = sorted((Path(__file__).parents[1] / "data" / "clients").glob("*.json"))
RECORDINGS: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text()) for file in FILES}


def is_anthropic(request: dict[str, Any]) -> bool:
    headers = {name.lower() for name in request.get("headers", ())}
    is_messages = request["path"].startswith("/v1/messages")
    return is_messages or "anthropic-version" in headers or request["method"] == "HEAD"


def names(*paths: str, method: str | None = None) -> list[str]:
    return [
        name
        for name, request in RECORDINGS.items()
        if request.get("path", "").startswith(paths) and method in (None, request["method"])
    ]


ANTHROPIC = [name for name, request in RECORDINGS.items() if "path" in request and is_anthropic(request)]
OPENAI = [name for name in names("/v1/chat/completions", "/v1/completions", "/v1/models") if name not in ANTHROPIC]
EMBEDDINGS = names("/v1/embeddings")
RESPONSES = names("/v1/responses", method="POST")
UPGRADES = names("/v1/responses", method="WS-UPGRADE")
MESSAGES = names("/v1/responses", method="WS-MSG")


HERMES = {"engine": "scripted", "format": "hermes", "replies": [{"output": SCRIPT}]}
server = server_fixture({"models": {"hermes": HERMES, "org/m": {"engine": "scripted"}}, "aliases": {"*": "hermes"}})


def replayed(client: httpx.Client, name: str) -> httpx.Response:
    request = RECORDINGS[name]
    headers = {name: value for name, value in request.get("headers", {}).items() if name.lower() not in LOCAL_HEADERS}
    body = request.get("body")
    return client.request(
        request["method"],
        request["path"],
        headers={"content-type": "application/json"} | headers,
        content=None if body is None else json.dumps(body).encode(),
    )


def test_every_recording_is_replayed() -> None:
    replayed_names = {*ANTHROPIC, *OPENAI, *EMBEDDINGS, *RESPONSES, *UPGRADES, *MESSAGES}
    assert {name for name in RECORDINGS if name not in replayed_names} == {"py-openai__responses-retrieve"}
    assert len(ANTHROPIC) >= 58


@pytest.mark.parametrize("name", OPENAI)
def test_openai(client: httpx.Client, name: str) -> None:
    body = RECORDINGS[name].get("body") or {}
    reply = replayed(client, name)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        assert reply.json()["object"] in ("chat.completion", "text_completion", "list", "model")
        return
    *chunks, done = frames(reply.text)
    assert done == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert len(reasons) == body.get("n", 1)
    # Without tools, a call is text.
    offers_tools = "tools" in body or "functions" in body
    assert set(reasons) <= ({"stop", "length", "tool_calls", "function_call"} if offers_tools else {"stop", "length"})


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropic(client: httpx.Client, name: str) -> None:
    request = RECORDINGS[name]
    body = request["body"] or {}
    reply = replayed(client, name)
    if "thread" in body:
        assert reply.status_code == 400
        assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        return
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        check_message(anthropic_stream.accumulated(anthropic_stream.read(reply.content)), body)
    elif "/count_tokens" in request["path"]:
        assert reply.json()["input_tokens"] > 0
    elif request["path"].startswith("/v1/messages"):
        check_message(reply.json(), body)
    elif request["method"] == "GET":
        assert reply.headers["request-id"]
        assert reply.json().get("type", "list") in ("list", "model")


def check_message(message: dict[str, Any], body: dict[str, Any]) -> None:
    kinds = [block["type"] for block in message["content"]]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "hermes")
    tools = {tool["name"] for tool in body.get("tools", ()) if "input_schema" in tool}
    if message["stop_reason"] == "max_tokens":
        return
    assert kinds == (["thinking", "text", "tool_use"] if tools else ["thinking", "text"]), message
    assert message["stop_reason"] == ("tool_use" if tools else "end_turn")
    assert message["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings(client: httpx.Client, name: str) -> None:
    given = RECORDINGS[name]["body"]["input"]
    reply = replayed(client, name)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == (1 if isinstance(given, str) else len(given))
    assert "x-dragoman-ignored" not in reply.headers


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(client: httpx.Client, name: str) -> None:
    request = RECORDINGS[name]
    reply = replayed(client, name)
    assert reply.status_code == 200, reply.text
    if request["path"].endswith("/input_tokens"):
        assert reply.json() == {"object": "response.input_tokens", "input_tokens": 1}
        return
    if request["body"].get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        response = response_events.accumulated(response_events.read(reply.content))
    else:
        response = reply.json()
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", *(["function_call"] if request["body"].get("tools") else [])]


@pytest.mark.parametrize("name", MESSAGES)
def test_websocket_messages_can_be_posted(client: httpx.Client, name: str) -> None:
    body = RECORDINGS[name]["body"]
    reply = client.post("/v1/responses", json=body)
    if "previous_response_id" in body:
        assert reply.json()["error"]["code"] == "previous_response_not_found"
    elif body["input"]:
        assert reply.status_code == 200, reply.text
    else:
        assert reply.json()["error"]["param"] == "input"


@pytest.mark.parametrize("name", UPGRADES)
def test_websocket_is_accepted(server: Running, name: str) -> None:
    headers = [f"{key}: {value}" for key, value in RECORDINGS[name]["headers"].items()]
    lines = [f"Sec-WebSocket-Key: {KEY.decode()}", "Connection: Upgrade", *headers]
    answer = raw(server, handshake(opening="\r\n".join(lines).encode()) + frame(CLOSE), 0.5)
    assert answer.status == 101
    assert b"sec-websocket-extensions" not in answer.head


def test_unknown_response_is_not_found(client: httpx.Client) -> None:
    reply = replayed(client, "py-openai__responses-retrieve")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("claude__tool__3", None),
        ("claude__webfetch__3", "tools[0].type"),
        ("codex__tool__2", "tools[8], reasoning.summary"),
        # A reasoning item that is not stored is skipped.
        ("aisdk__responses-stream-tools__2", "input[1]"),
    ],
)
def test_parameters_of_agents_are_honoured_or_reported(client: httpx.Client, name: str, ignored: str | None) -> None:
    assert replayed(client, name).headers.get("x-dragoman-ignored") == ignored


def test_items_of_earlier_responses_can_be_referenced(client: httpx.Client) -> None:
    def accumulated(reply: httpx.Response) -> dict[str, Any]:
        return response_events.accumulated(response_events.read(reply.content))

    first = accumulated(replayed(client, "aisdk__responses-stream-tools__1"))
    body = RECORDINGS["aisdk__responses-stream-tools__2"]["body"]
    question, *_, result = body["input"]
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = result | {"call_id": first["output"][-1]["call_id"]}
    reply = client.post("/v1/responses", json=body | {"input": [question, *references, result]})
    assert "x-dragoman-ignored" not in reply.headers
    final = accumulated(reply)
    listed = client.get(f"/v1/responses/{final['id']}/input_items?order=asc").json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    unknown = {"type": "item_reference", "id": "msg_none"}
    reply = client.post("/v1/responses", json={"input": [unknown, {"role": "user", "content": "hi"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input[0].id")

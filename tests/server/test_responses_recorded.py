"""Recorded requests of real clients to the Responses API: each is accepted, each stream is well-formed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.protocols.response_events import accumulated, read
from tests.support.requests import raw, talking
from tests.support.server_process import Running, serving

RECORDED = Path(__file__).parents[1] / "data" / "clients"
SCRIPT = "<think>Better look.</think>Let me see.\n"
CALL = '<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Köln"}}}}\n</tool_call>'


def recordings() -> dict[str, dict[str, Any]]:
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RECORDED.glob("*.json"))}
    return {name: request for name, request in found.items() if request.get("path", "").startswith("/v1/responses")}


RECORDINGS = recordings()
POSTED = [name for name, request in RECORDINGS.items() if request["method"] == "POST"]
UPGRADES = [name for name, request in RECORDINGS.items() if request["method"] == "WS-UPGRADE"]
MESSAGES = [name for name, request in RECORDINGS.items() if request["method"] == "WS-MSG"]
SECRET = ("authorization", "connection", "upgrade")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    output = SCRIPT + CALL.format(name="get_weather")
    config = {
        "models": {"hermes": {"engine": "scripted", "format": "hermes", "replies": [{"output": output}]}},
        "aliases": {"*": "hermes"},
    }
    with serving(tmp_path_factory.mktemp("recorded"), config) as made:
        yield made


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[httpx.Client]:
    with talking(running) as made:
        yield made


def replayed(client: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    headers = {name: value for name, value in request["headers"].items() if name.lower() not in SECRET}
    content = None if request["body"] is None else json.dumps(request["body"]).encode()
    return client.request(request["method"], request["path"], headers=headers, content=content)


def test_there_are_recordings() -> None:
    assert (len(POSTED), len(UPGRADES), len(MESSAGES)) == (32, 3, 6)


@pytest.mark.parametrize("name", POSTED)
def test_recorded_request_is_accepted(client: httpx.Client, name: str) -> None:
    request = RECORDINGS[name]
    body = request["body"]
    reply = replayed(client, request)
    assert reply.status_code == 200, reply.text
    if request["path"].endswith("/input_tokens"):
        assert reply.json() == {"object": "response.input_tokens", "input_tokens": 1}
        return
    if body.get("stream"):
        assert reply.headers["content-type"].startswith("text/event-stream")
        response = accumulated(read(reply.content))
    else:
        response = reply.json()
    kinds = [item["type"] for item in response["output"]]
    # Without tools, a call is text.
    assert kinds == ["reasoning", "message", *(["function_call"] if body.get("tools") else [])]


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
def test_websocket_is_answered_426(running: Running, name: str) -> None:
    headers = [
        f"{key}: {value}" for key, value in RECORDINGS[name]["headers"].items() if key.lower() != "authorization"
    ]
    lines = ["GET /v1/responses HTTP/1.1", "Host: localhost", "Connection: Upgrade", *headers]
    answer = raw(running, "\r\n".join([*lines, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "", ""]).encode(), 0)
    assert answer.status == 426
    assert json.loads(answer.body)["error"]["code"] == "upgrade_required"


def test_unknown_response_is_not_found(client: httpx.Client) -> None:
    reply = replayed(client, RECORDINGS["py-openai__responses-retrieve"])
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_codex_parameters_are_honoured_or_reported(client: httpx.Client) -> None:
    reply = replayed(client, RECORDINGS["codex__tool__2"])
    assert reply.headers["x-dragoman-ignored"] == "tools[8], reasoning.summary"


def test_items_of_earlier_responses_can_be_referenced(client: httpx.Client) -> None:
    first = accumulated(read(replayed(client, RECORDINGS["aisdk__responses-stream-tools__1"]).content))
    body = json.loads(json.dumps(RECORDINGS["aisdk__responses-stream-tools__2"]["body"]))
    body["input"] = [
        body["input"][0],
        *({"type": "item_reference", "id": item["id"]} for item in first["output"]),
        {**body["input"][-1], "call_id": first["output"][-1]["call_id"]},
    ]
    reply = client.post("/v1/responses", json=body)
    assert "x-dragoman-ignored" not in reply.headers
    final = accumulated(read(reply.content))
    listed = client.get(f"/v1/responses/{final['id']}/input_items?order=asc").json()
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]


def test_missing_reasoning_item_is_skipped(client: httpx.Client) -> None:
    reply = replayed(client, RECORDINGS["aisdk__responses-stream-tools__2"])
    assert reply.headers["x-dragoman-ignored"] == "input[1]"
    said = {"type": "item_reference", "id": "msg_none"}
    reply = client.post("/v1/responses", json={"input": [said, {"role": "user", "content": "hi"}]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "input[0].id")

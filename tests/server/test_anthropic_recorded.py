"""Recorded requests of real clients to Anthropic's routes: each is accepted, each stream is well-formed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.protocols.anthropic_stream import accumulated, read
from tests.support.requests import talking
from tests.support.server_process import serving

RECORDED = Path(__file__).parents[1] / "data" / "clients"
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
SCRIPT = f"<think>Better look.</think>Let me see.\n{CALL}"


def _is_ours(request: dict[str, Any]) -> bool:
    """Some recordings are WebSocket messages without a head; they are skipped."""
    headers = {name.lower() for name in request.get("headers", ())}
    is_messages = request.get("path", "").startswith("/v1/messages")
    return is_messages or "anthropic-version" in headers or request.get("method") == "HEAD"


def recordings() -> dict[str, dict[str, Any]]:
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RECORDED.glob("*.json"))}
    return {name: request for name, request in found.items() if _is_ours(request)}


RECORDINGS = recordings()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = {
        "models": {
            "hermes": {"engine": "scripted", "format": "hermes", "replies": [{"output": SCRIPT}]},
            "org/m": {"engine": "scripted"},
        },
        "aliases": {"*": "hermes"},
    }
    with serving(tmp_path_factory.mktemp("recorded"), config) as running, talking(running) as made:
        yield made


def replayed(client: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    secret = {"authorization", "x-api-key"}
    headers = {name: value for name, value in request["headers"].items() if name.lower() not in secret}
    content = None if request["body"] is None else json.dumps(request["body"]).encode()
    return client.request(request["method"], request["path"], headers=headers, content=content)


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 58


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_request_is_accepted(client: httpx.Client, name: str) -> None:
    request = RECORDINGS[name]
    response = replayed(client, request)
    body = request["body"] or {}
    if "thread" in body:
        assert response.status_code == 400
        assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
        return
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        _check(accumulated(read(response.content)), body)
    elif "/count_tokens" in request["path"]:
        assert response.json()["input_tokens"] > 0
    elif request["path"].startswith("/v1/messages"):
        _check(response.json(), body)
    elif request["method"] == "GET":
        assert response.headers["request-id"]
        assert response.json().get("type", "list") in ("list", "model")


def _check(message: dict[str, Any], body: dict[str, Any]) -> None:
    kinds = [block["type"] for block in message["content"]]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "hermes")
    names = {tool["name"] for tool in body.get("tools", ()) if "input_schema" in tool}
    if message["stop_reason"] == "max_tokens":
        return
    # A call of a tool that was not offered is text.
    assert kinds == (["thinking", "text", "tool_use"] if names else ["thinking", "text"]), message
    assert message["stop_reason"] == ("tool_use" if names else "end_turn")
    assert message["usage"]["output_tokens"] > 0


def test_claude_code_parameters_are_honoured_or_reported(client: httpx.Client) -> None:
    ignored = replayed(client, RECORDINGS["claude__tool__3"]).headers.get("x-dragoman-ignored")
    assert ignored is None
    search = replayed(client, RECORDINGS["claude__webfetch__3"]).headers["x-dragoman-ignored"]
    assert search == "tools[0].type"

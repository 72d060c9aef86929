"""Recorded requests of real clients to the chat and completions routes: each is accepted, with well-formed streams."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.requests import talking
from tests.support.server_process import Running, serving

RECORDED = Path(__file__).parents[1] / "data" / "clients"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
SECRET = ("authorization", "connection", "content-length", "host", "accept-encoding")


def recordings() -> dict[str, dict[str, Any]]:
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RECORDED.glob("*.json"))}
    return {name: request for name, request in found.items() if request.get("path", "").startswith(PATHS)}


RECORDINGS = recordings()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    output = "<think>Better look.</think>Let me see."
    config = {
        "models": {"hermes": {"engine": "scripted", "format": "hermes", "replies": [{"output": output}]}},
        "aliases": {"*": "hermes"},
    }
    running: Running
    with serving(tmp_path_factory.mktemp("recorded"), config) as running, talking(running) as made:
        yield made


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 50


@pytest.mark.parametrize("name", RECORDINGS)
def test_recorded_request_is_accepted(client: httpx.Client, name: str) -> None:
    request = RECORDINGS[name]
    headers = {key: value for key, value in request.get("headers", {}).items() if key.lower() not in SECRET}
    headers.setdefault("content-type", "application/json")
    body = request.get("body")
    content = None if body is None else json.dumps(body).encode()
    reply = client.request(request["method"], request["path"], headers=headers, content=content)
    assert reply.status_code == 200, reply.text
    if body and body.get("stream"):
        frames = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        assert frames[-1] == "[DONE]"
        chunks = [json.loads(frame) for frame in frames[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["stop"] * body.get("n", 1)
    else:
        told = reply.json()
        # Anthropic clients get the list of models in Anthropic's format.
        assert "anthropic-version" in headers or told["object"] in (
            "chat.completion",
            "text_completion",
            "list",
            "model",
        )

"""Credentials for MCP servers reach the server that they are for, and no output: the server repeats them wherever it
can."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.security.test_secrets import assert_nowhere
from tests.server.mcp_fixtures import REPLIES
from tests.support import mcp_server
from tests.support.bad_server import Script, answer, whole
from tests.support.mcp_bad_server import McpServer
from tests.support.requests import eventually, talking
from tests.support.server_process import Running, Serving, command_of

TOKEN, HEADER = "canary-token-of-the-caller", "canary-header-of-the-caller"
ENV, CONFIGURED, FROM_ENV = "canary-env-of-the-config", "canary-header-of-the-config", "canary-from-the-environment"
SECRETS = {TOKEN, HEADER, ENV, CONFIGURED, FROM_ENV}


@dataclass
class Watched:
    running: Running
    folder: Path
    port: int
    bad: McpServer
    answers: list[bytes] = field(default_factory=list)

    def send(self, path: str, **body: Any) -> httpx.Response:
        with talking(self.running) as client:
            sent = client.post(path, json={"model": "m", **body})
        self.answers.append(repr(sent.headers).encode() + sent.content)
        return sent

    def outputs(self) -> dict[str, bytes]:
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "dragoman.json"]
        with talking(self.running) as client:
            pages = {path: client.get(path).content for path in ("/metrics", "/stats", "/admin/models")}
        pids = [self.running.process.pid, *self.running.children()]
        lines = {f"command line of {pid}": command_of(pid) for pid in pids}
        return {str(path): path.read_bytes() for path in files} | pages | lines | {"answers": b"\n".join(self.answers)}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("secrets")
    with mcp_server.http_server() as port, McpServer() as bad, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCP_CANARY", FROM_ENV)
        headers = {"X-Key": CONFIGURED, "Authorization": "Bearer ${MCP_CANARY}"}
        config = {
            "models": {"m": {"engine": "scripted", "format": "hermes", "replies": REPLIES}},
            "storage": str(folder / "dragoman.db"),
            "mcp_servers": {
                "calc": {"command": mcp_server.command(), "env": {"MCP_TEST_SECRET": ENV}},
                "remote": {"url": f"http://127.0.0.1:{port}/mcp", "headers": headers},
                "bad": {"url": f"{bad.url}/mcp", "headers": headers},
            },
            "mcp": {"allow": ["http://127.0.0.1:*"], "allow_addresses": ["127.0.0.1"], "call_seconds": 20},
            "telemetry": {"log_level": "debug", "log_requests": True},
        }
        with serving(folder, config) as running:
            yield Watched(running, folder, port, bad)


def tool(label: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": "never", **fields}


def test_credentials_are_in_no_output(watched: Watched) -> None:
    url = f"http://127.0.0.1:{watched.port}/mcp?key={HEADER}"
    own = tool("calc", server_url=url, headers={"X-Key": HEADER, "Authorization": f"Bearer {TOKEN}"})
    for stream in (False, True):
        for one in (tool("calc"), own, tool("calc", server_url=url, authorization=TOKEN)):
            sent = watched.send("/v1/responses", input="secret", tools=[one], stream=stream)
            assert "***" in sent.text
            watched.send("/v1/responses", input="fail", tools=[one], stream=stream, background=True)
        # The script calls the tools of `calc`. The results of others are in the listing only.
        watched.send("/v1/responses", input="remote", tools=[tool("remote")], stream=stream)
        server = {"type": "url", "name": "calc", "url": url, "authorization_token": TOKEN}
        asked = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 99, "stream": stream}
        assert "***" in watched.send("/v1/messages", mcp_servers=[server], **asked).text
    assert eventually(lambda: watched.running.event_log.stat().st_size > 1000)
    assert_nowhere(SECRETS, watched.outputs())


def repeated(watched: Watched) -> dict[str, Any]:
    """Scripts that repeat the credentials of a request."""

    def given() -> str:
        return repr(watched.bad.heads[-1])

    def error(body: bytes) -> Script:
        number = json.loads(body)["id"]
        return answer({"jsonrpc": "2.0", "id": number, "error": {"code": -1, "message": given()}})

    return {
        "error": error,
        "status": lambda body: answer(
            {"jsonrpc": "2.0", "id": None, "error": {"code": -1, "message": given()}}, "400 B"
        ),
        "text": lambda body: [whole(given().encode(), "401 Unauthorized", content_type="text/plain")],
        "garbage": lambda body: [whole(given().encode())],
        "redirect": lambda body: [
            whole(b"", "307 T", location=f"http://127.0.0.1:1/?{given()[:500]!r}".replace(" ", ""))
        ],
        "header": lambda body: [f"HTTP/1.1 {given()}\r\n\r\n".encode(), "close"],
    }


@pytest.mark.parametrize("form", ["error", "status", "text", "garbage", "redirect", "header"])
def test_credentials_repeated_by_a_server_are_in_no_output(watched: Watched, form: str) -> None:
    script = repeated(watched)[form]
    for method in ("initialize", "tools/list"):
        watched.bad.methods = dict.fromkeys((method, "tools/list", "server/discover"), script)
        for one in (tool("bad"), tool("x", server_url=f"{watched.bad.url}/mcp", authorization=TOKEN)):
            sent = watched.send("/v1/responses", input="hello", tools=[one])
            assert sent.status_code == 200
            assert sent.json()["output"][0]["error"]
    assert any(TOKEN in sent for sent in watched.bad.heads)
    assert any(FROM_ENV in sent for sent in watched.bad.heads)
    assert_nowhere(SECRETS, watched.outputs())


@pytest.mark.parametrize("place", ["tools", "input", "input url", "url"])
def test_requests_with_credentials_are_not_stored(watched: Watched, place: str) -> None:
    one = tool("calc", server_url=f"http://127.0.0.1:{watched.port}/mcp", authorization=TOKEN)
    if place == "tools":
        refused = watched.send("/v1/responses", input="add", tools=[one], background=True)
        assert "background request is stored" in refused.text
    elif place == "url":
        address = tool("calc", server_url=f"http://127.0.0.1:{watched.port}/mcp?key={TOKEN}")
        refused = watched.send("/v1/responses", input="add", tools=[address], background=True)
    else:
        if place == "input url":
            one = tool("calc", server_url=f"http://127.0.0.1:{watched.port}/mcp?key={TOKEN}")
        items = [{"type": "additional_tools", "role": "developer", "tools": [one]}, {"role": "user", "content": "add"}]
        refused = watched.send("/v1/responses", input=items)
        assert "items are stored" in refused.text
    assert refused.status_code == 400
    assert_nowhere(SECRETS, watched.outputs())

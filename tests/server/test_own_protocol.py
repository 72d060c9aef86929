"""A wire protocol of one's own: the example of docs/own-protocol.md behind keys, quotas, metrics and front ends."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import WireProtocol, create_app
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.plugins import Kind, find_plugin
from dragoman.core.request import GenerationRequest
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.preflight_checks import find_diagnostics
from dragoman.server.routes import build_routes
from dragoman.server.serve import serve
from tests.support.requests import eventually
from tests.support.server_process import Running, Serving

PAGE = Path(__file__).parents[2] / "docs" / "own-protocol.md"
PROTOCOL = "complete_api:CompleteProtocol"
KEY = {"authorization": "Bearer secret"}
CONFIG = {
    "protocols": [PROTOCOL],
    "models": {
        "poet": {"engine": "scripted", "replies": [{"output": "Roses are red."}]},
        "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    },
    "default": "poet",
    "api_keys": ["secret"],
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the module path with the example of the documentation."""
    folder = tmp_path_factory.mktemp("protocol")
    code = re.findall(r"```python\n(# complete_api\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "complete_api.py").write_text(code[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield folder
    sys.modules.pop("complete_api", None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, example: Path, serving: Serving) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), CONFIG) as running:
        yield running


def ask(server: Running, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/complete", json={"text": "hi", **fields}, headers=KEY, trust_env=False)


def test_whole_reply(server: Running) -> None:
    reply = ask(server)
    assert reply.json() == {"id": reply.headers["x-request-id"], "text": "Roses are red.", "end": "stop"}


def test_stream_in_its_own_content_type(server: Running) -> None:
    reply = ask(server, stream=True)
    assert reply.headers["content-type"] == "application/x-ndjson"
    *texts, end = map(json.loads, reply.text.splitlines())
    assert "".join(line["text"] for line in texts) == "Roses are red."
    assert end == {"end": "stop"}


def test_errors_in_its_own_format(server: Running) -> None:
    reply = ask(server, max_tokens="many")
    assert reply.status_code == 400
    assert reply.json()["field"] == "max_tokens"
    unknown = ask(server, model="nothing")
    assert unknown.status_code == 404
    assert "nothing" in unknown.json()["error"]


def test_failure_in_a_stream(server: Running) -> None:
    lines = ask(server, model="failing", stream=True).text.splitlines()
    assert "error" in json.loads(lines[-1])


def test_keys_and_telemetry(server: Running) -> None:
    assert httpx.post(f"{server.url}/complete", json={"text": "hi"}, trust_env=False).status_code == 401
    request_id = ask(server).headers["x-request-id"]

    def find_events() -> list[dict[str, Any]]:
        return [event for event in server.events() if event.get("id") == request_id]

    assert eventually(lambda: bool(find_events()))
    (event,) = find_events()
    assert (event["route"], event["scope"]) == ("POST /complete", "completions")
    assert event["completion_tokens"] > 0


def test_other_methods_are_refused(server: Running) -> None:
    reply = httpx.get(f"{server.url}/complete", headers=KEY, trust_env=False)
    assert reply.status_code == 405


def complete_protocol() -> WireProtocol:
    found = find_plugin("protocol", PROTOCOL, {})
    assert isinstance(found, type)
    assert issubclass(found, WireProtocol)
    return found()


async def test_protocol_object_in_an_app(example: Path) -> None:
    app = create_app(ScriptedEngine(), protocols=[complete_protocol()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        reply = await client.post("/complete", json={"text": "hi"})
    await app.stop()
    assert reply.json()["text"] == "hi"


def test_protocol_object_cannot_reach_front_ends(example: Path) -> None:
    with pytest.raises(ConfigError, match="front ends cannot use protocol objects"):
        serve(ScriptedEngine(), settings=Settings(workers=2), protocols=[complete_protocol()])


class Chat(WireProtocol):
    paths = ("/v1/chat/completions",)

    def decode(self, body: bytes) -> GenerationRequest:
        return GenerationRequest()


class WithoutPaths(WireProtocol):
    paths = ()


class WithUnknownScope(Chat):
    paths = ("/mine",)
    scope = "mine"  # type: ignore[assignment]


class WithArguments(Chat):
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "unknown protocol 'nothing'; protocols: none, or module:Class for your own"),
        ("no_module:Mine", "protocol 'no_module:Mine' cannot be imported"),
        ("json:nothing", "protocol 'json:nothing': json has nothing called nothing"),
        ("json:dumps", "protocol 'json:dumps': it is not a subclass of WireProtocol"),
        (f"{__name__}:Chat", "the path /v1/chat/completions is taken"),
        (f"{__name__}:WithoutPaths", "protocol WithoutPaths: `paths` must list at least one path"),
        (f"{__name__}:WithUnknownScope", "protocol WithUnknownScope: unknown scope 'mine'; one of chat, "),
        (f"{__name__}:WithArguments", f"protocol '{__name__}:WithArguments': WithArguments() must work without"),
    ],
)
def test_mistakes_are_reported(name: str, message: str) -> None:
    found = find_diagnostics(Settings(protocols=(name,)))
    assert [(entry.key, entry.level) for entry in found] == [("protocols", "error")]
    assert found[0].message.startswith(message)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_routes(Settings(protocols=(name,)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("protocol", PROTOCOL),
        ("engine", "dragoman.engines.scripted:ScriptedEngine"),
        ("format", "dragoman.formats.tagged_json:HERMES"),
    ],
)
def test_entry_points_of_installed_packages(
    kind: Kind, value: str, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[dragoman.{kind}s]\nacme = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_plugin(kind, "acme", {}) is find_plugin(kind, value, {})

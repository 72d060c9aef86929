"""`dragoman serve --record`: what is in the file, in one process and with front ends."""

import json
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from dragoman.recordings.recorded_exchange import RecordedExchange, read_recording
from tests.support.raw_http import sent
from tests.support.requests import CHAT, COMPLETIONS, HELLO, SMALLEST, ask, eventually, talking, under_way
from tests.support.server_process import Running, Serving

GENERATIONS = (CHAT, COMPLETIONS, "/v1/messages", "/v1/responses")
OTHERS = ("/v1/embeddings", "/v1/rerank", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
CONFIG = {
    "models": {
        "echo": {"engine": "scripted"},
        "brief": {"engine": "scripted", "replies": [{"output": "Yes."}]},
        "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 400}]},
        "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    },
    "default": "echo",
    "limits": {"body_bytes": 20 * 1024 * 1024},
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "recording.jsonl"


@pytest.fixture(scope="module")
def server(recording: Path, tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("recorded"), CONFIG, "--record", str(recording)) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


def exchanges(recording: Path) -> list[RecordedExchange]:
    return [exchange for _, exchange in read_recording(str(recording))] if recording.exists() else []


def recorded(recording: Path, **wanted: Any) -> RecordedExchange:
    """The only exchange with these values, after waiting for it."""

    def found() -> list[RecordedExchange]:
        known = exchanges(recording)
        return [one for one in known if all(getattr(one, name) == value for name, value in wanted.items())]

    assert eventually(lambda: bool(found())), wanted
    (only,) = found()
    return only


def recorded_as(recording: Path, response: httpx.Response) -> RecordedExchange:
    return recorded(recording, id=response.headers["x-request-id"])


@pytest.mark.parametrize("path", [*GENERATIONS, *OTHERS])
def test_request_and_reply_are_recorded(client: httpx.Client, recording: Path, path: str) -> None:
    headers = {"user-agent": "test/1", "anthropic-beta": "x", "authorization": "Bearer sk-secret-key", "cookie": "a=b"}
    response = client.post(f"{path}?beta=true&key=sk-secret-key", json=SMALLEST[path], headers=headers)
    assert response.status_code == 200
    exchange = recorded_as(recording, response)
    assert (exchange.method, exchange.path, exchange.status, exchange.model) == ("POST", path, 200, "echo")
    assert msgspec.json.decode(exchange.request) == SMALLEST[path]
    assert msgspec.json.decode(exchange.reply) == response.json()
    assert exchange.headers == {"user-agent": "test/1", "anthropic-beta": "x"}
    assert 0 < exchange.duration < 60
    assert b"sk-secret" not in recording.read_bytes()


@pytest.mark.parametrize("path", GENERATIONS)
def test_stream_is_recorded_in_the_pieces_that_were_sent(client: httpx.Client, recording: Path, path: str) -> None:
    response = client.post(path, json=SMALLEST[path] | {"stream": True, "max_tokens": 3})
    exchange = recorded_as(recording, response)
    assert "".join(text for _, text in exchange.stream) == response.text
    times = [at for at, _ in exchange.stream]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= exchange.duration
    assert exchange.usage is not None
    assert exchange.usage.completion_tokens > 0


def test_errors_are_recorded(client: httpx.Client, recording: Path) -> None:
    unknown = ask(client, CHAT, model="nope")
    assert recorded_as(recording, unknown).status == 404
    invalid = client.post(CHAT, content=b'{"messages": \n"', headers={"content-type": "application/json"})
    assert msgspec.json.decode(recorded_as(recording, invalid).request) == '{"messages": \n"'
    late = ask(client, CHAT, model="failing", stream=True)
    exchange = recorded_as(recording, late)
    assert exchange.status == 200
    assert "inference_error" in exchange.stream[-1][1]


def test_client_that_leaves_is_recorded(server: Running, recording: Path) -> None:
    with sent(server, CHAT, model="slow", stream=True, user="leaving"):
        under_way(server, "slow")
    exchange = recorded(recording, disconnected=True)
    assert exchange.body["user"] == "leaving"
    assert exchange.status == 200
    assert exchange.stream


def test_other_routes_are_not_recorded(client: httpx.Client, recording: Path) -> None:
    responses = [client.get("/v1/models"), client.post("/v1/conversations", json={}), client.get("/v1/nothing")]
    last = recorded_as(recording, ask(client, CHAT))
    assert not {response.headers["x-request-id"] for response in responses} & {one.id for one in exchanges(recording)}
    assert last.job is None


def test_background_response_is_recorded_once_with_its_reply(client: httpx.Client, recording: Path) -> None:
    body = {"input": "in the background", "background": True}
    for stream in (False, True):
        started = client.post("/v1/responses", json={**body, "stream": stream})
        frame = started.text.partition("data: ")[2].partition("\n")[0]
        name = json.loads(frame)["response"]["id"] if stream else started.json()["id"]
        exchange = recorded(recording, id=name)
        assert exchange.job == "background"
        assert exchange.body["input"] == body["input"]
        assert "response.completed" in exchange.stream[-1][1]
        assert started.headers["x-request-id"] not in {one.id for one in exchanges(recording)}


def test_long_body_is_cut(client: httpx.Client, recording: Path) -> None:
    text = "x" * (9 * 1024 * 1024)
    response = ask(client, CHAT, model="brief", messages=[{"role": "user", "content": text}])
    exchange = recorded_as(recording, response)
    assert exchange.cut == ("request",)
    assert len(bytes(exchange.request)) < len(text)
    assert msgspec.json.decode(exchange.reply) == response.json()


def test_moved_file_is_continued_in_a_new_one(server: Running, client: httpx.Client, recording: Path) -> None:
    moved = recording.with_suffix(".1")
    before = recorded_as(recording, ask(client, CHAT))
    recording.rename(moved)
    server.process.send_signal(signal.SIGHUP)
    for _ in range(8):
        recorded_as(recording, ask(client, CHAT))
    assert len(exchanges(recording)) == 8
    assert before.id in {exchange.id for exchange in exchanges(moved)}
    assert stat.S_IMODE(recording.stat().st_mode) == 0o600


def test_unauthorized_requests_are_not_recorded(tmp_path: Path, serving: Serving) -> None:
    file = tmp_path / "recording.jsonl"
    with serving(tmp_path, CONFIG | {"api_keys": ["sk-the-key"]}, "--record", str(file)) as running:
        with talking(running, {"authorization": "Bearer sk-wrong"}) as client:
            assert ask(client, CHAT).status_code == 401
        with talking(running, {"authorization": "Bearer sk-the-key"}) as client:
            recorded_as(file, ask(client, CHAT, messages=[*HELLO, {"role": "user", "content": "my key: sk-the-key"}]))
        assert len(exchanges(file)) == 1
        assert b"my key: ***" in file.read_bytes()
        assert b"sk-the-key" not in file.read_bytes()


def test_secrets_of_mcp_servers_are_not_recorded(tmp_path: Path, serving: Serving) -> None:
    def url(place: str) -> str:
        return f"https://u:canary-{place}-login@h/mcp?api=canary-{place}/query"

    tool: dict[str, Any] = {"type": "mcp", "server_label": "a", "server_url": url("tool")}
    tool["headers"] = {"X-Key": "canary-header", "Authorization": "Bearer canary-tool-token"}
    inner = {"type": "mcp", "server_label": "b", "server_url": url("item"), "authorization": "canary-item-token"}
    server = {"type": "url", "name": "a", "url": url("server"), "authorization_token": "canary-server-token"}
    # The model repeats its input.
    text = "{0}-login {0}/query {0}-token"
    items = [{"type": "additional_tools", "role": "developer", "tools": [inner]}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"tools": [tool], "input": text.format("canary-tool") + " canary-header"}),
        ("/v1/responses", {"input": [*items, {"role": "user", "content": text.format("canary-item")}]}),
        (
            "/v1/messages",
            {"mcp_servers": [server], "messages": [{"role": "user", "content": text.format("canary-server")}]},
        ),
    ]
    file = tmp_path / "recording.jsonl"
    with serving(tmp_path, CONFIG, "--record", str(file)) as running, talking(running) as client:
        for path, body in bodies:
            exchange = recorded_as(file, ask(client, path, **body))
            assert b"***" in bytes(exchange.request)
    assert b"canary" not in file.read_bytes()


def test_last_exchanges_are_written_before_the_server_ends(tmp_path: Path, serving: Serving) -> None:
    file = tmp_path / "recording.jsonl"
    with serving(tmp_path, CONFIG, "--record", str(file)) as running:
        with talking(running) as client:
            answered = {ask(client, CHAT).headers["x-request-id"] for _ in range(20)}
        assert running.stop() == 0
        assert {exchange.id for exchange in exchanges(file)} == answered
        assert "prompts included" in running.log.read_text()

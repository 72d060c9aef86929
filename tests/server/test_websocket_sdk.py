"""The WebSocket with real clients: the SDK's `responses.connect()`, and the recorded messages of Codex."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponsesServerEvent

from tests.protocols.response_events import accumulated
from tests.support.sdk import async_sdk, sdk
from tests.support.server_process import Running, server_fixture
from tests.support.websocket import events_of, opened

# The SDK uses `websockets` in a way that version 17 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
CLIENTS = Path(__file__).parents[1] / "data" / "clients"
CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
server = server_fixture(
    {
        "models": {
            "local-model": {
                "engine": "scripted",
                "format": "hermes",
                "replies": [{"match": "lorem ipsum dolor sit amet c$", "output": "There it is."}, {"output": CALL}],
            },
            "echo": {"engine": "scripted"},
            "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three"}]},
            "ticks": {"engine": "scripted", "tokens_per_second": 50, "replies": [{"output": "tick " * 2000}]},
        },
        "aliases": {"gpt-*": "local-model"},
        "default": "echo",
    }
)
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
def openai(server: Running) -> Any:
    with sdk(server) as client:
        yield client


def read_response(connection: Any) -> Response:
    for event in connection:
        if event.type in LAST_EVENTS:
            assert event.type == "response.completed", event
            response: Response = event.response
            return response
    raise AssertionError("the connection was closed")


def test_turns_of_the_sdk(openai: OpenAI) -> None:
    with openai.responses.connect() as connection:
        connection.response.create(model="echo", input="hello", store=False)
        first = read_response(connection)
        connection.response.create(model="echo", input="again", store=False, previous_response_id=first.id)
        second = read_response(connection)
    assert (first.output_text, second.output_text) == ("hello", "again")
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_every_event_has_the_type_of_the_sdk(openai: OpenAI) -> None:
    server_event = pydantic.TypeAdapter[Any](ResponsesServerEvent)
    with openai.responses.connect() as connection:
        connection.response.create(model="local-model", input="go", stream_id="main")
        connection.response.create(model="none", input="go", stream_id="main")
        connection.response.create(model="failing", input="go", stream_id="main")
        connection.response.create(model="ticks", input="go", generate=False)
        connection.response.steer(previous_response_id="resp_1", input="stop")
        kinds: Counter[str] = Counter()
        while sum(kinds[kind] for kind in (*LAST_EVENTS, "response.steer.failed")) < 6:
            event = server_event.validate_json(connection.recv_bytes(), strict=True)
            kinds[event.type] += 1
    ends = {kind: kinds[kind] for kind in (*LAST_EVENTS, "response.steer.failed")}
    assert ends == {
        "response.completed": 2,
        "response.incomplete": 0,
        "response.failed": 1,
        # One belongs to the failed response.
        "error": 2,
        "response.steer.failed": 1,
    }


def test_error_event_of_the_sdk(openai: OpenAI) -> None:
    with openai.responses.connect() as connection:
        connection.response.create(model="echo", input="hello", previous_response_id="resp_none")
        error: Any = connection.recv()
        assert (error.type, error.status, error.error.code) == ("error", 400, "previous_response_not_found")
        connection.response.create(model="echo", input="hello")
        assert read_response(connection).output_text == "hello"


def test_async_sdk_runs_streams_at_the_same_time(server: Running) -> None:
    async def run(client: AsyncOpenAI) -> dict[str | None, str]:
        texts: dict[str | None, str] = {}
        async with client, client.responses.connect() as connection:
            await connection.response.create(model="ticks", input="go", stream_id="slow")
            await connection.response.create(model="echo", input="one", stream_id="fast")
            await connection.response.create(model="echo", input="two")
            async for event in connection:
                if event.type == "response.completed":
                    texts[event.stream_id] = event.response.output_text
                    if len(texts) == 2:
                        break
        return texts

    assert asyncio.run(run(async_sdk(server))) == {"fast": "one", None: "two"}


# Codex.


def recorded(name: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads((CLIENTS / f"{name}.json").read_text())
    return recording


def handshake_headers(name: str) -> dict[str, str]:
    headers = recorded(name)["headers"]
    return {key: value for key, value in headers.items() if not key.lower().startswith(("upgrade", "sec-websocket"))}


def test_codex_turn_with_a_tool(server: Running) -> None:
    """The messages of one connection: a warm-up, a request, and the output of the tool that the model called."""
    warm_up, first, second = (recorded(f"codex__ws-tool__{step}")["body"] for step in (2, 3, 4))
    with opened(server, handshake_headers("codex__ws__1"), compression="deflate") as websocket:
        websocket.send(json.dumps(warm_up))
        warm = accumulated(events_of(websocket))
        assert warm["output"] == []
        # As Codex would send it if nothing had changed since.
        rest = first["input"][len(warm_up["input"]) :]
        websocket.send(json.dumps({**first, "previous_response_id": warm["id"], "input": rest}))
        asked = accumulated(events_of(websocket))
        (call,) = asked["output"]
        assert (call["type"], call["name"]) == ("function_call", "exec_command")
        output = [{**second["input"][0], "call_id": call["call_id"]}]
        websocket.send(json.dumps({**second, "previous_response_id": asked["id"], "input": output}))
        answered = accumulated(events_of(websocket))
    assert answered["output"][0]["content"][0]["text"] == "There it is."


@pytest.mark.parametrize("name", ["codex__ws__3", "codex__ws-tool__3", "codex__builtin__2", "py-openai__ws__2"])
def test_recorded_message(server: Running, name: str) -> None:
    body = recorded(name)["body"]
    handshake = {"codex__ws__3": "codex__ws__1", "codex__builtin__2": "codex__builtin-426__1"}.get(
        name, "py-openai__ws__1"
    )
    with opened(server, handshake_headers(handshake)) as websocket:
        websocket.send(json.dumps(body))
        response = accumulated(events_of(websocket))
    assert response["status"] == "completed"
    assert bool(response["output"]) == (body.get("generate") is not False)

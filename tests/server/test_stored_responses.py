"""Stored responses: streams that are read again, restarts, a storage that fails, and the schema in every state."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response
from sqlalchemy import Connection

from dragoman import create_app
from dragoman.config.sections import Storage
from dragoman.config.settings import Settings
from dragoman.core.errors import StorageUnavailable
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.app import App
from tests.protocols.response_events import read
from tests.support.frontends import front_of
from tests.support.requests import HELLO, eventually, in_process, refused, talking, under_way
from tests.support.sdk import sdk
from tests.support.server_process import Running, Serving, server_fixture

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
TICKS = 40
MODELS = {
    "echo": {"engine": "scripted"},
    "slow": {"engine": "scripted", "tokens_per_second": 40, "replies": [{"output": "tick " * TICKS}]},
    "endless": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 12_000}]},
    "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    "thinking": {"engine": "scripted", "format": "hermes", "replies": [{"output": "<think>Hm.</think>Yes."}]},
}
CONFIG = {"models": MODELS, "default": "echo"}

running = server_fixture(CONFIG)


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running) as made:
        yield made


@pytest.fixture
def plain(running: Running) -> Iterator[httpx.Client]:
    with talking(running) as made:
        yield made


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def events_after(plain: httpx.Client, response_id: str, after: int | None = None) -> list[dict[str, Any]]:
    query = "" if after is None else f"&starting_after={after}"
    reply = plain.get(f"{RESPONSES}/{response_id}?stream=true{query}")
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(block.partition("data: ")[2]) for block in reply.text.split("\n\n") if "data: " in block]


def begin(plain: httpx.Client, model: str, count: int = 6) -> list[dict[str, Any]]:
    """Read the first events of a stream, and close its connection."""
    events = []
    with plain.stream("POST", RESPONSES, json={"model": model, "input": "hello", "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == count:
                    break
    return events


def test_stream_is_read_again_from_any_event(plain: httpx.Client) -> None:
    sent = read(plain.post(RESPONSES, json={"model": "slow", "input": "hello", "stream": True}).content)
    name = sent[-1]["response"]["id"]
    assert events_after(plain, name) == sent
    for after in (0, 5, len(sent) - 2, len(sent) - 1, len(sent) + 1):
        assert events_after(plain, name, after) == sent[after + 1 :]
    assert plain.get(f"{RESPONSES}/{name}").json() == sent[-1]["response"]


def test_stream_is_read_while_it_runs(running: Running) -> None:
    with talking(running) as plain, talking(running) as other:
        with plain.stream("POST", RESPONSES, json={"model": "endless", "input": "hello", "stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            name = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
            # The events are stored a moment later.
            assert eventually(lambda: status_of(running, name) == "in_progress")
            with other.stream("GET", f"{RESPONSES}/{name}?stream=true&starting_after=3") as second:
                again = (line for line in second.iter_lines() if line.startswith("data: "))
                numbers = [json.loads(next(again).removeprefix("data: "))["sequence_number"] for _ in range(30)]
        assert numbers == list(range(4, 34))
    under_way(running, "endless", 0)


def test_stream_whose_client_has_gone_is_cancelled(running: Running) -> None:
    with talking(running) as plain:
        sent = begin(plain, "endless", 12)
    under_way(running, "endless", 0)
    name = sent[0]["response"]["id"]
    with talking(running) as plain:
        assert eventually(lambda: plain.get(f"{RESPONSES}/{name}").json().get("status") == "cancelled")
        found = events_after(plain, name)
        assert found[: len(sent)] == sent
        assert found[-1]["response"] == plain.get(f"{RESPONSES}/{name}").json()
        assert [event["sequence_number"] for event in found] == list(range(len(found)))


def test_reply_without_stream_whose_client_has_gone_is_not_stored(running: Running) -> None:
    with talking(running) as plain, pytest.raises(httpx.ReadTimeout):
        plain.post(RESPONSES, json={"model": "endless", "input": "hello"}, timeout=1)
    under_way(running, "endless", 0)


@pytest.mark.workers(2)
def test_stream_of_a_front_end_that_died_is_failed(running: Running) -> None:
    with talking(running) as plain:
        # The stream has the same connection as this question.
        front = front_of(running, plain)
        assert front is not None
        with plain.stream("POST", RESPONSES, json={"model": "endless", "input": "hello", "stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            name = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
            assert eventually(lambda: status_of(running, name) == "in_progress")
            os.kill(front, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
    assert eventually(lambda: status_of(running, name) == "failed")
    under_way(running, "endless", 0)


def status_of(running: Running, name: str) -> str | None:
    """The status of a response, asked on a new connection. None: there is no answer yet."""
    try:
        with talking(running) as plain:
            status: str | None = plain.get(f"{RESPONSES}/{name}").json().get("status")
            return status
    except httpx.TransportError:
        return None


def test_responses_survive_kill_9(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, CONFIG) as running, talking(running) as plain:
        whole = plain.post(RESPONSES, json={"input": "one"}).json()
        streamed = read(plain.post(RESPONSES, json={"input": "two", "stream": True}).content)
        with plain.stream("POST", RESPONSES, json={"model": "endless", "input": "x", "stream": True}) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            cut = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
            with talking(running) as other:
                assert eventually(lambda: other.get(f"{RESPONSES}/{cut}").status_code == 200)
            running.process.kill()
            running.process.wait()
    with serving(tmp_path, CONFIG) as running, talking(running) as plain:
        assert plain.get(f"{RESPONSES}/{whole['id']}").json() == whole
        last = streamed[-1]["response"]
        assert plain.get(f"{RESPONSES}/{last['id']}").json() == last
        assert events_after(plain, last["id"]) == streamed
        following = plain.post(RESPONSES, json={"input": "on", "previous_response_id": whole["id"]}).json()
        assert len(plain.get(f"{RESPONSES}/{following['id']}/input_items").json()["data"]) == 3
        assert eventually(lambda: plain.get(f"{RESPONSES}/{cut}").json()["status"] == "failed")
        assert events_after(plain, cut)[-1]["type"] == "response.failed"


def test_reasoning_is_included_on_request(client: OpenAI, plain: httpx.Client) -> None:
    made = client.responses.create(model="thinking", input="hello")
    reasoning = made.output[0]
    assert reasoning.type == "reasoning"
    assert "encrypted_content" not in reasoning.model_fields_set
    included = client.responses.retrieve(made.id, include=["reasoning.encrypted_content"]).output[0]
    assert included.type == "reasoning"
    assert included.encrypted_content
    following = client.responses.create(model="echo", input="on", previous_response_id=made.id)
    encrypted: list[Any] = ["reasoning.encrypted_content"]
    items = client.responses.input_items.list(following.id, include=encrypted, order="asc")
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    reply = plain.get(f"{RESPONSES}/{made.id}?include[]=odd&include[]=reasoning.encrypted_content")
    assert reply.headers["x-dragoman-ignored"] == "include[0]"
    strict = plain.get(f"{RESPONSES}/{made.id}?include=odd", headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="include[0]")


REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
"""The fields that OpenResponses requires of every response."""
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def check_shape(body: dict[str, Any]) -> None:
    response = Response.model_validate_json(json.dumps(body), strict=True)
    assert response.status == body["status"]
    assert body.keys() >= REQUIRED
    for name in NUMBERS:
        assert isinstance(body[name], float | int), (name, body[name])
    assert "null" not in [json.dumps(item.get("encrypted_content", "")) for item in body["output"]]
    described = body["text"]["format"]
    assert described.keys() >= {"type", "name", "description", "schema", "strict"}


def test_every_state_has_the_shape(running: Running, plain: httpx.Client) -> None:
    schema = {"type": "json_schema", "name": "any", "schema": {}, "description": "anything"}
    fields = {"input": "hello", "text": {"format": schema}, "metadata": {"a": "b"}}
    found: dict[str, dict[str, Any]] = {}

    def note(body: dict[str, Any]) -> dict[str, Any]:
        found[body["status"]] = body
        return body

    sent = read(plain.post(RESPONSES, json={"model": "thinking", "stream": True, **fields}).content)
    for event in sent:
        if "response" in event:
            note(event["response"])
    assert found["completed"]["text"]["format"]["description"] == "anything"
    note(plain.post(RESPONSES, json={"model": "slow", "max_output_tokens": 2, **fields}).json())
    queued = note(plain.post(RESPONSES, json={"model": "endless", "background": True, **fields}).json())
    path = f"{RESPONSES}/{queued['id']}"
    assert eventually(lambda: plain.get(path).json()["status"] == "in_progress")
    note(plain.get(path).json())
    note(plain.post(f"{path}/cancel").json())
    broken = read(plain.post(RESPONSES, json={"model": "failing", "stream": True, **fields}).content)
    note(broken[-1]["response"])
    under_way(running, "endless", 0)
    for body in found.values():
        check_shape(body)
    assert found.keys() == {"in_progress", "completed", "incomplete", "queued", "cancelled", "failed"}


def limited(app: App) -> Callable[[bool], Any]:
    """How to make the disk full, or to give it room again."""

    async def limit(is_full: bool) -> None:
        def change(connection: Connection) -> None:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages if is_full else 1_000_000}")

        await app.database.write(change)

    return limit


LARGE = "x" * 40_000


async def test_full_disk_refuses_only_what_must_be_stored(tmp_path: Path) -> None:
    """Generation goes on where nothing has to be kept; what must be kept is a 503; then everything works again."""
    settings = Settings(models_dir=(), storage=Storage(address=str(tmp_path / "x.db"), blobs=str(tmp_path / "blobs")))
    app = create_app(ScriptedEngine(), settings=settings)
    limit = limited(app)
    async with in_process(app) as client:
        made = (await client.post(RESPONSES, json={"input": "before"})).json()
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        await limit(True)
        lost = await client.post(RESPONSES, json={"input": LARGE})
        assert lost.status_code == 200
        assert "not stored" in lost.headers["x-dragoman-warning"]
        streamed = read((await client.post(RESPONSES, json={"input": LARGE, "stream": True})).content)
        assert streamed[-1]["type"] == "response.completed"
        for fields in ({"store": True}, {"conversation": conversation}):
            for stream in (False, True):
                reply = await client.post(RESPONSES, json={"input": LARGE, "stream": stream, **fields})
                if stream:
                    last = read(reply.content)[-2:]
                    assert [event["type"] for event in last] == ["error", "response.failed"]
                else:
                    refused(reply, 503, code="storage_unavailable")
                    assert int(reply.headers["retry-after"]) > 0
        refused(
            await client.post(RESPONSES, json={"input": LARGE, "background": True}), 503, code="storage_unavailable"
        )
        assert (await client.post(CHAT, json={"messages": HELLO})).status_code == 200
        assert (await client.get(f"{RESPONSES}/{lost.json()['id']}")).status_code == 404
        assert (await client.get(f"{RESPONSES}/{made['id']}")).json() == made
        await limit(False)
        kept = (await client.post(RESPONSES, json={"input": LARGE, "store": True})).json()
        assert (await client.get(f"{RESPONSES}/{kept['id']}")).json() == kept
    await app.stop()


async def test_storage_that_fails_is_found_out_before_the_model_runs(tmp_path: Path) -> None:
    settings = Settings(models_dir=(), storage=Storage(address=str(tmp_path / "x.db"), blobs=str(tmp_path / "blobs")))
    app = create_app(ScriptedEngine(), settings=settings)
    async with in_process(app) as client:
        assert (await client.post(RESPONSES, json={"input": "hello"})).status_code == 200
        await app.database.write(lambda connection: connection.exec_driver_sql("DROP TABLE servers").close())
        app.database.is_failing = True
        # Otherwise the model would be looked for first.
        body = {"input": "hello", "model": "unknown", "store": True}
        refused(await client.post(RESPONSES, json=body), 503, code="storage_unavailable")
        refused(await client.post(RESPONSES, json=body | {"store": None}), 404, param="model")
        with pytest.raises(StorageUnavailable):
            await app.responses.check("ann")
    await asyncio.wait_for(app.stop(), 30)

"""The Responses API: stored responses, privacy, limits and refusals."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx
import pytest

from dragoman import create_app
from dragoman.config.settings import Limits, Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.protocols.responses import items, server
from tests.protocols.response_events import accumulated, read
from tests.support.requests import eventually, in_process, refused, talking
from tests.support.server_process import Running, server_fixture

RESPONSES = "/v1/responses"
T = TypeVar("T")


running = server_fixture(
    {
        "models": {
            "echo": {"engine": "scripted"},
            "failing": {"engine": "scripted", "fail_after": 1, "replies": [{"output": "one two three"}]},
            "slow-to-start": {"engine": "scripted", "prefill_seconds": 0.5, "fail_after": 0},
            "own": {"engine": "tests.support.engines:NeverStops"},
        },
        "default": "echo",
        "api_keys": ["ann", "bob"],
        "storage": "memory",
        "limits": {"kept_responses": 3, "kept_bytes": 20_000, "keepalive_seconds": 0.1},
    }
)


@pytest.fixture
def ann(running: Running) -> Iterator[httpx.Client]:
    with talking(running, {"authorization": "Bearer ann"}) as made:
        yield made


def create(client: httpx.Client, said: Any = "hello", **fields: Any) -> dict[str, Any]:
    reply = client.post(RESPONSES, json={"input": said, **fields})
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def status(client: httpx.Client, response: dict[str, Any]) -> int:
    return client.get(f"{RESPONSES}/{response['id']}").status_code


def test_unstored_response_is_not_found(ann: httpx.Client) -> None:
    assert status(ann, create(ann, store=False)) == 404
    reply = ann.post(RESPONSES, json={"input": "hello", "stream": True, "store": False})
    assert status(ann, read(reply.content)[-1]["response"]) == 404


def test_failed_stream_is_stored(ann: httpx.Client) -> None:
    frames = read(ann.post(RESPONSES, json={"input": "hello", "model": "failing", "stream": True}).content)
    failed = frames[-1]["response"]
    # It is stored after its end was sent.
    assert eventually(lambda: status(ann, failed) == 200)
    assert ann.get(f"{RESPONSES}/{failed['id']}").json() == failed
    assert read(ann.get(f"{RESPONSES}/{failed['id']}?stream=true").content) == frames
    reply = ann.post(RESPONSES, json={"input": "on", "previous_response_id": failed["id"]})
    assert "is failed" in refused(reply, 400, param="previous_response_id")


def test_oldest_responses_are_evicted(ann: httpx.Client) -> None:
    made = [create(ann) for _ in range(4)]
    assert [status(ann, response) for response in made] == [404, 200, 200, 200]
    assert status(ann, create(ann, "x" * 30_000)) == 404
    assert status(ann, made[-1]) == 200


def test_instructions_are_not_carried_over(ann: httpx.Client) -> None:
    first = create(ann, "one", instructions="a long instruction")
    second = create(ann, "two", previous_response_id=first["id"])
    assert second["instructions"] is None
    assert second["usage"]["input_tokens"] == 3
    counted = ann.post(f"{RESPONSES}/input_tokens", json={"input": "two", "previous_response_id": first["id"]})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 3}


def test_stream_that_starts_with_comments(ann: httpx.Client) -> None:
    reply = ann.post(RESPONSES, json={"input": "hello", "model": "slow-to-start", "stream": True})
    assert reply.status_code == 200
    assert reply.text.startswith(": keep-alive\n\n")
    assert [payload["type"] for payload in read(reply.content)][-2:] == ["error", "response.failed"]


def test_ignored_parameters_are_reported(ann: httpx.Client) -> None:
    said = {"input": "hello", "tools": [{"type": "web_search"}], "top_k": 5, "truncation": "auto"}
    reply = ann.post(RESPONSES, json=said)
    assert reply.headers["x-dragoman-ignored"] == "top_k, tools[0], truncation"
    strict = ann.post(RESPONSES, json=said, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="top_k", code="unsupported_parameter")
    tools = {"input": "hello", "model": "own", "tools": [{"type": "custom", "name": "c"}]}
    refused(ann.post(RESPONSES, json=tools), 501, param="tools")
    refused(ann.post(f"{RESPONSES}/input_tokens", json={"input": "x", "model": "own"}), 501)


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order")]
)
def test_invalid_page_parameters(ann: httpx.Client, query: str, param: str) -> None:
    place = f"{RESPONSES}/{create(ann)['id']}/input_items"
    refused(ann.get(f"{place}?{query}"), 400, param=param)
    refused(ann.get(f"{place}?after=msg_none"), 404, param="after")


def test_unknown_responses_and_paths(ann: httpx.Client) -> None:
    place = f"{RESPONSES}/{create(ann)['id']}"
    refused(ann.get(f"{place}?stream=true"), 400, param="stream")
    refused(ann.get(f"{place}?stream=perhaps"), 400, param="stream")
    for after in ("x", "-1", "9" * 20):
        refused(ann.get(f"{place}?stream=true&starting_after={after}"), 400, param="starting_after")
    refused(ann.get(f"{place}?starting_after=1"), 400, param="starting_after")
    refused(ann.get(f"{place}/elsewhere"), 404)
    refused(ann.post(f"{place}/elsewhere"), 404)
    refused(ann.post(place), 404)
    refused(ann.delete(f"{place}/input_items"), 404)
    refused(ann.put(place), 405)
    refused(ann.post(f"{place}/cancel"), 400)
    reply = ann.get(RESPONSES)
    refused(reply, 405)
    assert reply.headers["allow"] == "POST"


def test_unusual_response_id(ann: httpx.Client) -> None:
    odd = {"role": "user", "content": "x", "id": {"a": 1}}
    refused(ann.post(RESPONSES, json={"input": [odd]}), 400, param="input[0].id")
    made = create(ann)
    assert status(ann, made) == 200


async def test_conversation_is_no_larger_than_a_body() -> None:
    app = create_app(ScriptedEngine(), settings=Settings(models_dir=(), limits=Limits(body_bytes=20_000)))
    async with in_process(app) as client:
        made = (await client.post(RESPONSES, json={"input": "x" * 9_000})).json()
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        assert (await client.post(RESPONSES, json={"input": [reference] * 2})).status_code == 200
        for body in ({"input": [reference] * 3}, {"input": "y" * 5_000, "previous_response_id": made["id"]}):
            refused(await client.post(RESPONSES, json=body), 413, param="input", code="request_too_large")


async def test_large_conversation_is_processed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on a large conversation does not run in the event loop's thread."""
    threads: list[bool] = []

    def noting(work: Callable[..., T]) -> Callable[..., T]:
        def noted(*arguments: Any) -> T:
            threads.append(threading.current_thread() is threading.main_thread())
            return work(*arguments)

        return noted

    monkeypatch.setattr(server, "decode", noting(server.decode))
    monkeypatch.setattr(items, "storable_items", noting(items.storable_items))

    async with in_process(create_app(ScriptedEngine())) as client:
        small = (await client.post(RESPONSES, json={"input": "hello"})).json()
        assert threads == [True, True]
        said = [{"role": "user", "content": "x"}] * 2000
        large = (await client.post(RESPONSES, json={"input": said, "previous_response_id": small["id"]})).json()
        on = await client.post(RESPONSES, json={"input": "on", "previous_response_id": large["id"]})
        assert on.status_code == 200, on.text
        assert threads == [True, True, False, False, False, False]


def test_many_items(ann: httpx.Client) -> None:
    said = [{"role": "user", "content": "x"}] * 10_000
    reply = ann.post(RESPONSES, json={"input": said, "stream": True, "store": False})
    assert accumulated(read(reply.content))["status"] == "completed"

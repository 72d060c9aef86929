"""Background responses through the official SDK: states, streams, cancellation, restarts."""

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import psycopg
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.postgres import Postgres
from tests.support.requests import eventually, recorded, refused, talking, under_way
from tests.support.sdk import sdk
from tests.support.server_process import Running, Serving, server_fixture

RESPONSES = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TICKS = 30
SLOW = {"engine": "scripted", "tokens_per_second": 40, "replies": [{"output": "tick " * TICKS}]}
ENDLESS = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 12_000}]}
MODELS = {
    "echo": {"engine": "scripted"},
    "slow": SLOW,
    "endless": ENDLESS,
    "busy": ENDLESS | {"slots": 1},
    "narrow": {"engine": "scripted", "slots": 1, "prefill_seconds": 0.3},
    "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    "failing-at-once": {"engine": "scripted", "fail_after": 0, "replies": [{"output": "one"}]},
}

running = server_fixture({"models": MODELS, "default": "echo", "limits": {"queue": 1}})


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running) as made:
        yield made


def checked(raw: Any) -> Response:
    """The response, whose body is validated strictly against the SDK's type."""
    return Response.model_validate_json(raw.content, strict=True)


def start(client: OpenAI, model: str = "echo", said: str = "hello", **fields: Any) -> Response:
    raw = client.responses.with_raw_response.create(model=model, input=said, background=True, **fields)
    response = checked(raw)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    return response


def look(client: OpenAI, response_id: str) -> Response:
    return checked(client.responses.with_raw_response.retrieve(response_id))


def wait_for(client: OpenAI, response_id: str, *statuses: str) -> Response:
    assert eventually(lambda: look(client, response_id).status in statuses), look(client, response_id)
    return look(client, response_id)


def events_of(client: OpenAI, response_id: str, after: int = -1) -> list[Any]:
    """All events of a response that come after one, validated strictly, and without a gap."""
    asked: dict[str, Any] = {} if after < 0 else {"starting_after": after}
    with client.responses.with_streaming_response.retrieve(response_id, stream=True, **asked) as response:
        body = response.read().decode()
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    events = [EVENTS.validate_json(block.partition("data: ")[2], strict=True) for block in blocks]
    assert [event.sequence_number for event in events] == list(range(after + 1, after + 1 + len(events)))
    return events


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_background_response_completes(client: OpenAI, running: Running) -> None:
    made = start(client, metadata={"a": "b"})
    done = wait_for(client, made.id, "completed")
    assert (done.output_text, done.metadata, done.created_at) == ("hello", {"a": "b"}, made.created_at)
    assert done.usage is not None
    # It has a line in the log of requests, as any other request.
    (record,) = recorded(running, id=made.id, model="echo")
    assert record["completion_tokens"] == done.usage.output_tokens
    following = client.responses.create(model="echo", input="on", previous_response_id=made.id)
    assert [item.content[0].text for item in client.responses.input_items.list(following.id, order="asc")] == [  # type: ignore[union-attr,index]
        *("hello", "hello", "on")
    ]


def test_stream_of_a_background_response(client: OpenAI) -> None:
    with client.responses.create(model="slow", input="hello", background=True, stream=True) as stream:
        events = list(stream)
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1]
    assert final.type == "response.completed"
    assert text_of(events) == final.response.output_text == "tick " * TICKS
    assert look(client, final.response.id) == final.response
    for after in (-1, 0, 1, 2, len(events) // 2, len(events) - 2, len(events) - 1, len(events) + 5):
        again = events_of(client, final.response.id, after)
        assert [event.to_json() for event in again] == [event.to_json() for event in events[after + 1 :]]


def test_background_response_goes_on_without_its_client(running: Running) -> None:
    with sdk(running) as first:
        stream = first.responses.create(model="slow", input="hello", background=True, stream=True)
        before = [next(stream) for _ in range(6)]
        stream.close()
    created = before[0]
    assert created.type == "response.created"
    with sdk(running) as second:
        after = events_of(second, created.response.id, before[-1].sequence_number)
        assert after[-1].type == "response.completed"
        assert text_of([*before, *after]) == "tick " * TICKS


def test_running_response_can_be_cancelled(client: OpenAI, running: Running) -> None:
    made = start(client, "endless")
    wait_for(client, made.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        client.responses.create(model="echo", input="on", previous_response_id=made.id)
    cancelled = checked(client.responses.with_raw_response.cancel(made.id))
    assert cancelled.status == "cancelled"
    under_way(running, "endless", 0)
    assert look(client, made.id) == cancelled
    assert client.responses.cancel(made.id) == cancelled
    events = events_of(client, made.id)
    assert events[-1].response == cancelled
    assert text_of(events).startswith("tick")


def test_waiting_response_can_be_cancelled(client: OpenAI, running: Running) -> None:
    first, second = start(client, "busy"), start(client, "busy")
    under_way(running, "busy", 1, waiting=1)
    for made in (second, first):
        assert client.responses.cancel(made.id).status == "cancelled"
    under_way(running, "busy", 0)
    assert [event.type for event in events_of(client, second.id)][-1] == "response.incomplete"


def test_response_that_has_ended_is_not_cancelled(client: OpenAI) -> None:
    done = wait_for(client, start(client).id, "completed")
    assert client.responses.cancel(done.id) == done


def test_full_queue_delays_a_response(client: OpenAI) -> None:
    """One runs, one waits in the queue of the model, and the others are tried again."""
    made = [start(client, "narrow") for _ in range(4)]
    for response in made:
        assert wait_for(client, response.id, "completed").output_text == "hello"


@pytest.mark.parametrize("model", ["failing", "failing-at-once"])
def test_failure_of_the_model_fails_the_response(client: OpenAI, model: str) -> None:
    made = start(client, model)
    failed = wait_for(client, made.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert [event.type for event in events_of(client, made.id)][-2:] == ["error", "response.failed"]


def test_what_cannot_run_is_refused_at_once(client: OpenAI, running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.responses.create(model="unknown", input="hello", background=True)
    with pytest.raises(openai.BadRequestError, match="needs store"):
        client.responses.create(model="echo", input="hello", background=True, store=False)
    with talking(running) as plain:
        refused(plain.post(RESPONSES, json={"background": True, "input": 5}), 400, param="input")


def test_deleted_response_stops(client: OpenAI, running: Running) -> None:
    made = start(client, "endless")
    wait_for(client, made.id, "in_progress")
    client.responses.delete(made.id)
    under_way(running, "endless", 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def stop(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    running.process.wait(60)


LASTING = {"models": MODELS, "default": "echo", "limits": {"queue": 8}}


@pytest.mark.parametrize("is_clean", [True, False], ids=["SIGTERM", "kill -9"])
def test_restart_runs_queued_responses_and_fails_running_ones(tmp_path: Path, serving: Serving, is_clean: bool) -> None:
    """Responses that ended are there, one that was in progress is failed, and a queued one runs."""
    with serving(tmp_path, LASTING | {"grace_seconds": 0}) as running, sdk(running) as client:
        done = wait_for(client, start(client).id, "completed")
        shown = start(client, "busy").id
        wait_for(client, shown, "in_progress")
        queued = start(client, "busy").id
        under_way(running, "busy", 1, waiting=1)
        if is_clean:
            stop(running)
    models = MODELS | {"busy": SLOW}
    with serving(tmp_path, LASTING | {"models": models}) as running, sdk(running) as client:
        assert look(client, done.id) == done
        failed = wait_for(client, shown, "failed")
        assert failed.error is not None
        assert "stop" in failed.error.message
        assert wait_for(client, queued, "completed").output_text == "tick " * TICKS
        for name in (shown, queued):
            assert events_of(client, name)[-1].response == look(client, name)


def test_running_response_has_the_grace_time(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, LASTING | {"grace_seconds": 30}) as running, sdk(running) as client:
        made = start(client, "slow").id
        wait_for(client, made, "in_progress")
        stop(running)
    with serving(tmp_path, LASTING) as running, sdk(running) as client:
        assert look(client, made).status == "completed"


@pytest.mark.workers(1)
def test_another_server_takes_over_in_postgres(tmp_path: Path, serving: Serving, postgres: Postgres) -> None:
    address = postgres.new_database()
    config = LASTING | {"storage": {"address": address, "blobs": str(tmp_path / "blobs")}}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "first", config) as running, sdk(running) as client:
        done = wait_for(client, start(client).id, "completed")
        shown = start(client, "busy").id
        wait_for(client, shown, "in_progress")
        queued = start(client, "busy").id
    with psycopg.connect(address, autocommit=True) as connection:
        # As if its heartbeat were old. A test cannot wait that long.
        connection.execute("UPDATE servers SET heartbeat = 0")
    models = MODELS | {"busy": SLOW}
    with serving(tmp_path / "second", config | {"models": models}) as running, sdk(running) as client:
        assert look(client, done.id) == done
        assert wait_for(client, shown, "failed").error is not None
        assert wait_for(client, queued, "completed").output_text == "tick " * TICKS


@pytest.mark.workers(1)
def test_server_cancels_a_response_of_another_server(tmp_path: Path, serving: Serving, postgres: Postgres) -> None:
    config = LASTING | {"storage": {"address": postgres.new_database(), "blobs": str(tmp_path / "blobs")}}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with (
        serving(tmp_path / "first", config) as first,
        serving(tmp_path / "second", config) as second,
        sdk(first) as client,
        sdk(second) as other,
    ):
        made = start(client, "endless")
        wait_for(other, made.id, "in_progress")
        assert other.responses.cancel(made.id).status == "cancelled"
        under_way(first, "endless", 0)
        assert events_of(client, made.id)[-1].response.status == "cancelled"


def test_key_that_was_removed_does_not_run_its_responses(tmp_path: Path, serving: Serving) -> None:
    keyed = LASTING | {"api_keys": ["sk-one", "sk-two"], "grace_seconds": 0}
    with serving(tmp_path, keyed) as running, sdk(running, "sk-two") as client:
        start(client, "busy")
        queued = start(client, "busy").id
        with httpx.Client(base_url=running.url, trust_env=False) as other:
            other.headers["authorization"] = "Bearer sk-one"
            for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
                refused(other.request(method, f"{RESPONSES}/{queued}{path}"), 404)
    with serving(tmp_path, keyed | {"api_keys": ["sk-one"]}):
        assert eventually(lambda: status_in(tmp_path / "dragoman.db", queued) == "failed")


def status_in(database: Path, response_id: str) -> str:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        ((status,),) = connection.execute("SELECT status FROM responses WHERE id = ?", (response_id,))
    return str(status)

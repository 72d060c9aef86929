"""The WebSocket of `/v1/responses`: its handshake, messages, streams and response cache."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.websocket import HANDSHAKE, KEY
from websockets.sync.client import ClientConnection

from dragoman.server.websocket import response_cache, session
from dragoman.storage.response_values import StoredItem
from tests.protocols import response_events
from tests.support.raw_http import raw
from tests.support.requests import PATIENCE, eventually, recorded, refused, under_way
from tests.support.server_process import Running, server_fixture
from tests.support.websocket import (
    LAST_EVENTS,
    RESPONSES,
    create,
    events_of,
    handshake,
    next_event,
    opened,
    refusal,
    respond,
    text_of_response,
)

TICKS = {"engine": "scripted", "tokens_per_second": 50, "replies": [{"output": "tick " * 2000}]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
GET_WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
server = server_fixture(
    {
        "models": {
            "echo": {"engine": "scripted"},
            "history": {"engine": "tests.support.engines:History"},
            "hermes": {"engine": "scripted", "format": "hermes"},
            "weather": {
                "engine": "scripted",
                "format": "hermes",
                "replies": [{"match": "sunny", "output": "It is sunny."}, {"output": f"Let me see.\n{CALL}"}],
            },
            "ticks": TICKS,
            "slow": {"engine": "scripted", "prefill_seconds": 600},
            "lazy": {"engine": "scripted", "crash_after": 1000},
            "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three"}]},
            "failing-at-once": {"engine": "scripted", "fail_after": 0},
        },
        "default": "echo",
        "hosts": ["127.0.0.1", "localhost"],
        "limits": {"body_bytes": 200_000, "body_elements": 20_000},
    }
)


@pytest.fixture
def websocket(server: Running) -> Iterator[ClientConnection]:
    with opened(server) as made:
        yield made


# The handshake.


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (handshake("/v1/chat/completions"), 426, "upgrade_required"),
        (handshake("/v1/models"), 426, "upgrade_required"),
        (handshake(f"{RESPONSES}/resp_1"), 426, "upgrade_required"),
        (handshake("/v1/elsewhere"), 404, "not_found"),
        (handshake(RESPONSES, b"Host: localhost"), 400, "invalid_value"),
        (handshake().replace(b"Host: localhost", b"Host: evil.example"), 400, "invalid_value"),
        (handshake(RESPONSES, b"Origin: http://evil.example"), 403, "insufficient_permissions"),
        (handshake(RESPONSES, b"Origin: null"), 403, "insufficient_permissions"),
        (
            handshake(RESPONSES, b"Origin: http://evil.example", b"Authorization: Basic eDp5"),
            403,
            "insufficient_permissions",
        ),
        (handshake(opening=HANDSHAKE.replace(b": 13", b": 8")), 426, "upgrade_required"),
        (handshake(opening=HANDSHAKE.replace(b"Sec-WebSocket-Version: 13\r\n", b"")), 426, "upgrade_required"),
        (handshake(opening=HANDSHAKE.replace(KEY, b"c2hvcnQ=")), 400, "invalid_value"),
        (handshake(opening=HANDSHAKE.replace(KEY, b"not base64 at all, really")), 400, "invalid_value"),
        (handshake(RESPONSES, b"Sec-WebSocket-Key: " + KEY), 400, "invalid_value"),
        (handshake(opening=HANDSHAKE.partition(b"\r\nSec-WebSocket-Key")[0]), 400, "invalid_value"),
        (handshake(opening=HANDSHAKE.replace(b"Connection: Upgrade", b"Connection: close")), 405, "method_not_allowed"),
        (handshake(opening=HANDSHAKE.replace(b": websocket", b": h2c")), 405, "method_not_allowed"),
        (handshake().replace(b" HTTP/1.1", b" HTTP/1.0"), 405, "method_not_allowed"),
    ],
)
def test_other_handshakes_are_refused_as_http(server: Running, request_bytes: bytes, status: int, code: str) -> None:
    answer = raw(server, request_bytes, 0)
    refused(answer.response, status, code=code)
    if status == 426:
        assert answer.response.headers["upgrade"]
    assert recorded(server, status=status)


def test_connection_stays_usable_after_a_refused_handshake(server: Running) -> None:
    answer = raw(server, handshake("/v1/elsewhere") + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 0.5)
    assert answer.status == 404
    assert answer.body.endswith(b'{"status":"ok"}')


def test_upgrade_of_a_request_with_a_body_is_ignored(server: Running) -> None:
    body = b'{"input": "hello"}'
    lines = (b"Content-Type: application/json", b"Content-Length: %d" % len(body))
    answer = raw(server, handshake(RESPONSES, *lines).replace(b"GET", b"POST") + body, 0)
    assert answer.response.json()["status"] == "completed"


@pytest.mark.parametrize(
    "lines",
    [
        (b"Origin: http://localhost",),
        (b"Origin: http://evil.example", b"Authorization: Bearer any"),
        (b"Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits", b"Sec-WebSocket-Protocol: realtime"),
    ],
)
def test_accepted_handshake(server: Running, lines: tuple[bytes, ...]) -> None:
    answer = raw(server, handshake(RESPONSES, *lines, b"Connection: close")[:-2] + b"\r\n\x88\x80mask", 0)
    head, *headers = answer.head.decode().split("\r\n")
    assert head == "HTTP/1.1 101 Switching Protocols"
    fields = dict(line.split(": ", 1) for line in headers)
    assert fields["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert fields.keys() == {"upgrade", "connection", "sec-websocket-accept", "date", "x-request-id"}
    (record,) = recorded(server, id=fields["x-request-id"])
    assert (record["status"], record["route"], record["scope"]) == (101, f"GET {RESPONSES}", "responses")


def test_handshake_returns_the_id_of_the_client(server: Running) -> None:
    answer = raw(
        server, handshake(RESPONSES, b"X-Request-Id: mine-7", b"Connection: close")[:-2] + b"\r\n\x88\x80mask", 0
    )
    assert answer.status == 101
    fields = dict(line.split(": ", 1) for line in answer.head.decode().split("\r\n")[1:])
    assert fields["x-request-id"] == "mine-7"
    (record,) = recorded(server, id=fields["x-dragoman-request-id"])
    assert record["client_request_id"] == "mine-7"


# Responses.


def normalized(events: list[dict[str, Any]]) -> list[Any]:
    """The events without ids and times, and without what only a WebSocket has."""
    for event in events:
        if event["type"] == "error":
            event.pop("error", None)
    text = re.sub(r"\b([a-z]+_)[0-9a-f]{24}", r"\1", json.dumps(events))
    text = re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text)
    return list(json.loads(text))


FRAGMENTS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "\n\n",
    "é😀",
    "event: x\ndata: y\n\n",
    "\\",
    '"',
)


@settings(max_examples=40)
@given(
    text=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=20)), min_size=1).map("".join),
    model=st.sampled_from(("echo", "hermes", "failing")),
    tools=st.booleans(),
    limit=st.one_of(st.none(), st.integers(1, 4)),
)
def test_events_equal_those_of_http(server: Running, text: str, model: str, tools: bool, limit: int | None) -> None:
    fields: dict[str, Any] = {"model": model, "store": False, "max_output_tokens": limit}
    fields |= {"tools": [GET_WEATHER]} if tools else {}
    body = {"input": text or "x", "stream": True, **fields}
    reply = httpx.post(f"{server.url}{RESPONSES}", json=body, timeout=PATIENCE, trust_env=False)
    with opened(server) as websocket:
        create(websocket, text or "x", **fields)
        events = events_of(websocket)
    assert normalized(events) == normalized(response_events.read(reply.content))


def test_many_turns_on_one_connection(websocket: ClientConnection) -> None:
    for number in range(20):
        create(websocket, f"turn {number}")
        response = response_events.accumulated(events_of(websocket))
        assert text_of_response(response) == f"turn {number}"


def test_request_of_a_websocket_is_recorded_like_a_post(server: Running, websocket: ClientConnection) -> None:
    response = respond(websocket, "one two", model="ticks", max_output_tokens=3)
    (record,) = recorded(server, id=response["id"])
    assert (record["route"], record["scope"], record["status"]) == (f"POST {RESPONSES}", "responses", 200)
    assert (record["model"], record["completion_tokens"], record["finish"]) == ("ticks", 3, "length")


def test_headers_of_the_handshake_apply_to_each_request(server: Running) -> None:
    with opened(server, {"x-dragoman-timeout": "0.5", "x-dragoman-strict": "true"}) as websocket:
        create(websocket, "hello", truncation="auto")
        refusal(websocket, 400, "unsupported_parameter", "truncation")
        create(websocket, model="ticks")
        *_, error, failed = events_of(websocket)
        assert (error["message"], failed["type"]) == ("the request took longer than 0.5 s", "response.failed")
        # The deadline is that of each request.
        assert respond(websocket)["status"] == "completed"


def test_stream_does_not_matter_and_background_is_refused(websocket: ClientConnection) -> None:
    assert respond(websocket, "hello", stream=False)["status"] == "completed"
    create(websocket, "hello", background=True)
    refusal(websocket, 400, "invalid_value", "background")


def test_failing_response_ends_with_its_events_and_the_connection_stays(websocket: ClientConnection) -> None:
    create(websocket, model="failing")
    *_, error, failed = events_of(websocket)
    assert error["type"] == "error"
    assert "status" not in error
    assert error["error"] == {
        "message": error["message"],
        "type": "server_error",
        "param": None,
        "code": "server_error",
    }
    assert failed["response"]["error"]["code"] == "server_error"
    create(websocket, model="failing-at-once")
    refusal(websocket, 500, "inference_error")
    assert respond(websocket)["status"] == "completed"


@pytest.mark.parametrize(
    ("message", "status", "code", "param"),
    [
        ("", 400, "invalid_value", None),
        ("hello", 400, "invalid_value", None),
        ("[]", 400, "invalid_value", None),
        ("{}", 400, "invalid_value", "type"),
        ('{"type": 1}', 400, "invalid_value", "type"),
        ('{"type": "response.delete"}', 400, "invalid_value", "type"),
        ('{"type": "response.create", "input": ', 400, "invalid_value", None),
        ('{"type": "response.create", "input": "a", "input": "b"}', 400, "invalid_value", None),
        ('{"type": "response.create", "model": "echo"}', 400, "invalid_value", "input"),
        ('{"type": "response.create", "input": []}', 400, "invalid_value", "input"),
        ('{"type": "response.create", "input": "a", "generate": "no"}', 400, "invalid_value", "generate"),
        ('{"type": "response.create", "input": "a", "temperature": "hot"}', 400, "invalid_value", "temperature"),
        ('{"type": "response.create", "input": "a", "model": "none"}', 404, "model_not_found", "model"),
        ('{"type": "response.create", "input": "a", "stream_id": ""}', 400, "invalid_stream_id", "stream_id"),
        ('{"type": "response.create", "input": "a", "stream_id": 5}', 400, "invalid_stream_id", "stream_id"),
        ('{"type": "response.cancel", "response_id": 5}', 400, "invalid_value", "response_id"),
        ('{"type": "response.steer", "input": "a"}', 400, "invalid_value", "previous_response_id"),
        ('{"type": "response.create", "input": [' + "[]," * 5000 + "[]]}", 413, "request_too_large", None),
        (b"{}", 400, "invalid_value", None),
    ],
)
def test_unusable_message_gets_an_error_and_the_connection_stays(
    websocket: ClientConnection, message: str | bytes, status: int, code: str, param: str | None
) -> None:
    websocket.send(message)
    refusal(websocket, status, code, param)
    assert text_of_response(respond(websocket)) == "hello"


def test_steering_returns_its_input(websocket: ClientConnection) -> None:
    steer = {"previous_response_id": "resp_1", "input": [{"role": "user", "content": "stop"}]}
    websocket.send(json.dumps({"type": "response.steer", **steer}))
    event = next_event(websocket)
    assert (event["type"], event["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
    assert event["steer"] == steer


# Response cache.


def test_response_of_the_connection_can_be_continued_without_the_store(server: Running) -> None:
    with opened(server) as websocket:
        first = respond(websocket, "my name is Ann", model="history")
        second = respond(websocket, "and yours?", model="history", previous_response_id=first["id"])
        third = respond(websocket, "again", model="history", previous_response_id=second["id"])
        fork = respond(websocket, "a fork", model="history", previous_response_id=first["id"])
    assert text_of_response(second) == "3 messages: my name is Ann"
    assert text_of_response(third) == "5 messages: my name is Ann"
    assert text_of_response(fork) == "3 messages: my name is Ann"
    assert httpx.get(f"{server.url}{RESPONSES}/{first['id']}", trust_env=False).status_code == 404
    with opened(server) as websocket:
        create(websocket, "again", previous_response_id=second["id"])
        refusal(websocket, 400, "previous_response_not_found", "previous_response_id")


def test_stored_response_can_be_continued_on_another_connection(server: Running) -> None:
    with opened(server) as websocket:
        first = respond(websocket, "my name is Ann", model="history", store=True)
    with opened(server) as websocket:
        second = respond(websocket, "and yours?", model="history", store=True, previous_response_id=first["id"])
    items = httpx.get(f"{server.url}{RESPONSES}/{second['id']}/input_items", trust_env=False).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]


def test_tool_call_is_continued_with_its_output(websocket: ClientConnection) -> None:
    first = respond(websocket, "weather in Köln?", model="weather", tools=[GET_WEATHER])
    call = first["output"][-1]
    assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"city": "Köln"})
    output = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}]
    fields = {"model": "weather", "tools": [GET_WEATHER], "previous_response_id": first["id"]}
    assert text_of_response(respond(websocket, output, **fields)) == "It is sunny."


def test_warm_up_loads_the_model_and_is_continued(server: Running, websocket: ClientConnection) -> None:
    create(websocket, [{"role": "developer", "content": "Be brief."}], model="lazy", generate=False, instructions="x")
    created, in_progress, completed = events_of(websocket)
    assert [created["type"], in_progress["type"]] == ["response.created", "response.in_progress"]
    warm = completed["response"]
    assert (warm["status"], warm["output"], warm["usage"]["total_tokens"]) == ("completed", [], 0)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/stats").json()["models"]["lazy"]["state"] == "ready"
    (record,) = recorded(server, id=warm["id"])
    assert (record["status"], record["model"]) == (200, "lazy")
    response = respond(websocket, "hello", model="history", previous_response_id=warm["id"])
    assert text_of_response(response) == "2 messages: Be brief."
    # Codex sends no input at all.
    empty = respond(websocket, [], generate=False)
    assert text_of_response(respond(websocket, "hello", previous_response_id=empty["id"])) == "hello"
    create(websocket, "hello", model="none", generate=False)
    refusal(websocket, 404, "model_not_found", "model")


def test_failed_continuation_forgets_the_response(websocket: ClientConnection) -> None:
    first = respond(websocket, "hello")
    create(websocket, "more", previous_response_id=first["id"], stream_id="fork", temperature=-1)
    refusal(websocket, 400, "invalid_value", "temperature")
    # A fork in another stream leaves it.
    assert respond(websocket, "more", previous_response_id=first["id"])["status"] == "completed"
    create(websocket, "more", previous_response_id=first["id"], model="none")
    refusal(websocket, 404, "model_not_found", "model")
    create(websocket, "more", previous_response_id=first["id"])
    refusal(websocket, 400, "previous_response_not_found", "previous_response_id")


def test_conversation_is_no_larger_than_a_body(websocket: ClientConnection) -> None:
    response = respond(websocket, "a" * 150_000, max_output_tokens=1)
    create(websocket, "b" * 60_000, previous_response_id=response["id"])
    refusal(websocket, 413, "request_too_large", "input")


class TestResponseCache:
    """The caches of the connections of a process, without a server."""

    def remember(self, connection: response_cache.ConnectionResponseCache, response_id: str, size: int = 0) -> None:
        items = (StoredItem("item", bytes(size - response_cache.ITEM_BYTES)),) if size else ()
        response_cache.RequestResponseCache(connection, None).remember("ann", response_id, items)

    def cached(self, connection: response_cache.ConnectionResponseCache, count: int) -> list[str]:
        cache = response_cache.RequestResponseCache(connection, None)
        return [str(at) for at in range(count) if cache.find("ann", str(at)) is not None]

    def test_bounds_of_a_connection(self) -> None:
        connection = response_cache.ConnectionResponseCache(response_cache.ProcessResponseCache())
        for at in range(response_cache.MAX_RESPONSES + 2):
            self.remember(connection, str(at))
        assert self.cached(connection, 100) == [str(at) for at in range(2, response_cache.MAX_RESPONSES + 2)]
        self.remember(connection, "0", response_cache.CONNECTION_BYTES - 1)
        self.remember(connection, "1", 1000)
        assert self.cached(connection, 100) == ["1"]
        # The latest one stays even if it is too large alone.
        self.remember(connection, "2", response_cache.CONNECTION_BYTES + 1)
        assert self.cached(connection, 100) == ["2"]

    def test_bounds_of_a_process(self) -> None:
        process = response_cache.ProcessResponseCache()
        count = response_cache.PROCESS_BYTES // response_cache.CONNECTION_BYTES
        connections = [response_cache.ConnectionResponseCache(process) for _ in range(count + 1)]
        for connection in connections[:count]:
            self.remember(connection, "0", response_cache.CONNECTION_BYTES)
        # It was used before the others.
        assert self.cached(connections[0], 1) == ["0"]
        self.remember(connections[-1], "0", response_cache.CONNECTION_BYTES)
        assert [self.cached(connection, 1) for connection in connections] == [["0"], [], *([["0"]] * (count - 1))]
        assert process.size == count * response_cache.CONNECTION_BYTES
        for connection in connections:
            connection.close()
        assert process.size == 0

    def test_response_belongs_to_its_principal(self) -> None:
        connection = response_cache.ConnectionResponseCache(response_cache.ProcessResponseCache())
        self.remember(connection, "0")
        assert response_cache.RequestResponseCache(connection, None).find("bob", "0") is None
        assert response_cache.RequestResponseCache(connection, "other").find("ann", "0") == ()


# Streams.


def test_requests_of_a_stream_wait_for_each_other(websocket: ClientConnection) -> None:
    for text in ("one", "two", "three"):
        create(websocket, text)
    assert [text_of_response(events_of(websocket)[-1]["response"]) for _ in range(3)] == ["one", "two", "three"]


def test_streams_run_at_the_same_time(websocket: ClientConnection) -> None:
    create(websocket, model="ticks", stream_id="slow-1")
    create(websocket, model="ticks", stream_id="slow.2")
    create(websocket, "hello", stream_id="fast")
    create(websocket, "default")
    seen: dict[str | None, list[dict[str, Any]]] = {}
    while {event["type"] for stream in ("fast", None) for event in seen.get(stream, ())}.isdisjoint(LAST_EVENTS) or (
        len(seen) < 4
    ):
        event = next_event(websocket)
        seen.setdefault(event.pop("stream_id", None), []).append(event)
    assert seen.keys() == {"slow-1", "slow.2", "fast", None}
    for events in seen.values():
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_connection_has_a_limited_number_of_streams(websocket: ClientConnection) -> None:
    for at in range(session.MAX_STREAMS):
        assert respond(websocket, stream_id=f"s{at}")["status"] == "completed"
    create(websocket, stream_id="more")
    assert refusal(websocket, 400, "websocket_stream_limit_reached", "stream_id")["stream_id"] == "more"
    assert respond(websocket, stream_id="s0")["status"] == "completed"
    assert respond(websocket)["status"] == "completed"


def test_only_so_many_requests_of_a_connection_run_and_wait(server: Running, websocket: ClientConnection) -> None:
    for at in range(session.MAX_RUNNING + 2):
        create(websocket, model="ticks", stream_id=f"s{at}")
    under_way(server, "ticks", session.MAX_RUNNING)
    for _ in range(session.MAX_WAITING - 2):
        create(websocket)
    create(websocket, stream_id="s0")
    while (event := next_event(websocket))["type"] != "error":
        assert event["stream_id"] != "s17"
    assert (event["status"], event["error"]["code"], event["stream_id"]) == (503, "overloaded", "s0")
    assert event["headers"] == event["error"]["headers"] == {"retry-after": "1"}
    websocket.close()
    under_way(server, "ticks", 0)


def test_waiting_requests_have_a_total_size(websocket: ClientConnection) -> None:
    create(websocket, model="ticks")
    create(websocket, "a" * 150_000)
    create(websocket, "b" * 60_000)
    while (event := next_event(websocket))["type"] != "error":
        pass
    assert event["error"]["code"] == "overloaded"


# Cancelling.


@pytest.mark.parametrize("by_id", [True, False])
def test_cancelled_response_ends_as_incomplete(server: Running, websocket: ClientConnection, by_id: bool) -> None:
    create(websocket, model="ticks", stream_id="a", store=True)
    created = next_event(websocket)["response"]
    while (event := next_event(websocket))["type"] != "response.output_text.delta":
        pass
    target = {"response_id": created["id"]} if by_id else {"stream_id": "a"}
    websocket.send(json.dumps({"type": "response.cancel", **target}))
    events = [event, *events_of(websocket)]
    assert [event["sequence_number"] for event in events] == list(
        range(event["sequence_number"], event["sequence_number"] + len(events))
    )
    last = events[-1]
    assert (last["type"], last["stream_id"]) == ("response.incomplete", "a")
    assert (last["response"]["id"], last["response"]["status"]) == (created["id"], "cancelled")
    (record,) = recorded(server, id=created["id"])
    assert record["status"] == 499
    assert respond(websocket, stream_id="a")["status"] == "completed"
    url = f"{server.url}{RESPONSES}/{created['id']}"
    assert eventually(lambda: httpx.get(url, trust_env=False).json().get("status") == "cancelled")
    create(websocket, "more", previous_response_id=created["id"])
    refusal(websocket, 400, "invalid_value", "previous_response_id")


def test_cancelled_response_keeps_its_complete_items(websocket: ClientConnection) -> None:
    create(websocket, f"<think>hm</think>{'word ' * 5000}", model="hermes")
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] != "response.output_item.done":
        events.append(next_event(websocket))
    websocket.send(json.dumps({"type": "response.cancel"}))
    last = events_of(websocket)[-1]
    if last["type"] == "response.incomplete":
        assert last["response"]["output"] == [events[-1]["item"]]


def test_response_cancelled_before_it_begins_gets_an_error(server: Running, websocket: ClientConnection) -> None:
    create(websocket, model="slow")
    create(websocket, "next")
    under_way(server, "slow")
    websocket.send(json.dumps({"type": "response.cancel"}))
    refusal(websocket, 400, "response_cancelled")
    assert text_of_response(events_of(websocket)[-1]["response"]) == "next"


def test_cancel_has_no_effect_on_a_response_that_has_ended(websocket: ClientConnection) -> None:
    response = respond(websocket)
    websocket.send(json.dumps({"type": "response.cancel", "response_id": response["id"]}))
    websocket.send(json.dumps({"type": "response.cancel"}))
    assert respond(websocket, previous_response_id=response["id"])["status"] == "completed"


@pytest.mark.parametrize("model", ["ticks", "slow"])
def test_disconnect_cancels_the_requests(server: Running, model: str) -> None:
    left = len(recorded(server, 0, status=499, model=model))
    with opened(server) as websocket:
        create(websocket, model=model)
        create(websocket, model=model, stream_id="other")
        create(websocket, model=model)
        under_way(server, model, 2)
    under_way(server, model, 0)
    assert eventually(lambda: len(recorded(server, 0, status=499, model=model)) == left + 2)

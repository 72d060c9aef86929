"""Reads Responses replies in the variants that real servers send."""

import json
from typing import Any

import pytest

from dragoman.core.errors import BadAnswer, DragomanError, RateLimited, ServerFailed, StreamCutOff
from dragoman.core.events import Usage
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.client.replay import events, parts, read_choice, read_error

USED = {"input_tokens": 9, "output_tokens": 8, "output_tokens_details": {"reasoning_tokens": 3}}


def of(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", **fields}


def completed(*output: dict[str, Any], status: str = "completed", **fields: Any) -> dict[str, Any]:
    return of(status, response={"status": status, "output": output, "usage": USED, "error": None, **fields})


MESSAGE = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "Hello"}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm"}]}
STREAMS: dict[str, tuple[list[dict[str, Any]], tuple[Part, ...]]] = {
    "text": (
        [
            of("created", response={"status": "in_progress", "error": None}),
            of("output_item.added", output_index=0, item={"type": "message", "content": []}),
            of("output_text.delta", output_index=0, delta="Hel"),
            of("output_text.delta", output_index=0, delta="lo"),
            of("output_text.done", output_index=0, text="Hello"),
            of("output_item.done", output_index=0, item=MESSAGE),
            completed(MESSAGE),
        ],
        (Text("Hello"),),
    ),
    "ids instead of indexes": (
        [
            of("output_text.delta", item_id="m", delta="Hello"),
            of("output_item.done", item=MESSAGE),
            of("output_item.added", item=CALL | {"arguments": ""}),
            of("function_call_arguments.delta", item_id="fc_1", delta='{"x": 1}'),
            of("output_item.done", item=CALL),
            completed(MESSAGE, CALL),
        ],
        (Text("Hello"), ToolCall("a", "f", '{"x": 1}')),
    ),
    "always index 0": (
        [
            of("output_text.delta", output_index=0, item_id="m", delta="Hello"),
            of("output_item.done", output_index=0, item=MESSAGE),
            of("output_item.added", output_index=0, item=CALL | {"arguments": ""}),
            of("function_call_arguments.delta", output_index=0, item_id="fc_1", delta='{"x": 1}'),
            of("output_item.done", output_index=0, item=CALL),
            completed(MESSAGE, CALL),
        ],
        (Text("Hello"), ToolCall("a", "f", '{"x": 1}')),
    ),
    "only what is done": ([of("output_item.done", output_index=0, item=MESSAGE), completed(MESSAGE)], (Text("Hello"),)),
    "only the end": (
        [completed(THOUGHT, MESSAGE, CALL)],
        (Reasoning("Hmm"), Text("Hello"), ToolCall("a", "f", '{"x": 1}')),
    ),
    "a call": (
        [
            of("output_item.added", output_index=0, item=CALL | {"arguments": ""}),
            of("function_call_arguments.delta", output_index=0, delta='{"x"'),
            of("function_call_arguments.delta", output_index=0, delta=": 1}"),
            of("function_call_arguments.done", output_index=0, arguments='{"x": 1}'),
            of("output_item.done", output_index=0, item=CALL),
            completed(CALL),
        ],
        (ToolCall("a", "f", '{"x": 1}'),),
    ),
    "a call without arguments": (
        [of("output_item.done", output_index=0, item=CALL | {"arguments": ""}), completed(CALL)],
        (ToolCall("a", "f", "{}"),),
    ),
    "reasoning": (
        [
            of("reasoning_text.delta", output_index=0, delta="Hmm"),
            of("output_item.done", output_index=0, item=THOUGHT),
            completed(THOUGHT),
        ],
        (Reasoning("Hmm"),),
    ),
    "a summary in paragraphs, sealed": (
        [
            of("reasoning_summary_text.delta", output_index=0, summary_index=0, delta="One"),
            of("reasoning_summary_text.delta", output_index=0, summary_index=1, delta="Two"),
            of("reasoning_text.delta", output_index=0, delta="again"),
            of("output_item.done", output_index=0, item=THOUGHT | {"encrypted_content": "x"}),
            completed(THOUGHT),
        ],
        (Reasoning("One\n\nTwo", "x"),),
    ),
    "encrypted reasoning alone": (
        [
            of("output_item.done", output_index=0, item=THOUGHT | {"content": None, "encrypted_content": "x"}),
            completed(),
        ],
        (Reasoning("", "x"),),
    ),
    "unknown items": (
        [
            of("output_item.done", output_index=0, item={"type": "web_search_call"}),
            completed(MESSAGE | {"id": "n"}, MESSAGE),
        ],
        (Text("Hello"),),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    payloads, expected = STREAMS[name]
    assert parts("responses", events(*payloads)) == expected


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "stop"),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
    ],
)
def test_finish_reasons_and_usage(fields: dict[str, Any], reason: str) -> None:
    end = completed(MESSAGE, **fields)
    for data in (events(end), json.dumps(end["response"]).encode()):
        choice = read_choice("responses", data)
        assert (choice.text, choice.reason, choice.usage) == ("Hello", reason, Usage(9, 8, 0, 3))


DELTA = of("output_text.delta", output_index=0, delta="Hel")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (events(DELTA), StreamCutOff),
        (events(DELTA) + b"data: [DONE]\n\n", StreamCutOff),
        (events(DELTA, {"type": "error", "code": "server_error", "message": "boom"}), ServerFailed),
        (
            events(DELTA, completed(status="failed", error={"code": "rate_limit_exceeded", "message": "slow"})),
            RateLimited,
        ),
        (events(DELTA, completed(status="failed")), ServerFailed),
        (events(DELTA, completed(status="cancelled")), BadAnswer),
        (b'{"object": "response", "status": "failed", "output": [], "error": {"message": "boom"}}', ServerFailed),
        (b'{"object": "response"}', BadAnswer),
    ],
)
def test_invalid_reply(data: bytes, kind: type[DragomanError]) -> None:
    assert read_error("responses", data) is kind


@pytest.mark.parametrize("odd", [{"a": 1}, [1], 1.5, True, None])
def test_event_with_values_of_wrong_types_is_ignored(odd: Any) -> None:
    data = events(
        of("created", response=odd),
        of("output_text.delta", item_id="m", delta="Hello"),
        of("output_item.added", output_index=odd, item={"id": odd, "type": odd}),
        {"type": odd},
        completed(MESSAGE),
    )
    assert parts("responses", data) == (Text("Hello"),)

"""Reads Messages replies in the variants that real servers send."""

import json
from typing import Any

import pytest

from dragoman.core.errors import BadAnswer, MalformedToolCall, QueueFull, StreamCutOff
from dragoman.core.events import Usage
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.client.replay import events, parts, read_choice, read_error

USED = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 1}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


BEGIN = {"type": "message_start", "message": {"usage": USED, "content": []}}
STOP = {"type": "message_stop"}


def ended(reason: str = "end_turn", stop: str | None = None) -> dict[str, Any]:
    delta = {"stop_reason": reason, "stop_sequence": stop}
    return {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}


TEXT = block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Hello"})
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
STREAMS: dict[str, tuple[list[dict[str, Any]], tuple[Part, ...]]] = {
    "text": (TEXT, (Text("Hello"),)),
    "text in the beginning of its block": (block(0, {"type": "text", "text": "Hello"}), (Text("Hello"),)),
    "pings": ([{"type": "ping"}, *TEXT[:2], {"type": "ping"}, TEXT[2]], (Text("Hello"),)),
    "reasoning and its signature": (
        [
            *block(
                0,
                {"type": "thinking", "thinking": "", "signature": ""},
                {"type": "thinking_delta", "thinking": "Hm"},
                {"type": "thinking_delta", "thinking": "m"},
                {"type": "signature_delta", "signature": "s1"},
            ),
            *block(1, {"type": "text", "text": "Hello"}),
        ],
        (Reasoning("Hmm", "s1"), Text("Hello")),
    ),
    "redacted reasoning": (block(0, {"type": "redacted_thinking", "data": "xyz"}), (Reasoning("", "xyz"),)),
    "calls": (
        [
            *block(0, USE, {"type": "input_json_delta", "partial_json": '{"x"'}, {"type": "input_json_delta"}),
            *block(1, USE | {"id": "b", "input": {"y": 2}}),
            *block(2, USE | {"id": "c"}, {"type": "input_json_delta", "partial_json": ""}),
        ],
        (ToolCall("a", "f", '{"x"'), ToolCall("b", "f", '{"y":2}'), ToolCall("c", "f", "{}")),
    ),
    "text after a call": (
        [*block(0, USE), *block(1, {"type": "text", "text": "so"})],
        (ToolCall("a", "f", "{}"), Text("so")),
    ),
    "tools of the server": (
        [*block(0, {"type": "server_tool_use", "id": "z", "name": "search", "input": {}}), *TEXT],
        (Text("Hello"),),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    payloads, expected = STREAMS[name]
    reason = "max_tokens" if name == "calls" else "end_turn"
    assert parts("messages", events(BEGIN, *payloads, ended(reason), STOP)) == expected
    assert parts("messages", events(BEGIN, *payloads, ended(reason)).rstrip()) == expected


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("end_turn", None, "stop"),
        ("stop_sequence", "END", "stop"),
        ("max_tokens", None, "length"),
        ("refusal", None, "content_filter"),
        ("model_context_window_exceeded", None, "length"),
        ("pause_turn", None, "stop"),
    ],
)
def test_finish_reasons_and_usage(reason: str, stop: str | None, expected: str) -> None:
    choice = read_choice("messages", events(BEGIN, *TEXT, ended(reason, stop), STOP))
    assert (choice.reason, choice.stop, choice.usage) == (expected, stop, Usage(9, 9, 4, kept=2))


def test_json_body_instead_of_a_stream() -> None:
    content = [
        {"type": "thinking", "thinking": "Hmm", "signature": "s"},
        {"type": "text", "text": "Hello"},
        USE | {"input": {"x": 1}},
    ]
    body = {"type": "message", "content": content, "stop_reason": "tool_use", "usage": USED}
    choice = read_choice("messages", json.dumps(body).encode())
    assert choice.parts == (Reasoning("Hmm", "s"), Text("Hello"), ToolCall("a", "f", '{"x":1}'))
    assert (choice.reason, choice.usage) == ("tool_calls", Usage(9, 1, 4, kept=2))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (events(BEGIN, *TEXT), StreamCutOff),
        (events(BEGIN, *TEXT, STOP), StreamCutOff),
        (
            events(BEGIN, *TEXT, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
            QueueFull,
        ),
        (
            events(BEGIN, *block(0, USE, {"type": "input_json_delta", "partial_json": "{"}), ended(), STOP),
            MalformedToolCall,
        ),
        (b'{"type": "message"}', BadAnswer),
    ],
)
def test_invalid_reply(data: bytes, kind: type[Exception]) -> None:
    assert read_error("messages", data) is kind


@pytest.mark.parametrize("odd", [{"a": 1}, [1], 1.5])
def test_block_whose_index_is_not_a_number_is_read(odd: Any) -> None:
    blocks = block(odd, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Hello"})
    data = events(BEGIN, *blocks, ended(), STOP)
    assert parts("messages", data) == (Text("Hello"),)

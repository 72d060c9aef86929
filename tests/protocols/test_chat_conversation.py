"""Decoding of chat messages that clients send back."""

from typing import Any

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import Message, Part, Reasoning, Text, ToolCall, ToolResult
from tests.protocols.chat_helpers import asked, decode


def decode_message(**fields: Any) -> Message:
    request = decode(messages=[fields])
    assert asked(request) == set()
    return request.messages[0]


DETAILS = [{"type": "reasoning.text", "text": "a"}, {"type": "reasoning.summary", "summary": "b"}]
BLOCKS = [{"type": "thinking", "thinking": "c", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "x"}, "x"),
        ({"reasoning": "x"}, "x"),
        ({"reasoning_content": "x", "reasoning": "x"}, "x"),
        ({"reasoning_details": DETAILS}, "ab"),
        ({"thinking_blocks": BLOCKS}, "c"),
        ({"reasoning_details": DETAILS, "thinking_blocks": BLOCKS}, "ab"),
        ({"reasoning_content": "x", "reasoning_details": DETAILS, "thinking_blocks": BLOCKS}, "x"),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}], "thinking_blocks": BLOCKS}, "c"),
        ({"reasoning_content": None, "reasoning": None, "reasoning_details": None}, None),
        ({"reasoning_content": "", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, None),
    ],
)
def test_reasoning_fields(fields: dict[str, Any], reasoning: str | None) -> None:
    expected: tuple[Part, ...] = () if reasoning is None else (Reasoning(reasoning),)
    assert decode_message(role="assistant", content="hi", **fields).parts == (*expected, Text("hi"))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [('{"x": 1}', '{"x": 1}'), ({"x": 1}, '{"x":1}'), (None, "{}"), ("", "{}"), ("{cut", "{cut")],
)
def test_call_arguments(field: Any, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": field}}
    assert decode_message(role="assistant", content=None, tool_calls=[call]).parts == (ToolCall("c", "f", arguments),)


@pytest.mark.parametrize(
    ("fields", "result"),
    [
        ({"content": "ok"}, ToolResult("c", (Text("ok"),))),
        ({"content": [{"type": "text", "text": "ok"}]}, ToolResult("c", (Text("ok"),))),
        ({"content": None}, ToolResult("c", ())),
        ({}, ToolResult("c", ())),
        ({"content": "no", "is_error": True}, ToolResult("c", (Text("no"),), is_error=True)),
    ],
)
def test_tool_result_without_call(fields: dict[str, Any], result: ToolResult) -> None:
    assert decode_message(role="tool", tool_call_id="c", **fields).parts == (result,)


def test_call_of_another_type() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
    request = decode(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert asked(request) == {("custom_tools", "messages[0].tool_calls[0].type")}
    with pytest.raises(BadRequest) as caught:
        decode(messages=[{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}])
    assert caught.value.param == "messages[0].tool_calls[0].function"

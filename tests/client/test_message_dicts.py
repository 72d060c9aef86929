"""Messages and tools as dicts of other clients."""

from typing import Any

import pytest

from dragoman.client import message_dicts
from dragoman.client.options import build_messages, build_request
from dragoman.core.errors import BadRequest
from dragoman.core.request import Image, Message, Reasoning, Text, Tool, ToolCall, ToolResult

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
MESSAGES: list[tuple[dict[str, Any], Message]] = [
    ({"role": "user", "content": "hello"}, Message("user", (Text("hello"),))),
    ({"role": "user", "content": ""}, Message("user", (Text(""),))),
    ({"role": "user", "content": "hello", "name": "ann"}, Message("user", (Text("hello"),), "ann")),
    ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, Message("user", (Text("a"), Text("b")))),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        Message("user", (Image(url="https://x/y.png"),)),
    ),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
        Message("user", (Image(url="data:image/png;base64,AAAA"),)),
    ),
    (
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "image", "source": {"type": "url", "url": "https://x"}},
            ],
        },
        Message("user", (Image(b"\0\0\0", "image/png"), Image(url="https://x"))),
    ),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        Message("assistant", (ToolCall("a", "f", '{"x": 1}'),)),
    ),
    (
        {"role": "assistant", "content": "Hm", "reasoning_content": "why", "tool_calls": [CALL], "refusal": None},
        Message("assistant", (Reasoning("why"), Text("Hm"), ToolCall("a", "f", '{"x": 1}'))),
    ),
    ({"role": "tool", "tool_call_id": "a", "content": "4"}, Message("tool", (ToolResult("a", (Text("4"),)),))),
    (
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "4"}]},
        Message("tool", (ToolResult("a", (Text("4"),)),)),
    ),
    (
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
        Message("assistant", (ToolCall("a", "f", '{"x":1}'),)),
    ),
    (
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "4", "is_error": True}]},
        Message("user", (ToolResult("a", (Text("4"),), True),)),
    ),
    (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "why", "signature": "s"}]},
        Message("assistant", (Reasoning("why", "s"),)),
    ),
]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = Tool("f", "Does it.", SCHEMA)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": SCHEMA}},
    {"type": "function", "name": "f", "description": "Does it.", "parameters": SCHEMA},
    {"name": "f", "description": "Does it.", "input_schema": SCHEMA},
]


@pytest.mark.parametrize(("value", "expected"), MESSAGES)
def test_messages(value: dict[str, Any], expected: Message) -> None:
    assert build_messages(value) == (expected,)
    assert build_messages([value, expected]) == (expected, expected)


@pytest.mark.parametrize("value", TOOLS)
def test_tools(value: dict[str, Any]) -> None:
    assert message_dicts.tool(value, "tools[0]") == TOOL
    request = build_request("hello", {"tools": [value], "tool_choice": "f"}).request
    assert (request.tools, request.tool_choice.name) == ((TOOL,), "f")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"role": "bob", "content": "x"}, "messages[0]"),
        ({"content": "x"}, "messages[0]"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0]"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "odd"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "?"}}]}, "messages[0]"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0]"),
        ({"role": "tool", "content": "4"}, "messages[0]"),
        ({"role": "tool", "tool_call_id": "a", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0]"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_invalid_messages(value: dict[str, Any], path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        build_messages([value])
    assert (caught.value.param or "").startswith(path)


@pytest.mark.parametrize("value", [{}, {"type": "web_search"}, {"name": "f", "parameters": 5}, {"name": ""}])
def test_invalid_tools(value: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"tools\[0\]"):
        build_request("hello", {"tools": [value]})

"""Decoding of chat requests recorded from real clients."""

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.request import GenerationRequest, JsonObject, JsonSchema, Text, ToolCall, ToolChoice, ToolResult
from dragoman.protocols.registry import PROTOCOLS

RECORDED = Path(__file__).parents[1] / "data" / "clients"


def recorded(name: str) -> GenerationRequest:
    request: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    assert request["path"] == "/v1/chat/completions"
    return PROTOCOLS["chat"].decode(json.dumps(request["body"]).encode())


TOOLS, STRICT, CONSTRAINT = ("tools", "tools"), ("strict_tools", "tools[0].function.strict"), "constraint"
ASKED = {
    "agents__chat-stream-tools__2": [TOOLS, STRICT],
    "aider__message__2": [("temperature", "temperature")],
    "aisdk__compat-tools__2": [TOOLS],
    "instructor__openai-JSON": [(CONSTRAINT, "response_format")],
    "instructor__openai-iterable": [TOOLS, (CONSTRAINT, "tool_choice")],
    "lc__chat-structured-function_calling": [TOOLS, (CONSTRAINT, "tool_choice")],
    "lc__chat-structured-json_schema": [(CONSTRAINT, "response_format")],
    "opencode__ctx__1": [],
    "pydai__chat-output": [TOOLS, STRICT, (CONSTRAINT, "tool_choice")],
}


@pytest.mark.parametrize(("name", "asked"), ASKED.items())
def test_requested_features(name: str, asked: list[tuple[str, str]]) -> None:
    request = recorded(name)
    assert [(entry.feature, entry.param) for entry in request.asked] == [("chat", "messages"), *asked]


def test_calls_and_results() -> None:
    _, call, result = recorded("aisdk__compat-tools__2").messages
    assert call.parts == (ToolCall("call_18e82bbef76cebfe0", "get_weather", '{"city":"x"}'),)
    assert result.parts == (ToolResult("call_18e82bbef76cebfe0", (Text("sunny"),)),)


def test_constraints_and_tool_choices() -> None:
    assert recorded("instructor__openai-JSON").constraint == JsonObject()
    schema = recorded("lc__chat-structured-json_schema").constraint
    assert isinstance(schema, JsonSchema)
    assert (schema.name, schema.strict, schema.schema["required"]) == ("P", True, ["name", "age"])
    assert recorded("pydai__chat-output").tool_choice == ToolChoice("required")
    assert recorded("instructor__openai-iterable").tool_choice == ToolChoice("named", "IterableP")
    assert recorded("lc__chat-structured-function_calling").tool_choice == ToolChoice("named", "P", parallel=False)

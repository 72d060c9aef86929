"""Decoding of Anthropic tools: client tools are offered, server tools are reported."""

from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Tool, ToolChoice
from tests.protocols import wire
from tests.protocols.wire import asked, invalid

decode = partial(wire.decode, "messages")
rejected_param = partial(wire.rejected_param, "messages")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def test_client_tools() -> None:
    extras = {"cache_control": {"type": "ephemeral"}, "defer_loading": True, "eager_input_streaming": True}
    request = decode(
        tools=[
            WEATHER | extras | {"input_examples": [{"city": "Köln"}], "allowed_callers": ["direct"]},
            {"type": "custom", "name": "other", "input_schema": {"type": "object"}, "strict": True},
        ]
    )
    assert request.tools == (
        Tool("weather", "Tells it.", SCHEMA, path="tools[0].input_schema"),
        Tool("other", "", {"type": "object"}, strict=True, path="tools[1].input_schema"),
    )
    assert asked(request) == [("strict_tools", "tools[1].strict"), ("tools", "tools")]


@pytest.mark.parametrize(
    ("kind", "name", "field", "required"),
    [
        ("bash_20250124", "bash", "restart", []),
        ("bash_20241022", "bash", "command", []),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_text", ["command", "path"]),
        ("text_editor_20250124", "str_replace_editor", "new_str", ["command", "path"]),
        ("memory_20250818", "memory", "old_path", ["command"]),
        ("computer_20250124", "computer", "coordinate", ["action"]),
    ],
)
def test_anthropic_defined_tools(kind: str, name: str, field: str, required: list[str]) -> None:
    request = decode(tools=[{"type": kind, "name": name, "display_width_px": 800, "display_height_px": 600}])
    (tool,) = request.tools
    schema = tool.parameters
    assert schema is not None
    assert (tool.name, schema["type"], schema["required"]) == (name, "object", required)
    assert tool.description
    assert field in schema["properties"]
    assert asked(request) == [("tools", "tools")]


def test_old_editor_and_computer_schemas() -> None:
    (editor,) = decode(tools=[{"type": "text_editor_20241022", "name": "e"}]).tools
    assert editor.parameters is not None
    assert "insert_text" not in editor.parameters["properties"]
    assert "undo_edit" in editor.parameters["properties"]["command"]["enum"]
    sized = {"display_width_px": 800, "display_height_px": 600}
    (screen,) = decode(tools=[{"type": "computer_20251124", "name": "c", "enable_zoom": True} | sized]).tools
    assert "800 by 600" in screen.description
    assert screen.parameters is not None
    assert "zoom" in screen.parameters["properties"]["action"]["enum"]
    assert "region" in screen.parameters["properties"]


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825", "tool_search_tool_bm25_20251119"),
        *("computer_toolset_20260801", "browser_toolset_20260801", "advisor_20260301", "unknown_type"),
    ],
)
def test_server_tools_are_reported(kind: str) -> None:
    request = decode(tools=[WEATHER, {"type": kind}])
    assert [tool.name for tool in request.tools] == ["weather"]
    assert asked(request) == [("server_tools", "tools[1].type"), ("tools", "tools")]
    assert asked(decode(tools=[{"type": kind, "name": "x"}])) == [("server_tools", "tools[0].type")]


@pytest.mark.parametrize(
    ("field", "choice", "is_constraint"),
    [
        ({"type": "auto"}, ToolChoice(), False),
        ({"type": "none"}, ToolChoice("none"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "weather"}, ToolChoice("named", "weather"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False), False),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False), True),
    ],
)
def test_tool_choice(field: dict[str, Any], choice: ToolChoice, is_constraint: bool) -> None:
    request = decode(tools=[WEATHER], tool_choice=field)
    assert request.tool_choice == choice
    assert asked(request) == [("tools", "tools"), *([("constraint", "tool_choice")] if is_constraint else [])]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_server_tool_cannot_be_required(choice: dict[str, Any]) -> None:
    request = decode(tools=[SEARCH], tool_choice=choice)
    assert request.tool_choice == ToolChoice()
    assert asked(request) == [("server_tools", "tools[0].type"), ("server_tools", "tool_choice")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        *invalid("tools", "tools[0].name", [{"input_schema": {}}], [{"name": "a b", "input_schema": {}}]),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "web_search_20250305", "name": "s"}] * 1025}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param(**fields) == param


@pytest.mark.parametrize("tools", [[], [WEATHER], [SEARCH], [{"type": "web_search_20250305"}]])
def test_tool_choice_without_name(tools: list[dict[str, Any]]) -> None:
    assert rejected_param(tools=tools, tool_choice={"type": "tool"}) == "tool_choice.name"

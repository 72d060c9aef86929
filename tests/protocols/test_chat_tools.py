"""Decoding of chat tools and tool choices."""

from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Tool, ToolChoice
from tests.protocols import wire
from tests.protocols.wire import features, invalid, rejected_param

decode = partial(wire.decode, "chat")


def tool(name: str, **fields: Any) -> dict[str, Any]:
    """Return a tool, or the choice of one."""
    return {"type": "function", "function": {"name": name, **fields}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


AB = [tool("a"), tool("b")]
CUSTOM = {"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}
TOOLS, CONSTRAINT = ("tools", "tools"), ("constraint", "tool_choice")


@pytest.mark.parametrize("name", ["f", "get_weather", "mcp__a.b:c/d-e", "x" * 128])
def test_tool_names(name: str) -> None:
    assert decode(tools=[tool(name)]).tools == (Tool(name, path="tools[0].function.parameters"),)


def test_tool_fields() -> None:
    parameters = {"type": "object", "properties": {"x": {"maximum": 9007199254740991}}}
    request = decode(tools=[tool("a", description="d", parameters=parameters, strict=True, extra=1), tool("b")])
    assert request.tools == (
        Tool("a", "d", parameters, strict=True, path="tools[0].function.parameters"),
        Tool("b", path="tools[1].function.parameters"),
    )
    assert features(request) == {TOOLS, ("strict_tools", "tools[0].function.strict")}


@pytest.mark.parametrize(
    ("choice", "expected", "asks"),
    [
        ("auto", ToolChoice("auto"), set()),
        ("none", ToolChoice("none"), set()),
        ("required", ToolChoice("required"), {CONSTRAINT}),
        (tool("b"), ToolChoice("named", "b"), {CONSTRAINT}),
        ({"function": {"name": "b"}}, ToolChoice("named", "b"), {CONSTRAINT}),
        (None, ToolChoice("auto"), set()),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, asks: set[tuple[str, str]]) -> None:
    request = decode(tools=AB, tool_choice=choice)
    assert request.tool_choice == expected
    assert features(request) == {TOOLS} | asks
    assert [entry.name for entry in request.tools] == ["a", "b"]
    assert decode(tools=AB, tool_choice=choice, parallel_tool_calls=False).tool_choice.parallel is False


@pytest.mark.parametrize(("mode", "asks"), [("auto", set()), ("required", {CONSTRAINT})])
def test_allowed_tools_filter_the_tools(mode: str, asks: set[tuple[str, str]]) -> None:
    request = decode(tools=AB, tool_choice=allowed(mode, "b"))
    assert [entry.name for entry in request.tools] == ["b"]
    assert request.tool_choice.mode == mode
    assert features(request) == {TOOLS} | asks


def test_other_tool_types_are_reported() -> None:
    request = decode(tools=[tool("a"), CUSTOM, {"type": "web_search"}], tool_choice="required")
    assert [entry.name for entry in request.tools] == ["a"]
    custom = {("custom_tools", "tools[1].type"), ("custom_tools", "tools[2].type")}
    assert features(request) == {TOOLS, CONSTRAINT} | custom
    request = decode(tools=[CUSTOM], tool_choice={"type": "custom", "custom": {"name": "c"}})
    assert features(request) == {TOOLS, ("custom_tools", "tools[0].type"), ("custom_tools", "tool_choice.type")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(
            ({"tools": [tool("a"), tool(name)]}, "tools[1].function.name")
            for name in ("", "b c", "a\n", "x" * 129, "ä")
        ),
        ({"tools": [*AB, tool("a")]}, "tools[2].function.name"),
        ({"tools": [tool("a", parameters=True)]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("a", parameters={"type": ["string", "null"]})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("a"), tool("b", parameters={"type": {}})]}, "tools[1].function.parameters.type"),
        ({"functions": [{"name": "a", "parameters": {"type": "string"}}]}, "functions[0].parameters.type"),
        *invalid("tools", "tools[0].function", [{"type": "function"}], [{"type": "function", "name": "flat"}]),
        ({"tools": [{"function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": tool("a")}, "tool_choice"),
        ({"tool_choice": tool("c"), "tools": AB}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": AB}, "tool_choice.function"),
        ({"tool_choice": "perhaps", "tools": AB}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": AB}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("auto", "a", "c"), "tools": AB}, "tool_choice.allowed_tools.tools[1]"),
        ({"tool_choice": allowed("none", "a"), "tools": AB}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("required"), "tools": AB}, "tool_choice"),
        ({"tool_choice": allowed("auto", *["a"] * 1025), "tools": AB}, "tool_choice.allowed_tools.tools"),
        ({"tools": [tool(f"t{at}") for at in range(1025)]}, "tools"),
        ({"functions": [{"name": f"f{at}"} for at in range(1025)]}, "functions"),
        ({"tools": AB, "functions": [{"name": f"f{at}"} for at in range(1023)]}, "tools"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions[1].name"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call"),
    ],
)
def test_invalid_field_is_tool(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("chat", **fields) == param


@pytest.mark.parametrize("parameters", [{}, {"type": None}, {"type": "object"}, {"type": ["object", "null"]}])
def test_parameters_may_omit_or_extend_the_type(parameters: dict[str, Any]) -> None:
    assert decode(tools=[tool("a", parameters=parameters)]).tools[0].parameters == parameters


def test_maximum_number_of_tools() -> None:
    names = [f"t{at}" for at in range(1024)]
    request = decode(tools=[tool(name) for name in names], tool_choice=allowed("auto", *names[::-1]))
    assert [entry.name for entry in request.tools] == names


def test_legacy_functions() -> None:
    request = decode(functions=[{"name": "a", "parameters": {}}], function_call={"name": "a"})
    assert request.tools == (Tool("a", parameters={}, path="functions[0].parameters"),)
    # `function_call` cannot express two calls.
    assert request.tool_choice == ToolChoice("named", "a", parallel=False)
    assert features(request) == {("tools", "functions"), ("constraint", "function_call")}
    assert decode(functions=[{"name": "a"}], function_call="none").tool_choice.mode == "none"


def test_no_tools() -> None:
    request = decode(tools=[], functions=None, tool_choice="auto", function_call=None, parallel_tool_calls=True)
    assert (request.tools, request.tool_choice, features(request)) == ((), ToolChoice(), set())

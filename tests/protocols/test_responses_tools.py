"""Tools of every type, and tool choices."""

import json
import time
from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Tool, ToolCall, ToolChoice
from dragoman.protocols.responses.calls import SCHEMAS, ClientTool, encode_call
from dragoman.protocols.responses.server import decode, parse
from tests.protocols import wire
from tests.protocols.wire import asked, decode_response, invalid, rejected_param

request = partial(wire.decode, "responses")
HELLO = {"role": "user", "content": "hello"}

SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "name": "f", "description": "F.", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "c", "description": "C."}
SPACE = {"type": "namespace", "name": "n", "description": "N.", "tools": [FUNCTION, CUSTOM]}
SEARCH = {"type": "web_search"}
TOOLS = ("tools", "tools")
MANY = [{"type": "function", "name": f"f{at}"} for at in range(1024)]


def features(**fields: Any) -> list[tuple[str, str]]:
    return asked(request(**fields))


def test_model_sees_every_tool_as_a_function() -> None:
    tools = [FUNCTION, CUSTOM, SPACE, {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
    decoded = decode_response(tools=tools)
    assert decoded.request.tools[:4] == (
        Tool("f", "F.", SCHEMA, path="tools[0].parameters"),
        Tool("c", "C.", SCHEMAS["custom"], path="tools[1].parameters"),
        Tool("n__f", "N.\nF.", SCHEMA, path="tools[2].tools[0].parameters"),
        Tool("n__c", "C.", SCHEMAS["custom"], path="tools[2].tools[1].parameters"),
    )
    assert [tool.name for tool in decoded.request.tools[4:]] == ["local_shell", "shell", "apply_patch"]
    assert decoded.context.client_tools["n__c"] == ClientTool("custom", "c", "n")
    assert features(tools=tools) == [TOOLS]


def test_hosted_tools_are_reported() -> None:
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    tools = [SEARCH, FUNCTION, {"type": "image_generation"}, container, {"type": "tool_search"}]
    assert [tool.name for tool in request(tools=tools).tools] == ["f"]
    paths = [("server_tools", f"tools[{at}]") for at in (0, 2, 3, 4)]
    assert features(tools=tools) == [*paths, TOOLS]
    assert features(tools=[SEARCH]) == [("server_tools", "tools[0]")]


def test_tool_grammar_is_described_and_reported() -> None:
    tool = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
    assert features(tools=[tool]) == [("tool_grammar", "tools[0].format"), TOOLS]
    assert "start: /a/" in request(tools=[tool]).tools[0].description
    assert features(tools=[{**CUSTOM, "format": {"type": "text"}}]) == [TOOLS]


def test_strict_tools() -> None:
    assert request(tools=[{**FUNCTION, "strict": True}]).tools[0].strict
    assert features(tools=[{**FUNCTION, "strict": True}]) == [("strict_tools", "tools[0].strict"), TOOLS]


def test_tools_in_the_input() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [{**FUNCTION, "description": "G."}, CUSTOM]}
    decoded = request(input=[more, HELLO], tools=[FUNCTION])
    assert [(tool.name, tool.description) for tool in decoded.tools] == [("f", "G."), ("c", "C.")]
    assert len(decoded.messages) == 1
    assert features(input=[more, HELLO]) == [("tools", "input")]
    found = {"type": "tool_search_output", "call_id": "s1", "tools": [SPACE]}
    decoded = request(input=[HELLO, {"type": "tool_search_call", "call_id": "s1", "arguments": {"query": "x"}}, found])
    assert [tool.name for tool in decoded.tools] == ["n__f", "n__c"]
    assert decoded.messages[-1].text == "found: n"


def test_colliding_function_names() -> None:
    decoded = decode_response(tools=[{**FUNCTION, "name": "n__f"}, SPACE])
    assert [tool.name for tool in decoded.request.tools] == ["n__f", "n__f_", "n__c"]
    assert decoded.context.client_tools["n__f_"] == ClientTool("function", "f", "n")


@pytest.mark.parametrize("space_first", [False, True])
def test_calls_of_tools_with_colliding_names(space_first: bool) -> None:
    tools = [{**FUNCTION, "name": "n__f"}, {**SPACE, "tools": [FUNCTION]}]
    calls = [{"name": "n__f"}, {"name": "f", "namespace": "n"}]
    order = slice(None, None, -1) if space_first else slice(None)
    call_items = [
        {"type": "function_call", "call_id": f"c{at}", "arguments": "{}", **call} for at, call in enumerate(calls)
    ]
    decoded = decode_response(tools=tools[order], input=[HELLO, *call_items])
    names = [tool.name for tool in decoded.request.tools][order]
    assert sorted(names) == ["n__f", "n__f_"]
    parts = decoded.request.messages[-1].parts
    assert [part.name for part in parts if isinstance(part, ToolCall)] == names
    encoded = [encode_call(decoded.context.client_tools[name], "c", "{}", "1", "completed") for name in names]
    assert [{key: call[key] for key in ("name", "namespace") if key in call} for call in encoded] == calls


def test_default_namespace() -> None:
    decoded = decode_response(tools=[{**SPACE, "name": "functions"}, {**CUSTOM, "name": "f"}])
    assert [tool.name for tool in decoded.request.tools] == ["f", "c", "f_"]
    assert decoded.context.client_tools["f"] == ClientTool("function", "f", "functions")


def decoding_seconds(name: str) -> float:
    calls = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}] * 16_000
    asking = parse(json.dumps({"input": calls, "tools": MANY}).encode())
    begun = time.thread_time()
    [message] = decode(asking).request.messages
    seconds = time.thread_time() - begun
    assert message.parts == (ToolCall("c", name, "{}"),) * 16_000
    return seconds


def test_many_allowed_tools_are_matched_quickly() -> None:
    assert min(decoding_seconds("f1023") for _ in range(3)) < 5 * max(decoding_seconds("f0") for _ in range(3))


def test_function_with_the_name_of_a_builtin_tool() -> None:
    decoded = request(tools=[{"type": "shell"}, {**FUNCTION, "name": "f"}], tool_choice={"type": "shell"})
    assert decoded.tool_choice == ToolChoice("named", "shell")


ALL = ["f", "c", "n__f", "n__c"]
CHOICES: list[tuple[Any, ToolChoice, list[str]]] = [
    (None, ToolChoice(), ALL),
    ("none", ToolChoice("none"), ALL),
    ("required", ToolChoice("required"), ALL),
    ({"type": "function", "name": "f"}, ToolChoice("named", "f"), ALL),
    ({"type": "function", "name": "f", "namespace": "n"}, ToolChoice("named", "n__f"), ALL),
    ({"type": "custom", "name": "c"}, ToolChoice("named", "c"), ALL),
    ({"type": "web_search_preview"}, ToolChoice(), ALL),
    (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "c"}]},
        ToolChoice("required"),
        ["c", "n__c"],
    ),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "n"}, SEARCH]},
        ToolChoice(),
        ["n__f", "n__c"],
    ),
]


@pytest.mark.parametrize(("field", "choice", "names"), CHOICES)
def test_choices(field: Any, choice: ToolChoice, names: list[str]) -> None:
    decoded = request(tools=[FUNCTION, CUSTOM, SPACE], tool_choice=field)
    assert decoded.tool_choice == choice
    assert [tool.name for tool in decoded.tools] == names


def test_features_of_choices() -> None:
    assert features(tools=[FUNCTION], tool_choice="required") == [TOOLS, ("constraint", "tool_choice")]
    assert features(tools=[FUNCTION], tool_choice=SEARCH) == [TOOLS, ("server_tools", "tool_choice")]
    hosted = [("server_tools", "tools[0]"), ("server_tools", "tool_choice")]
    assert features(tools=[SEARCH], tool_choice="required") == hosted
    assert not request(tools=[FUNCTION], parallel_tool_calls=False).tool_choice.parallel


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}]}, "tools[0].type"),
    *invalid("tools", "tools[0].name", [{"type": "function"}], [{**FUNCTION, "name": "a b"}]),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
    ({"tools": [{**SPACE, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [{**FUNCTION, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [{**FUNCTION, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [{**SPACE, "tools": [{**FUNCTION, "parameters": {"type": 5}}]}]}, "tools[0].tools[0].parameters.type"),
    *(({"tools": [{**SPACE, "name": name}]}, "tools[0].name") for name in ("", "a b", "n" * 129)),
    ({"tools": [{"type": {}}]}, "tools[0].type"),
    ({"tools": [SEARCH] * 1025}, "tools"),
    ({"tools": [{**SPACE, "tools": [SEARCH] * 1025}]}, "tools[0].tools"),
    ({"tools": [FUNCTION, {**SPACE, "tools": MANY}]}, "tools"),
    ({"tools": MANY, "input": [{"type": "additional_tools", "tools": [FUNCTION]}, HELLO]}, "input"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [FUNCTION] * 1025}}, "tool_choice.tools"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    *invalid("tool_choice", "tool_choice", "required", "maybe"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [FUNCTION]}}, "tool_choice.tools[0]"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("responses", **fields) == param


CALLS: list[tuple[ClientTool, str, dict[str, Any]]] = [
    (
        ClientTool("function", "f", "n"),
        "{",
        {"type": "function_call", "id": "fc_1", "name": "f", "namespace": "n", "arguments": "{"},
    ),
    (ClientTool("custom", "c"), "x", {"type": "custom_tool_call", "id": "ctc_1", "name": "c", "input": "x"}),
    (
        ClientTool("local_shell", "local_shell"),
        '{"command": "ls -l", "working_directory": "/"}',
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "action": {"type": "exec", "command": ["bash", "-lc", "ls -l"], "env": {}, "working_directory": "/"},
        },
    ),
    (
        ClientTool("shell", "shell"),
        '{"commands": ["ls"]}',
        {"type": "shell_call", "id": "sh_1", "action": {"commands": ["ls"]}, "environment": None},
    ),
    (
        ClientTool("apply_patch", "apply_patch"),
        '{"type": "create_file", "path": "a"}',
        {"type": "apply_patch_call", "id": "apc_1", "operation": {"type": "create_file", "path": "a", "diff": ""}},
    ),
    (
        ClientTool("tool_search", "tool_search"),
        '{"query": "x"}',
        {"type": "tool_search_call", "id": "tsc_1", "arguments": {"query": "x"}, "execution": "client"},
    ),
    # Arguments that do not fit become a function_call.
    (
        ClientTool("shell", "shell"),
        '{"commands": 5}',
        {"type": "function_call", "id": "fc_1", "name": "shell", "arguments": '{"commands": 5}'},
    ),
]


@pytest.mark.parametrize(("called", "arguments", "item"), CALLS)
def test_encoded_calls(called: ClientTool, arguments: str, item: dict[str, Any]) -> None:
    assert encode_call(called, "c1", arguments, "1", "completed") == {"call_id": "c1", "status": "completed", **item}

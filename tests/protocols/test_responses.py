"""Decodes Responses requests."""

import json
from functools import partial
from typing import Any

import pytest

from dragoman.core.errors import BadRequest, DragomanError, NotFound, NotSupported
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    GenerationRequest,
    Image,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from dragoman.protocols.responses.server import decode, parse
from dragoman.protocols.sealed import Seal
from tests.protocols import wire
from tests.protocols.wire import asked, decode_response

HELLO = {"role": "user", "content": "hello"}


request = partial(wire.decode, "responses")


def features(**fields: Any) -> list[tuple[str, str]]:
    return asked(request(**fields))


def messages(*items: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return request(input=list(items), **fields).messages


def message(role: Role, *parts: Part) -> Message:
    return Message(role, parts)


def test_minimal_request() -> None:
    decoded = request()
    assert decoded == GenerationRequest(
        messages=(message("user", Text("hello")),), asked=(Asked(Feature.CHAT, "input"),), delivery=decoded.delivery
    )
    assert not decoded.delivery.stream


def test_text_and_instructions() -> None:
    assert request(input="").messages == (message("user", Text("")),)
    instructed = request(instructions="be brief")
    assert instructed.messages == (message("system", Text("be brief")), message("user", Text("hello")))


def item(kind: str, **fields: Any) -> dict[str, Any]:
    """Return a call or an output."""
    return {"type": kind, "call_id": "c1", **fields}


def assistant(*parts: Part) -> Message:
    return message("assistant", *parts)


def result(*content: Text | Image, call_id: str = "c1", is_error: bool = False) -> Message:
    return message("tool", ToolResult(call_id, content, is_error))


CALL = item("function_call", name="f", arguments='{"a": 1}')
OUTPUT = item("function_call_output", output="done")
CALLED = ToolCall("c1", "f", '{"a": 1}')
DONE = result(Text("done"))
SHELL_RUN = {"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}}
ITEMS: list[tuple[list[dict[str, Any]], list[Message]]] = [
    (
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}], "id": "msg_1"},
            {"role": "system", "content": "b"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "status": "completed"},
        ],
        [message("developer", Text("a")), message("system", Text("b")), assistant(Text("c")), assistant(Text("no"))],
    ),
    # Consecutive items of the assistant are one message, in any order.
    (
        [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            {"role": "assistant", "content": "so"},
            CALL,
            {**CALL, "call_id": "c2", "arguments": {"b": [2]}},
            OUTPUT,
            {**OUTPUT, "call_id": "c2"},
        ],
        [
            assistant(Reasoning("hm"), Text("so"), CALLED, ToolCall("c2", "f", '{"b":[2]}')),
            DONE,
            result(Text("done"), call_id="c2"),
        ],
    ),
    ([CALL, {"role": "assistant", "content": "so"}, OUTPUT], [assistant(Text("so"), CALLED), DONE]),
    (
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}, CALL, OUTPUT],
        [assistant(Reasoning("hm"), CALLED), DONE],
    ),
    ([{"type": "reasoning", "encrypted_content": Seal.REASONING.seal("deep")}], [assistant(Reasoning("deep"))]),
    # Empty reasoning is dropped.
    ([HELLO, {"type": "reasoning", "content": None, "encrypted_content": None}], [message("user", Text("hello"))]),
    (
        [
            {**OUTPUT, "output": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "u"}]},
            {**OUTPUT, "output": {"ok": True}},
            {**OUTPUT, "output": None},
        ],
        [result(Text("x"), Image(url="u")), result(Text('{"ok":true}')), result()],
    ),
    (
        [item("custom_tool_call", name="f", input='a "b"'), item("custom_tool_call_output", output="done")],
        [assistant(ToolCall("c1", "f", '{"input": "a \\"b\\""}')), DONE],
    ),
    (
        [
            item("local_shell_call", action={"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}),
            {"type": "local_shell_call_output", "id": "c1", "output": "done"},
        ],
        [assistant(ToolCall("c1", "local_shell", '{"command":["ls"]}')), DONE],
    ),
    (
        [item("shell_call", action={"commands": ["ls"]}), item("shell_call_output", output=[SHELL_RUN])],
        [assistant(ToolCall("c1", "shell", '{"commands":["ls"]}')), result(Text("a\nb\n(exit code 1)"))],
    ),
    (
        [
            item("apply_patch_call", operation={"type": "delete_file", "path": "a"}),
            item("apply_patch_call_output", status="failed", output="done"),
        ],
        [
            assistant(ToolCall("c1", "apply_patch", '{"type":"delete_file","path":"a"}')),
            result(Text("done"), is_error=True),
        ],
    ),
    (
        [{"type": "mcp_call", "id": "c1", "server_label": "s", "name": "f", "arguments": "{}", "output": "done"}],
        [assistant(ToolCall("c1", "s__f", "{}")), DONE],
    ),
    # A tool in a namespace keeps its function name, even if it is no longer offered.
    ([{**CALL, "namespace": "n"}], [assistant(ToolCall("c1", "n__f", '{"a": 1}'))]),
    ([item("tool_search_output", call_id=None, tools=[])], [result(Text("nothing was found"), call_id="")]),
]


@pytest.mark.parametrize(("items", "decoded"), ITEMS)
def test_items(items: list[dict[str, Any]], decoded: list[Message]) -> None:
    assert list(messages(*items)) == decoded


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "computer_call_output", "call_id": "c", "output": {}},
        {"type": "of_tomorrow"},
        {"type": "item_reference", "id": "rs_gone"},
    ],
)
def test_items_without_content_are_reported(item: dict[str, Any]) -> None:
    assert features(input=[HELLO, item]) == [("items", "input[1]")]


FIELDS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"store": True, "metadata": {}, "user": "u", "prompt_cache_key": "k", "client_metadata": {"a": 1}}, []),
    ({"include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "truncation": "disabled"}, []),
    ({"service_tier": "auto", "background": False, "text": {"verbosity": "medium"}}, []),
    ({"stream_options": {"include_obfuscation": False}, "reasoning": {"context": "auto"}}, []),
    ({"temperature": 0, "top_p": 1, "seed": 1}, [("temperature", "temperature"), ("seed", "seed")]),
    ({"truncation": "auto", "service_tier": "flex"}, [("truncation", "truncation")]),
    ({"service_tier": "priority"}, [("service_tier", "service_tier")]),
    ({"text": {"verbosity": "low"}}, [("verbosity", "text.verbosity")]),
    ({"reasoning": {"summary": "auto"}}, [("unknown", "reasoning.summary")]),
    ({"reasoning": {"effort": "low"}}, [("thinking", "reasoning.effort")]),
    ({"context_management": [{"type": "compaction"}]}, [("count_tokens", "context_management[0]")]),
    ({"stream_options": {"include_obfuscation": True}}, [("unknown", "stream_options.include_obfuscation")]),
    ({"include": ["message.output_text.logprobs"]}, [("logprobs", "include")]),
    ({"top_logprobs": 2}, [("logprobs", "top_logprobs")]),
    ({"include": ["web_search_call.action.sources", "reasoning.encrypted_content"]}, []),
    ({"include": ["reasoning.encrypted_content", "zz"]}, [("unknown", "include[1]")]),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}, {"type": "input_file"}]}]},
        [("images", "input[0].content[0]"), ("files", "input[0].content[1]")],
    ),
]


@pytest.mark.parametrize(("fields", "others"), FIELDS)
def test_requested_features(fields: dict[str, Any], others: list[tuple[str, str]]) -> None:
    assert features(**fields) == others


def test_options() -> None:
    decoded = request(max_output_tokens=5, top_logprobs=2, reasoning={"effort": "max"}, stream=True, seed=7, stop="x")
    assert (decoded.max_tokens, decoded.logprobs, decoded.stop) == (5, Logprobs(2), ("x",))
    assert decoded.thinking == Thinking(effort="high")
    assert decoded.delivery.stream
    assert request(reasoning={"effort": "none"}).thinking.is_off


def test_configuration_update_item() -> None:
    empty = {"type": "configuration_update"}
    update = {**empty, "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}}
    decoded = request(input=[HELLO, update], reasoning={"effort": "high"})
    assert (decoded.thinking, decoded.constraint) == (Thinking(effort="low"), JsonObject())
    assert decoded.messages == (message("user", Text("hello")),)
    assert request(input=[HELLO, empty], reasoning={"effort": "high"}).thinking.effort == "high"


def test_text_format() -> None:
    schema = {"type": "object"}
    text_format = {"type": "json_schema", "name": "p", "schema": schema, "strict": True}
    expected = JsonSchema(schema, "p", strict=True, path="text.format.schema")
    assert request(text={"format": text_format}).constraint == expected
    assert request(text={"format": {"type": "json_object"}}).constraint == JsonObject()
    assert request(text={"format": {"type": "text"}}).constraint is None
    assert features(text={"format": text_format}) == [("constraint", "text.format")]


WRONG: list[tuple[dict[str, Any], type[DragomanError], str]] = [
    ({"input": []}, BadRequest, "input"),
    ({"input": None}, BadRequest, "input"),
    ({"input": 5}, BadRequest, "input"),
    ({"input": [{}]}, BadRequest, "input[0].type"),
    ({"input": [HELLO, {"role": "bob", "content": ""}]}, BadRequest, "input[1].role"),
    ({"input": [{"type": "zz"}]}, BadRequest, "input[0].type"),
    ({"input": [{"type": "configuration_update"}, {"type": "zz"}]}, BadRequest, "input[1].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "?"}]}, BadRequest, "input[0].encrypted_content"),
    ({"input": [{"role": "user"}]}, BadRequest, "input[0].content"),
    ({"input": [HELLO, {"type": "message", "role": "system", "content": None}]}, BadRequest, "input[1].content"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, BadRequest, "input[0].call_id"),
    ({"input": [{**OUTPUT, "call_id": ""}]}, BadRequest, "input[0].call_id"),
    ({"input": [{**OUTPUT, "call_id": None, "id": "fco_1"}]}, BadRequest, "input[0].call_id"),
    ({"input": [{"type": "local_shell_call_output", "output": "x"}]}, BadRequest, "input[0].call_id"),
    ({"metadata": {"a": 5}}, BadRequest, "metadata.a"),
    ({"metadata": {"a": "x", "b": {"c": [1]}}}, BadRequest, "metadata.b"),
    ({"metadata": {f"k{at}": "x" for at in range(17)}}, BadRequest, "metadata"),
    ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, BadRequest, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, BadRequest, "input[0].content[0].text"),
    ({"input": [{**OUTPUT, "output": [{"type": "input_text"}]}]}, BadRequest, "input[0].output[0].text"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, BadRequest, "input[0].name"),
    ({"input": [{"type": "item_reference", "id": "msg_gone"}]}, NotFound, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": 5}]}, BadRequest, "input[0].id"),
    ({"input": [HELLO, {**HELLO, "id": {"a": 1}}]}, BadRequest, "input[1].id"),
    ({"input": [{**HELLO, "id": "x" * 1025}]}, BadRequest, "input[0].id"),
    ({"input": [{"type": "web_search_call", "id": 0}]}, BadRequest, "input[0].id"),
    ({"input": [HELLO] * 16_385}, BadRequest, "input"),
    ({"instructions": 5}, BadRequest, "instructions"),
    ({"max_output_tokens": 0}, BadRequest, "max_output_tokens"),
    ({"top_logprobs": 21}, BadRequest, "top_logprobs"),
    ({"reasoning": {"effort": "huge"}}, BadRequest, "reasoning.effort"),
    ({"text": {"format": {"type": "json_schema", "name": "p"}}}, BadRequest, "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, BadRequest, "text.format.type"),
    ({"n": 2}, BadRequest, "n"),
    ({"background": True, "store": False}, BadRequest, "background"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, BadRequest, "conversation"),
    ({"conversation": {"name": "x"}}, BadRequest, "conversation.id"),
    ({"prompt": {"id": "pmpt_1"}}, NotSupported, "prompt"),
]


@pytest.mark.parametrize(("fields", "error", "param"), WRONG)
def test_error_names_the_field(fields: dict[str, Any], error: type[DragomanError], param: str) -> None:
    with pytest.raises(error) as caught:
        decode_response(**fields)
    assert type(caught.value) is error
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}: ")


def test_metadata() -> None:
    pairs = {f"k{at}": "x" for at in range(16)}
    assert decode_response(metadata=pairs).context.echoed["metadata"] == pairs


def test_item_limit_includes_stored_items() -> None:
    with pytest.raises(BadRequest) as caught:
        decode(parse(json.dumps({"input": [HELLO]}).encode()), [HELLO] * 16_384)
    assert caught.value.param == "input"


def test_item_references() -> None:
    asking = parse(json.dumps({"input": [{"type": "item_reference", "id": "fc_1"}, {"id": "msg_1"}, OUTPUT]}).encode())
    assert asking.references == ["fc_1", "msg_1"]
    earlier = {"type": "message", "role": "user", "content": "earlier"}
    decoded = decode(asking, [earlier], {"fc_1": CALL, "msg_1": HELLO})
    first, second = message("user", Text("earlier")), message("user", Text("hello"))
    assert decoded.request.messages == (first, assistant(CALLED), second, DONE)
    assert [item["type"] for item in decoded.context.items if "type" in item] == [
        *("message", "function_call", "function_call_output")
    ]


@pytest.mark.parametrize(
    ("earlier", "sent", "is_refused"),
    [
        ([HELLO, CALL], [OUTPUT], False),
        ([HELLO], [CALL, OUTPUT], False),
        ([HELLO], [OUTPUT], True),
        ([HELLO, OUTPUT], [OUTPUT], True),
        ([HELLO], [HELLO, OUTPUT | {"type": "custom_tool_call_output"}], True),
        ([], [HELLO, OUTPUT], False),
    ],
)
def test_output_without_a_call_in_a_continued_conversation(
    earlier: list[dict[str, Any]], sent: list[dict[str, Any]], is_refused: bool
) -> None:
    parsed = parse(json.dumps({"input": sent, "previous_response_id": "resp_1"}).encode())
    if not is_refused:
        assert decode(parsed, earlier).request.messages
        return
    with pytest.raises(BadRequest, match="the conversation has no call 'c1'") as caught:
        decode(parsed, earlier)
    assert caught.value.param == f"input[{len(sent) - 1}].call_id"

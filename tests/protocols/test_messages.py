"""Decoding of Anthropic requests."""

import json
import re
from functools import partial
from typing import Any

import pytest

from dragoman.core.errors import BadRequest, ThreadUnsupported
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    Delivery,
    GenerationRequest,
    JsonSchema,
    Message,
    Reasoning,
    Sampling,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from dragoman.protocols.messages import server as messages
from dragoman.protocols.messages.blocks import SIGNATURE
from tests.protocols import wire
from tests.protocols.wire import HI, asked, invalid

decode = partial(wire.decode, "messages")
rejected_param = partial(wire.rejected_param, "messages")


def test_minimal_request() -> None:
    assert decode() == GenerationRequest(
        model="m",
        messages=(Message("user", (Text("hi"),)),),
        max_tokens=10,
        delivery=Delivery(usage=True),
        asked=(Asked(Feature.CHAT, "messages"),),
    )


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def turn(role: str, *content: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_conversation() -> None:
    request = decode(
        system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")],
        messages=[
            turn("user", text("Weather?", cache_control=None)),
            turn(
                "assistant",
                {"type": "thinking", "thinking": "Ask.", "signature": SIGNATURE.sign("Ask.")},
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                text("Let me see."),
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ),
            turn("user", text("There."), result("toolu_1", "sunny"), result("toolu_2", [text("no")], is_error=True)),
            {"role": "system", "content": "Now in French."},
            {"role": "user", "content": "So?"},
        ],
    )
    calls = (ToolCall("toolu_1", "weather", '{"city":"Köln"}'), ToolCall("toolu_2", "time", "{}"))
    reasoning = (Reasoning("Ask.", SIGNATURE.sign("Ask.")), Reasoning("", "c2VjcmV0"))
    assert request.messages == (
        Message("system", (Text("Be brief.\n\nBe kind."),)),
        Message("user", (Text("Weather?"),)),
        Message("assistant", (*reasoning, Text("Let me see."), *calls)),
        Message("tool", (ToolResult("toolu_1", (Text("sunny"),)),)),
        Message("tool", (ToolResult("toolu_2", (Text("no"),), is_error=True),)),
        Message("user", (Text("There."),)),
        Message("system", (Text("Now in French."),)),
        Message("user", (Text("So?"),)),
    )
    assert asked(request) == []


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.3d9; cc_entrypoint=sdk-cli; cch=00000;"


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ([BILLING, "You are kind."], "You are kind."),
        ([BILLING], None),
        ([f"{BILLING}\nYou are kind."], "You are kind."),
        (["You are kind.", BILLING], f"You are kind.\n\n{BILLING}"),
        (["", "You are kind."], "You are kind."),
        ([], None),
    ],
)
def test_billing_header_is_removed(system: list[str], text: str | None) -> None:
    expected = () if text is None else (Message("system", (Text(text),)),)
    assert decode(system=[{"type": "text", "text": part} for part in system]).messages[:-1] == expected
    if len(system) == 1:
        assert decode(system=system[0]).messages[:-1] == expected


def test_sampling_and_stops() -> None:
    values: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7}
    request = decode(**values, stop_sequences=["x", "yz"], stream=True)
    assert request.sampling == Sampling(**values)
    assert request.stop == ("x", "yz")
    assert request.delivery == Delivery(stream=True, usage=True)
    assert asked(request) == [*((name, name) for name in values), ("stop", "stop_sequences")]
    assert asked(decode(top_p=1, temperature=None, stop_sequences=[])) == []


EFFORT = "output_config.effort"


def effort(value: str) -> dict[str, Any]:
    return {"output_config": {"effort": value}}


@pytest.mark.parametrize(
    ("fields", "thinking", "params"),
    [
        ({}, Thinking(), []),
        ({"thinking": {"type": "adaptive"}}, Thinking(), []),
        ({"thinking": {"type": "disabled"}}, Thinking(enabled=False), ["thinking.type"]),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            Thinking(enabled=True, budget_tokens=9),
            ["thinking.budget_tokens", "thinking.type"],
        ),
        (effort("low"), Thinking(effort="low"), [EFFORT]),
        (effort("max"), Thinking(effort="high"), [EFFORT]),
        ({"thinking": {"type": "adaptive"}, **effort("xhigh")}, Thinking(effort="high"), [EFFORT]),
        ({"thinking": {"type": "disabled"}, **effort("high")}, Thinking(enabled=False), [EFFORT, "thinking.type"]),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: Thinking, params: list[str]) -> None:
    request = decode(**fields)
    assert request.thinking == thinking
    assert sorted(asked(request)) == [("thinking", param) for param in params]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


def test_output_format() -> None:
    for path in ("output_config.format", "output_format"):
        request = decode(output_format=FORMAT) if path == "output_format" else decode(output_config={"format": FORMAT})
        assert request.constraint == JsonSchema(SCHEMA, path=f"{path}.schema")
        assert asked(request) == [("constraint", path)]
    assert rejected_param(output_config={"format": FORMAT}, output_format=FORMAT) == "output_format"


EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"cache_control": EPHEMERAL}, 300),
        ({"cache_control": HOUR}, 3600),
        ({"cache_control": None}, 0),
        ({"system": [text("x", cache_control=EPHEMERAL)]}, 300),
        ({"tools": [{"name": "t", "input_schema": {"type": "object"}, "cache_control": HOUR}]}, 3600),
        ({"messages": [turn("user", text("x", cache_control=HOUR))]}, 3600),
        ({"cache_control": HOUR, "system": [text("x", cache_control=EPHEMERAL)]}, 3600),
    ],
)
def test_cache_control_seconds(fields: dict[str, Any], seconds: float) -> None:
    request = decode(**fields)
    assert request.keep_seconds == seconds
    assert not [entry for entry in request.asked if "cache" in entry.param]


@pytest.mark.parametrize(
    ("control", "where"),
    [
        ({"type": "ephemeral", "ttl": "2h"}, ".ttl"),
        ({"type": "ephemeral", "ttl": ["1h"]}, ".ttl"),
        ({"type": "persistent"}, ".type"),
        ({}, ".type"),
        ("ephemeral", ""),
        ([], ""),
    ],
)
def test_malformed_cache_control_is_rejected(control: Any, where: str) -> None:
    block, valid = text("x", cache_control=control), text("x", cache_control=EPHEMERAL)
    assert rejected_param(cache_control=control) == f"cache_control{where}"
    assert rejected_param(system=[valid, block]) == f"system[1].cache_control{where}"
    tool = {"name": "t", "input_schema": {"type": "object"}, "cache_control": control}
    assert rejected_param(tools=[tool]) == f"tools[0].cache_control{where}"
    assert rejected_param(messages=[turn("user", valid, block)]) == f"messages[0].content[1].cache_control{where}"
    answered = turn("user", result("t", [valid, block]))
    assert rejected_param(messages=[answered]) == f"messages[0].content[0].content[1].cache_control{where}"


def test_fields_without_effect() -> None:
    nothing: dict[str, Any] = {"container": None, "thread": None, "mcp_servers": [], "output_config": {}}
    usual = {"service_tier": "auto", "speed": "standard", "metadata": {"user_id": "u"}, "cache_control": EPHEMERAL}
    keep_thinking = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert asked(decode(**nothing, **usual, betas=["a"], context_management=keep_thinking)) == []


def test_unsupported_fields_are_reported() -> None:
    fields: dict[str, Any] = {
        "container": "c",
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
        "inference_geo": "eu",
        "speed": "fast",
        "service_tier": "priority",
        "unknown_field": 1,
    }
    assert asked(decode(**fields)) == [("unknown", name) for name in fields]
    assert asked(decode(output_config={"task_budget": {}})) == [("unknown", "output_config.task_budget")]
    hidden = decode(thinking={"type": "adaptive", "display": "omitted"})
    assert asked(hidden) == [("thinking_display", "thinking.display")]
    assert asked(decode(thinking={"type": "between_tools"})) == [("between_tools", "thinking.type")]


def test_trailing_assistant_message_is_a_prefill() -> None:
    request = decode(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert request.messages[-1] == Message("assistant", (Text("The answer is ("),))
    assert asked(request) == [("prefill", "messages[1]")]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_unsupported(thread: dict[str, Any]) -> None:
    with pytest.raises(ThreadUnsupported):
        decode(thread=thread)


def test_count_needs_no_max_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [HI]}).encode()
    assert messages.decode_count(body).messages == decode().messages
    with pytest.raises(BadRequest) as raised:
        messages.decode(body)
    assert raised.value.param == "max_tokens"


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *invalid("messages", "messages", [], None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [HI, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (block(type="unknown_type"), "messages[0].content[0].type"),
        (block(text="x"), "messages[0].content[0].type"),
        (block(type=7), "messages[0].content[0].type"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(type="text", text=1), "messages[0].content[0].text"),
        (block(type="thinking", thinking="x"), "messages[0].content[0].type"),
        (block(**USE), "messages[0].content[0].type"),
        (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
        ({"messages": [turn("user", result("t", [result("t", "")]))]}, "messages[0].content[0].content[0].type"),
        (block(type="image", source={"type": "base64", "data": "#"}), "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "base64"}), "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "url"}), "messages[0].content[0].source.url"),
        (block(type="image", source={"type": "ftp"}), "messages[0].content[0].source.type"),
        (block(type="document", source={"type": "text"}), "messages[0].content[0].source.data"),
        ({"messages": [turn("assistant", result("t", ""))]}, "messages[0].content[0].type"),
        ({"messages": [turn("assistant", USE | {"input": []})]}, "messages[0].content[0].input"),
        ({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}, "system[0].type"),
        ({"system": 7}, "system"),
        *invalid("max_tokens", "max_tokens", -1, 1.5, True, 10**10),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": "5"}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0]"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "xml", "schema": {}}}, "output_format.type"),
        ({"stream": 1}, "stream"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param(**fields) == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (block(), "messages[0].content[0].type: required, but missing"),
        (block(type=7), "messages[0].content[0].type: unknown block type 7; expected advisor_tool_result, "),
        ({"system": [{"type": "image"}]}, "system[0].type: image blocks are not allowed here"),
    ],
)
def test_block_type_messages(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=f"^{re.escape(message)}"):
        decode(**fields)

"""Decoding of Anthropic requests."""

import json
import re
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import BadRequest, ThreadUnsupported
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
from dragoman.protocols import messages
from dragoman.protocols.messages.blocks import sign
from dragoman.protocols.registry import PROTOCOLS
from tests.protocols.anthropic_requests import HI, asked, decode, rejected_param


def test_minimal_request() -> None:
    assert decode() == GenerationRequest(
        model="m",
        messages=(Message("user", (Text("hi"),)),),
        max_tokens=10,
        delivery=Delivery(usage=True),
        asked=(Asked("chat", "messages"),),
    )


def test_conversation() -> None:
    request = decode(
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": None}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Ask.", "signature": sign("Ask.")},
                    {"type": "redacted_thinking", "data": "c2VjcmV0"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "There."},
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                ],
            },
            {"role": "system", "content": "Now in French."},
            {"role": "user", "content": "So?"},
        ],
    )
    assert request.messages == (
        Message("system", (Text("Be brief.\n\nBe kind."),)),
        Message("user", (Text("Weather?"),)),
        Message(
            "assistant",
            (
                Reasoning("Ask.", sign("Ask.")),
                Reasoning("", "c2VjcmV0"),
                Text("Let me see."),
                ToolCall("toolu_1", "weather", '{"city":"Köln"}'),
                ToolCall("toolu_2", "time", "{}"),
            ),
        ),
        Message("tool", (ToolResult("toolu_1", (Text("sunny"),)),)),
        Message("tool", (ToolResult("toolu_2", (Text("no"),), is_error=True),)),
        Message("user", (Text("There."),)),
        Message("system", (Text("Now in French."),)),
        Message("user", (Text("So?"),)),
    )
    assert asked(request) == []


def test_same_values_as_chat() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    chat = PROTOCOLS["chat"].decode(
        json.dumps(
            {
                "model": "m",
                "max_tokens": 10,
                "seed": 7,
                "stop": ["x"],
                "reasoning_effort": "low",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    HI,
                    {"role": "assistant", "content": "Well.", "reasoning_content": "Ask.", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": "sunny"},
                    HI,
                ],
                "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
                "tool_choice": "required",
            }
        ).encode()
    )
    used = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Köln"}}
    thought = {"type": "thinking", "thinking": "Ask.", "signature": ""}
    messages = decode(
        seed=7,
        stop_sequences=["x"],
        output_config={"effort": "low"},
        system="Be brief.",
        messages=[
            HI,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Well."}, used]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "sunny"},
                    {"type": "text", "text": "hi"},
                ],
            },
        ],
        tools=[{"name": "weather", "input_schema": schema}],
        tool_choice={"type": "any"},
    )
    for name in GenerationRequest.__struct_fields__:
        if name not in ("asked", "delivery", "tools"):
            assert getattr(messages, name) == getattr(chat, name), name
    (tool,), (same,) = messages.tools, chat.tools
    assert tool.path == "tools[0].input_schema"
    assert msgspec.structs.replace(tool, path=same.path) == same


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
    request = decode(temperature=0.5, top_p=0.9, top_k=5, seed=7, stop_sequences=["x", "yz"], stream=True)
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=5, seed=7)
    assert request.stop == ("x", "yz")
    assert request.delivery == Delivery(stream=True, usage=True)
    assert asked(request) == [(name, name) for name in ("temperature", "top_p", "top_k", "seed")] + [
        ("stop", "stop_sequences")
    ]
    assert asked(decode(top_p=1, temperature=None, stop_sequences=[])) == []


@pytest.mark.parametrize(
    ("fields", "thinking", "params"),
    [
        ({}, Thinking(), []),
        ({"thinking": {"type": "adaptive"}}, Thinking(), []),
        ({"thinking": {"type": "disabled"}}, Thinking(enabled=False), ["thinking.type"]),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            Thinking(enabled=True, budget_tokens=1024),
            ["thinking.budget_tokens", "thinking.type"],
        ),
        ({"output_config": {"effort": "low"}}, Thinking(effort="low"), ["output_config.effort"]),
        ({"output_config": {"effort": "max"}}, Thinking(effort="high"), ["output_config.effort"]),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
            Thinking(effort="high"),
            ["output_config.effort"],
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            Thinking(enabled=False),
            ["output_config.effort", "thinking.type"],
        ),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: Thinking, params: list[str]) -> None:
    request = decode(**fields)
    assert request.thinking == thinking
    assert asked(request) == [("thinking", param) for param in params]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


def test_output_format() -> None:
    cases: dict[str, dict[str, Any]] = {
        "output_config.format": {"output_config": {"format": FORMAT}},
        "output_format": {"output_format": FORMAT},
    }
    for path, fields in cases.items():
        request = decode(**fields)
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
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"cache_control": HOUR}, 3600),
        ({"cache_control": None}, 0),
        ({"cache_control": {"type": "ephemeral", "ttl": None}}, 300),
        ({"system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}]}, 300),
        ({"tools": [{"name": "t", "input_schema": {"type": "object"}, "cache_control": HOUR}]}, 3600),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": HOUR}]}]}, 3600),
        (
            {
                "system": [{"type": "text", "text": "x", "cache_control": HOUR}],
                "messages": [
                    {"role": "user", "content": "hi"},
                    {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}]},
                ],
            },
            3600,
        ),
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
    block = {"type": "text", "text": "x", "cache_control": control}
    valid = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [valid, block]}
    assert rejected_param(cache_control=control) == f"cache_control{where}"
    assert rejected_param(system=[valid, block]) == f"system[1].cache_control{where}"
    tool = {"name": "t", "input_schema": {"type": "object"}, "cache_control": control}
    assert rejected_param(tools=[tool]) == f"tools[0].cache_control{where}"
    user = {"role": "user", "content": [valid, block]}
    assert rejected_param(messages=[user]) == f"messages[0].content[1].cache_control{where}"
    answered = {"role": "user", "content": [result]}
    assert rejected_param(messages=[answered]) == f"messages[0].content[0].content[1].cache_control{where}"


def test_fields_without_effect() -> None:
    request = decode(
        metadata={"user_id": "u"},
        cache_control={"type": "ephemeral"},
        betas=["a"],
        service_tier="auto",
        speed="standard",
        mcp_servers=[],
        container=None,
        thread=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={},
    )
    assert asked(request) == []


def test_unsupported_fields_are_reported() -> None:
    fields: dict[str, Any] = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "container": "c",
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
        "inference_geo": "eu",
        "speed": "fast",
        "service_tier": "priority",
        "unknown_field": 1,
    }
    assert asked(decode(**fields)) == [("unknown", name) for name in fields]
    assert asked(decode(output_config={"task_budget": {}})) == [("unknown", "output_config.task_budget")]
    assert asked(decode(thinking={"type": "adaptive", "display": "omitted"})) == [
        ("thinking_display", "thinking.display")
    ]
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


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
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
        (block(type="tool_use", id="t", name="f", input={}), "messages[0].content[0].type"),
        (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
        (
            block(type="tool_result", tool_use_id="t", content=[{"type": "tool_result", "tool_use_id": "t"}]),
            "messages[0].content[0].content[0].type",
        ),
        (block(type="image", source={"type": "base64", "data": "#"}), "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "base64"}), "messages[0].content[0].source.data"),
        (block(type="image", source={"type": "url"}), "messages[0].content[0].source.url"),
        (block(type="image", source={"type": "ftp"}), "messages[0].content[0].source.type"),
        (block(type="document", source={"type": "text"}), "messages[0].content[0].source.data"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": []}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        ({"system": [{"type": "image", "source": {"type": "url", "url": "x"}}]}, "system[0].type"),
        ({"system": 7}, "system"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**10}, "max_tokens"),
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
        (block(type=7), "messages[0].content[0].type: unknown block type 7"),
        ({"system": [{"type": "image"}]}, "system[0].type: image blocks are not allowed here"),
    ],
)
def test_block_type_messages(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=f"^{re.escape(message)}$"):
        decode(**fields)

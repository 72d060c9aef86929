"""Anthropic messages: JSON to values."""

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
from dragoman.protocols.messages.signature import sign
from dragoman.protocols.registry import PROTOCOLS
from tests.protocols.messaging import HI, asked, decode, refused


def test_the_least() -> None:
    assert decode() == GenerationRequest(
        model="m",
        messages=(Message("user", (Text("hi"),)),),
        max_tokens=10,
        delivery=Delivery(usage=True),
        asked=(Asked("chat", "messages"),),
    )


def test_a_whole_conversation() -> None:
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


def test_the_same_conversation_as_a_chat() -> None:
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
def test_the_billing_line_is_no_part_of_the_prompt(system: list[str], text: str | None) -> None:
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


def test_shape() -> None:
    given: dict[str, dict[str, Any]] = {
        "output_config.format": {"output_config": {"format": FORMAT}},
        "output_format": {"output_format": FORMAT},
    }
    for path, fields in given.items():
        request = decode(**fields)
        assert request.constraint == JsonSchema(SCHEMA, path=f"{path}.schema")
        assert asked(request) == [("constraint", path)]
    assert refused(output_config={"format": FORMAT}, output_format=FORMAT) == "output_format"


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
def test_how_long_a_prompt_is_to_be_kept(fields: dict[str, Any], seconds: float) -> None:
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
def test_a_wish_to_keep_that_is_written_wrongly(control: Any, where: str) -> None:
    block = {"type": "text", "text": "x", "cache_control": control}
    fine = {"type": "text", "text": "x", "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [fine, block]}
    assert refused(cache_control=control) == f"cache_control{where}"
    assert refused(system=[fine, block]) == f"system[1].cache_control{where}"
    tool = {"name": "t", "input_schema": {"type": "object"}, "cache_control": control}
    assert refused(tools=[tool]) == f"tools[0].cache_control{where}"
    said = {"role": "user", "content": [fine, block]}
    assert refused(messages=[said]) == f"messages[0].content[1].cache_control{where}"
    answered = {"role": "user", "content": [result]}
    assert refused(messages=[answered]) == f"messages[0].content[0].content[1].cache_control{where}"


def test_what_asks_for_nothing() -> None:
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


def test_what_nobody_honours_is_asked_for() -> None:
    fields: dict[str, Any] = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "container": "c",
        "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
        "inference_geo": "eu",
        "speed": "fast",
        "service_tier": "priority",
        "unheard_of": 1,
    }
    assert asked(decode(**fields)) == [("unknown", name) for name in fields]
    assert asked(decode(output_config={"task_budget": {}})) == [("unknown", "output_config.task_budget")]
    assert asked(decode(thinking={"type": "adaptive", "display": "omitted"})) == [
        ("thinking_display", "thinking.display")
    ]
    assert asked(decode(thinking={"type": "between_tools"})) == [("between_tools", "thinking.type")]


def test_a_reply_that_was_begun_is_asked_to_be_continued() -> None:
    request = decode(messages=[HI, {"role": "assistant", "content": "The answer is ("}])
    assert request.messages[-1] == Message("assistant", (Text("The answer is ("),))
    assert asked(request) == [("prefill", "messages[1]")]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_threads_are_not_kept(thread: dict[str, Any]) -> None:
    with pytest.raises(ThreadUnsupported):
        decode(thread=thread)


def test_what_is_counted_needs_no_limit() -> None:
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
        (block(type="unheard_of"), "messages[0].content[0].type"),
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
def test_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (block(), "messages[0].content[0].type: required, but missing"),
        (block(type=7), "messages[0].content[0].type: no block is of the type 7"),
        ({"system": [{"type": "image"}]}, "system[0].type: no image block belongs here"),
    ],
)
def test_words_about_blocks(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=f"^{re.escape(words)}$"):
        decode(**fields)

"""Server side of chat completions: decoding requests."""

from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Delivery, Image, Logprobs, Message, Part, Reasoning, Text, ToolCall, ToolResult
from tests.protocols import wire
from tests.protocols.wire import features, invalid, rejected_param

decode = partial(wire.decode, "chat")


def test_decode_all_roles_and_content_types() -> None:
    request = decode(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "hi", "name": "bob"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"function": {"name": "g", "arguments": {"y": 2}}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "fine"}]},
            {"role": "assistant", "content": "", "function_call": {"name": "h", "arguments": "{}"}},
            {"role": "function", "name": "h", "content": "done"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    )  # fmt: skip
    assert request.messages == (
        Message("system", (Text("Be brief."),)),
        Message("developer", (Text("a"), Text("b"))),
        Message("user", (Text("hi"),), "bob"),
        Message("assistant", (Reasoning("hm"), ToolCall("c1", "f", '{"x":1}'), ToolCall("call_1", "g", '{"y":2}'))),
        Message("tool", (ToolResult("c1", (Text("ok"),)),)),
        Message("tool", (ToolResult("c2", (Text("fine"),)),)),
        Message("assistant", (Text(""), ToolCall("h", "h", "{}"))),
        Message("tool", (ToolResult("h", (Text("done"),)),), "h"),
        Message("assistant", (Text("no"),)),
    )
    assert features(request) == set()


def test_decode_every_option() -> None:
    request = decode(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=3, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, logit_bias={"5": -100}, stop=["a", "b"], stop_token_ids=[2], ignore_eos=True, n=2,
        max_completion_tokens=9, max_tokens=99, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True}, user="u", metadata={"a": "b"}, store=False, service_tier="auto",
    )  # fmt: skip
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.logit_bias) == (0, 0, {5: -100})
    assert (request.max_tokens, request.stop, request.stop_token_ids, request.choices) == (9, ("a", "b"), (2,), 2)
    assert request.logprobs == Logprobs(2)
    assert request.delivery == Delivery(stream=True, usage=True, service_tier=True)
    names = "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias stop "
    names += "stop_token_ids ignore_eos logprobs"
    assert features(request) == {(name, name) for name in names.split()} | {("choices", "n")}


def test_null_and_neutral_values_request_no_features() -> None:
    nulls = ("temperature", "seed", "stop", "tools", "response_format", "stream_options", "logit_bias", "unknown_field")
    request = decode(**dict.fromkeys(nulls), presence_penalty=0, frequency_penalty=0.0, top_p=1, n=1, logprobs=False)
    assert features(request) == set()
    assert request.sampling.temperature is None


def test_requested_features_have_their_path() -> None:
    image, document = {"type": "image_url", "image_url": {"url": "data:x"}}, {"title": "A", "text": "b"}
    messages = [{"role": "user", "content": [image]}]
    request = decode(messages=messages, documents=[document], store=True, service_tier="priority", unknown_field=1)
    assert (request.messages[0].parts, request.documents) == ((Image(url="data:x"),), (document,))
    names = ("documents", "store", "service_tier")
    expected = {(name, name) for name in names} | {("images", "messages[0].content[0]"), ("unknown", "unknown_field")}
    assert features(request) == expected


@pytest.mark.parametrize("none", [None, -1])
def test_no_limit_of_the_reply(none: int | None) -> None:
    assert decode(max_tokens=none).max_tokens is None
    assert decode(max_completion_tokens=none, max_tokens=5).max_tokens == 5
    assert wire.decode("completions", prompt="a", max_tokens=none).max_tokens is None


def test_fields_of_other_servers() -> None:
    request = decode(return_token_ids=True, timings_per_token=True, prompt_logprobs=2)
    assert request.logprobs == Logprobs(None, prompt=2)
    assert request.delivery == Delivery(token_ids=True, timings=True)
    assert features(request) == {("token_ids", "return_token_ids"), ("prompt_logprobs", "prompt_logprobs")}
    assert features(decode(return_token_ids=False, timings_per_token=False)) == set()
    both = decode(logprobs=True, top_logprobs=1, prompt_logprobs=0)
    assert both.logprobs == Logprobs(1, prompt=0)
    running = decode(stream=True, stream_options={"continuous_usage_stats": True})
    assert running.delivery == Delivery(stream=True)
    running = decode(stream=True, stream_options={"continuous_usage_stats": True, "include_usage": True})
    assert running.delivery == Delivery(stream=True, usage=True, running_usage=True)


TEXT = {"type": "text", "text": "a"}
CALL: dict[str, Any] = {"function": {}}
INVALID = [
    *invalid("messages", "messages", [], "hi"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "bob", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [TEXT, {"type": "zip"}]}]}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0].function.name"),
    *invalid("n", "n", 0, 1.5, True),
    *invalid("max_tokens", "max_tokens", 0, -2),
    *invalid("max_completion_tokens", "max_completion_tokens", 0, -2),
    *invalid("prompt_logprobs", "prompt_logprobs", -1, 21, True),
    *invalid("temperature", "temperature", -0.1, "hot"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    *invalid("stop", "stop", "", ["a", ""], "x" * 2000),
    ({"stop": [1]}, "stop[0]"),
    *invalid("logit_bias", "logit_bias", {"a": 1}, {"-1": 1}, dict.fromkeys(map(str, range(10_000)), 1)),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"seed": 2**70}, "seed"),
    ({"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "messages[0].tool_calls[0].function"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("chat", **fields) == param


@pytest.mark.parametrize(("retention", "seconds"), [(None, 0), ("in_memory", 0), ("in-memory", 0), ("24h", 24 * 3600)])
def test_prompt_cache_retention(retention: str | None, seconds: float) -> None:
    request = decode(prompt_cache_retention=retention)
    assert request.keep_seconds == seconds
    assert features(request) == set()


def decode_message(**fields: Any) -> Message:
    request = decode(messages=[fields])
    assert features(request) == set()
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
    assert features(request) == {("custom_tools", "messages[0].tool_calls[0].type")}

"""Server side of chat completions: decoding requests, encoding replies."""

from typing import Any

import msgspec
import pytest

from dragoman.core.errors import BadRequest, EngineDied
from dragoman.core.events import (
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.request import (
    Delivery,
    Image,
    JsonSchema,
    Logprobs,
    Message,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from tests.protocols.chat_helpers import CHAT, REQUEST, asked, chunk, collected, decode, frames, parse


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
    assert asked(request) == set()


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
    assert request.delivery == Delivery(stream=True, usage=True)
    names = "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias stop "
    names += "stop_token_ids ignore_eos logprobs"
    assert asked(request) == {(name, name) for name in names.split()} | {("choices", "n")}


def test_null_and_neutral_values_request_no_features() -> None:
    nulls = ("temperature", "seed", "stop", "tools", "response_format", "stream_options", "logit_bias", "unknown_field")
    request = decode(**dict.fromkeys(nulls), presence_penalty=0, frequency_penalty=0.0, top_p=1, n=1, logprobs=False)
    assert asked(request) == set()
    assert request.sampling.temperature is None


def test_requested_features_have_their_path() -> None:
    schema = {"type": "object"}
    request = decode(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}},
        reasoning_effort="low",
        store=True,
        unknown_field=1,
    )
    assert request.messages[0].parts == (Image(url="data:x"),)
    assert request.tools == (Tool("f", "", schema, strict=True, path="tools[0].function.parameters"),)
    assert request.tool_choice == ToolChoice("named", "f", parallel=False)
    assert request.constraint == JsonSchema(schema, "r", strict=True, path="response_format.json_schema.schema")
    assert request.thinking == Thinking(effort="low")
    assert asked(request) == {
        ("images", "messages[0].content[0]"),
        ("tools", "tools"),
        ("strict_tools", "tools[0].function.strict"),
        ("constraint", "tool_choice"),
        ("constraint", "response_format"),
        ("thinking", "reasoning_effort"),
        ("store", "store"),
        ("unknown", "unknown_field"),
    }


TEXT = {"type": "text", "text": "a"}
CALL: dict[str, Any] = {"function": {}}
INVALID = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "bob", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [TEXT, {"type": "zip"}]}]}, "messages[0].content[1].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0].function.name"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(at): 1 for at in range(10_000)}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"seed": 2**70}, "seed"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), INVALID)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(**fields)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


def test_stream_frames() -> None:
    encoded = frames(
        REQUEST, (0, [Started(3)]), (0, [TextDelta('a"\n'), TextDelta(""), TextDelta("é😀")]), (0, [Finished()])
    )
    assert encoded == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": 'a"\n'}),
        chunk({"content": "é😀"}),
        chunk({}, finish="stop"),
        "data: [DONE]",
    ]


def test_interleaved_choices_and_usage() -> None:
    request = msgspec.structs.replace(REQUEST, choices=2, delivery=Delivery(stream=True, usage=True))
    encoded = frames(
        request,
        (0, [Started(3), TextDelta("a")]),
        (1, [Started(3), TextDelta("b")]),
        (1, [Finished("length", usage=Usage(completion=1))]),
        (0, [Finished("stop", usage=Usage(prompt=3, completion=1, cached=2))]),
    )
    assert [entry["choices"][0]["index"] for entry in encoded[:-2]] == [0, 0, 1, 1, 1, 0]
    assert all(entry["usage"] is None for entry in encoded[:-2])
    assert encoded[-2]["choices"] == []
    assert encoded[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_logprobs_in_a_frame() -> None:
    request = msgspec.structs.replace(REQUEST, logprobs=Logprobs(1))
    entry = TokenLogprob(5, b"\xc3", -0.5, (TokenLogprob(6, b"x", -0.1),))
    encoded = frames(request, (0, [TextDelta("", logprobs=(entry,))]), (0, [Finished()]))
    content = [
        {
            "token": "�",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [{"token": "x", "logprob": -0.1, "bytes": [120]}],
        }
    ]
    assert encoded[0] == chunk({"content": ""}, logprobs={"content": content, "refusal": None})


def test_error_frame() -> None:
    encoder = CHAT.encoder(REQUEST, 1)
    assert parse(encoder.fail(EngineDied("gone"))) == [
        {"error": {"message": "gone", "type": "inference_error", "param": None, "code": "engine_died"}}
    ]


def test_reply_is_the_collected_stream() -> None:
    encoded = CHAT.encode_reply(
        REQUEST,
        1700000000,
        collected(
            [Started(3), ReasoningDelta("hm"), TextDelta("a"), TextDelta("b"), ToolCallStart("c1", "f")],
            [ToolCallDelta("{"), ToolCallDelta("}"), Finished("tool_calls", usage=Usage(3, 5))],
        ),
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message: dict[str, Any] = {"role": "assistant", "content": "ab", "refusal": None}
    message |= {"reasoning_content": "hm", "reasoning": "hm", "tool_calls": [call]}
    assert encoded["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}]
    assert (encoded["object"], encoded["usage"]["total_tokens"]) == ("chat.completion", 8)


def test_documents() -> None:
    request = decode(documents=[{"title": "A", "text": "b"}])
    assert request.documents == ({"title": "A", "text": "b"},)
    assert asked(request) == {("documents", "documents")}


@pytest.mark.parametrize(("retention", "seconds"), [(None, 0), ("in_memory", 0), ("in-memory", 0), ("24h", 24 * 3600)])
def test_prompt_cache_retention(retention: str | None, seconds: float) -> None:
    request = decode(prompt_cache_retention=retention)
    assert request.keep_seconds == seconds
    assert asked(request) == set()


def test_unknown_retention_is_rejected() -> None:
    with pytest.raises(BadRequest) as caught:
        decode(prompt_cache_retention="forever")
    assert caught.value.param == "prompt_cache_retention"

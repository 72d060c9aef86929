"""Chat completions: JSON to values, events to frames."""

import json
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import BadRequest, EngineDied
from dragoman.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Collection, Reply
from dragoman.core.request import (
    Asked,
    Delivery,
    GenerationRequest,
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
from dragoman.protocols.registry import PROTOCOLS

CHAT = PROTOCOLS["chat"]


def decode(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return CHAT.decode(json.dumps(body).encode())


def asked(request: GenerationRequest) -> set[tuple[str, str]]:
    return {(entry.feature, entry.param) for entry in request.asked} - {("chat", "messages")}


def test_all_roles_and_shapes_of_content() -> None:
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


def test_every_option() -> None:
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


def test_nulls_and_neutral_values_ask_for_nothing() -> None:
    nothing = ("temperature", "seed", "stop", "tools", "response_format", "stream_options", "logit_bias", "unheard")
    request = decode(**dict.fromkeys(nothing), presence_penalty=0, frequency_penalty=0.0, top_p=1, n=1, logprobs=False)
    assert asked(request) == set()
    assert request.sampling.temperature is None


def test_what_cannot_be_ignored_is_named() -> None:
    schema = {"type": "object"}
    request = decode(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}},
        reasoning_effort="low",
        store=True,
        unheard=1,
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
        ("unknown", "unheard"),
    }


TEXT = {"type": "text", "text": "a"}
CALL: dict[str, Any] = {"function": {}}
MISTAKES = [
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


@pytest.mark.parametrize(("fields", "param"), MISTAKES)
def test_mistakes_name_their_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(**fields)
    assert caught.value.param == param
    assert param.split("[")[0] in caught.value.message


def frames(request: GenerationRequest, *batches: tuple[int, list[Event]]) -> list[Any]:
    encoder = CHAT.encoder(request, 1700000000)
    wire = b"".join(encoder.feed(choice, events) for choice, events in batches) + encoder.end()
    return parse(wire)


def parse(wire: bytes) -> list[Any]:
    assert wire.endswith(b"\n\n")
    lines = wire.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def collected(*batches: list[Event]) -> Reply:
    collection = Collection()
    for events in batches:
        collection.add(0, events)
    return collection.reply()


REQUEST = GenerationRequest(id="chatcmpl-1", model="m")
STAMP = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}


def chunk(delta: dict[str, Any], index: int = 0, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {**STAMP, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}


def test_frames_of_a_stream() -> None:
    told = frames(
        REQUEST, (0, [Started(3)]), (0, [TextDelta('a"\n'), TextDelta(""), TextDelta("é😀")]), (0, [Finished()])
    )
    assert told == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": 'a"\n'}),
        chunk({"content": "é😀"}),
        chunk({}, finish="stop"),
        "data: [DONE]",
    ]


def test_choices_are_interleaved_and_usage_comes_when_asked() -> None:
    request = msgspec.structs.replace(REQUEST, choices=2, delivery=Delivery(stream=True, usage=True))
    told = frames(
        request,
        (0, [Started(3), TextDelta("a")]),
        (1, [Started(3), TextDelta("b")]),
        (1, [Finished("length", usage=Usage(completion=1))]),
        (0, [Finished("stop", usage=Usage(prompt=3, completion=1, cached=2))]),
    )
    assert [entry["choices"][0]["index"] for entry in told[:-2]] == [0, 0, 1, 1, 1, 0]
    assert all(entry["usage"] is None for entry in told[:-2])
    assert told[-2]["choices"] == []
    assert told[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_reasoning_and_calls() -> None:
    told = frames(
        REQUEST,
        (0, [ReasoningDelta("hm"), ToolCallStart("c1", "f"), ToolCallDelta('{"x"'), ToolCallDelta(":1}")]),
        (0, [ToolCallStart("c2", "g"), Finished("tool_calls")]),
    )

    def call(index: int, **fields: Any) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": index, **fields}]})

    assert told == [
        chunk({"reasoning_content": "hm", "reasoning": "hm"}),
        call(0, id="c1", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x"'}),
        call(0, function={"arguments": ":1}"}),
        call(1, id="c2", type="function", function={"name": "g", "arguments": ""}),
        chunk({}, finish="tool_calls"),
        "data: [DONE]",
    ]


def test_logprobs() -> None:
    request = msgspec.structs.replace(REQUEST, logprobs=Logprobs(1))
    entry = TokenLogprob(5, b"\xc3", -0.5, (TokenLogprob(6, b"x", -0.1),))
    told = frames(request, (0, [TextDelta("", logprobs=(entry,))]), (0, [Finished()]))
    content = [
        {
            "token": "�",
            "logprob": -0.5,
            "bytes": [0xC3],
            "top_logprobs": [{"token": "x", "logprob": -0.1, "bytes": [120]}],
        }
    ]
    assert told[0] == chunk({"content": ""}, logprobs={"content": content, "refusal": None})


def test_a_late_failure_is_a_frame_of_its_own() -> None:
    encoder = CHAT.encoder(REQUEST, 1)
    assert parse(encoder.fail(EngineDied("gone"))) == [
        {"error": {"message": "gone", "type": "inference_error", "param": None, "code": "engine_died"}}
    ]


def test_the_reply_is_the_collected_stream() -> None:
    told = CHAT.encode_reply(
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
    assert told["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}]
    assert (told["object"], told["usage"]["total_tokens"]) == ("chat.completion", 8)


def test_an_asked_feature_has_a_path() -> None:
    assert Asked("choices", "n") in decode(n=3).asked


def test_documents() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "documents": [{"title": "A", "text": "b"}]}
    request = PROTOCOLS["chat"].decode(json.dumps(body).encode())
    assert request.documents == ({"title": "A", "text": "b"},)
    assert ("documents", "documents") in [(asked.feature, asked.param) for asked in request.asked]


@pytest.mark.parametrize(("retention", "seconds"), [(None, 0), ("in_memory", 0), ("in-memory", 0), ("24h", 24 * 3600)])
def test_how_long_a_prompt_is_to_be_kept(retention: str | None, seconds: float) -> None:
    request = decode(prompt_cache_retention=retention)
    assert request.keep_seconds == seconds
    assert asked(request) == set()


def test_a_time_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        decode(prompt_cache_retention="for ever")
    assert caught.value.param == "prompt_cache_retention"

"""Server side of chat completions: encoding replies and streams."""

import json
from typing import Any

import msgspec

from dragoman.core.errors import EngineDied
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
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Delivery, GenerationRequest, Logprobs
from tests.protocols.wire import collected, encode_reply, encoder, frames

REQUEST = GenerationRequest(id="chatcmpl-1", model="m", fingerprint="fp-1")
LEGACY = GenerationRequest(
    id="chatcmpl-1",
    model="m",
    fingerprint="fp-1",
    asked=(Asked(Feature.CHAT, "messages"), Asked(Feature.TOOLS, "functions")),
)
MESSAGE = {"role": "assistant", "refusal": None}
HEADER = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "m",
    "system_fingerprint": "fp-1",
}


def chunk(delta: dict[str, Any], index: int = 0, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {**HEADER, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}


def call(index: int, **fields: Any) -> dict[str, Any]:
    return chunk({"tool_calls": [{"index": index, **fields}]})


def whole(request: GenerationRequest, events: list[Event]) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(encode_reply("chat", request, collected(events)))["choices"][0]
    return choice


def test_stream_frames() -> None:
    encoded = frames(
        "chat", REQUEST, (0, [Started(3)]), (0, [TextDelta('a"\n'), TextDelta(""), TextDelta("é😀")]), (0, [Finished()])
    )
    assert encoded == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": 'a"\n'}),
        chunk({"content": "é😀"}),
        chunk({}, finish="stop"),
        "[DONE]",
    ]


def test_interleaved_choices_and_usage() -> None:
    request = msgspec.structs.replace(REQUEST, choices=2, delivery=Delivery(stream=True, usage=True))
    encoded = frames(
        "chat",
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
    deltas: list[Event] = [TextDelta(text, logprobs=(entry,)) for text in ("", "é")]
    encoded = frames("chat", request, (0, [*deltas, TextDelta(""), Finished()]))
    top = [{"token": "x", "logprob": -0.1, "bytes": [120]}]
    content = [{"token": "�", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": top}]
    logprobs = {"content": content, "refusal": None}
    assert encoded[:2] == [chunk({"content": text}, logprobs=logprobs) for text in ("", "é")]
    assert len(encoded) == 4


def test_error_frame() -> None:
    error = {"message": "gone", "type": "inference_error", "param": None, "code": "engine_died"}
    frame = b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"
    assert encoder("chat", REQUEST).fail(EngineDied("gone")) == frame


def test_call_frames_have_id_and_name_first_then_only_arguments() -> None:
    encoded = frames(
        "chat",
        REQUEST,
        (0, [Started(3), ToolCallStart("c1", "f"), ToolCallDelta(""), ToolCallDelta('{"x'), ToolCallDelta('": 1}')]),
        (0, [ToolCallStart("c2", "g"), ToolCallDelta("{}", count=2), Finished("tool_calls")]),
    )
    assert encoded == [
        chunk({"role": "assistant", "content": ""}),
        call(0, id="c1", type="function", function={"name": "f", "arguments": ""}),
        call(0, function={"arguments": '{"x'}),
        call(0, function={"arguments": '": 1}'}),
        call(1, id="c2", type="function", function={"name": "g", "arguments": ""}),
        call(1, function={"arguments": "{}"}),
        chunk({}, finish="tool_calls"),
        "[DONE]",
    ]


def test_call_index_counts_per_choice() -> None:
    encoded = frames(
        "chat",
        REQUEST,
        (0, [ToolCallStart("c1", "f")]),
        (1, [ToolCallStart("c2", "f"), ToolCallDelta("{")]),
        (0, [ToolCallDelta("{}"), ToolCallStart("c3", "f")]),
    )
    entries = [(frame["choices"][0]["index"], frame["choices"][0]["delta"]["tool_calls"][0]) for frame in encoded[:-1]]
    assert [(choice, entry["index"]) for choice, entry in entries] == [(0, 0), (1, 0), (1, 0), (0, 0), (0, 1)]


def test_reasoning_frames() -> None:
    encoded = frames("chat", REQUEST, (0, [ReasoningDelta("hm"), ReasoningDelta(""), TextDelta("so"), Finished()]))
    assert encoded[:-1] == [
        chunk({"reasoning_content": "hm", "reasoning": "hm"}),
        chunk({"content": "so"}),
        chunk({}, finish="stop"),
    ]


def test_thoughts_are_separated_by_a_blank_line() -> None:
    events: list[Event] = [Started(3), ReasoningDelta("First "), ReasoningDelta("idea."), TextDelta("So."), Finished()]
    events[4:4] = [ReasoningDelta("Second.", signature="s"), ReasoningDelta("Third."), ToolCallStart("c1", "f")]
    events[7:7] = [ToolCallDelta("{}"), ReasoningDelta("Fourth.")]
    expected = "First idea.\n\nSecond.\n\nThird.\n\nFourth."
    assert whole(REQUEST, events)["message"]["reasoning_content"] == expected
    deltas = [frame["choices"][0]["delta"] for frame in frames("chat", REQUEST, (0, events))[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == expected


def test_legacy_function_call() -> None:
    events: list[Event] = [Started(), TextDelta("hm"), ToolCallStart("c1", "f"), ToolCallDelta("{}")]
    encoded = frames("chat", LEGACY, (0, [*events, Finished("tool_calls")]))
    assert encoded == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "hm"}),
        chunk({"function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": "{}"}}),
        chunk({}, finish="function_call"),
        "[DONE]",
    ]
    choice = whole(LEGACY, [*events, Finished("tool_calls")])
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == MESSAGE | {"content": "hm", "function_call": {"name": "f", "arguments": "{}"}}


def test_reply_message_omits_absent_fields() -> None:
    assert whole(REQUEST, [Started(), TextDelta("a"), Finished()])["message"] == MESSAGE | {"content": "a"}
    assert whole(REQUEST, [Started(), Finished()])["message"] == MESSAGE | {"content": ""}
    only_call = whole(REQUEST, [Started(), ToolCallStart("c", "f"), ToolCallDelta("{}"), Finished("tool_calls")])
    assert only_call["finish_reason"] == "tool_calls"
    encoded = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert only_call["message"] == MESSAGE | {"content": None, "tool_calls": [encoded]}


def test_texts_around_a_call_are_separated() -> None:
    events: list[Event] = [Started(3), ReasoningDelta("hm"), TextDelta("a"), ToolCallStart("c1", "f")]
    events += [ToolCallDelta("{}"), TextDelta("b"), Finished("tool_calls")]
    encoded = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = MESSAGE | {"content": "a\n\nb", "tool_calls": [encoded], "reasoning_content": "hm", "reasoning": "hm"}
    assert whole(REQUEST, events) == {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    deltas = [frame["choices"][0]["delta"] for frame in frames("chat", REQUEST, (0, events))[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "a\n\nb"


LIKELY = TokenLogprob(2, b"b", -1.5, (TokenLogprob(3, b" x", -0.25),))
EVENTS: list[Event] = [
    Started(3, 1, (TokenLogprob(1, b"a", None), LIKELY), prompt_ids=(1, 2, 3), seconds=0.5),
    ReasoningDelta("why", 2, (4, 5)),
    TextDelta("", tokens=(6,)),
    TextDelta("yes", tokens=(7,)),
    ToolCallStart("c", "f"),
    ToolCallDelta("{}", 2, (8, 9)),
    Finished("tool_calls", usage=Usage(3, 6, cached=1, reasoning=2), seconds=2.0),
]


def test_token_ids() -> None:
    request = msgspec.structs.replace(REQUEST, delivery=Delivery(stream=True, token_ids=True))
    first, *others, _ = frames("chat", request, (0, EVENTS))
    assert first["prompt_token_ids"] == [1, 2, 3]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    streamed = [chunk["choices"][0]["token_ids"] for chunk in (first, *others)]
    assert streamed == [[], [4, 5], [6], [7], [], [8, 9], []]
    reply = json.loads(encode_reply("chat", request, collected(EVENTS)))
    assert (reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) == ([1, 2, 3], [4, 5, 6, 7, 8, 9])


def test_usage_and_timings_in_every_chunk() -> None:
    delivery = Delivery(stream=True, usage=True, running_usage=True, timings=True)
    request = msgspec.structs.replace(REQUEST, delivery=delivery)
    *chunks, last, _ = frames("chat", request, (0, EVENTS))
    usages = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert usages == [(3, 0), (3, 2), (3, 4), (3, 4), (3, 6), (3, 6)]
    assert last["timings"] == chunks[-1]["timings"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    timings = chunks[-1]["timings"]
    assert {name: timings[name] for name in ("cache_n", "prompt_n", "prompt_ms", "prompt_per_second")} == {
        "cache_n": 1,
        "prompt_n": 2,
        "prompt_ms": 500,
        "prompt_per_second": 4,
    }
    expected = {"predicted_n": 6, "predicted_ms": 2000, "predicted_per_second": 3, "predicted_per_token_ms": 333.333}
    assert timings | expected == timings
    reply = json.loads(encode_reply("chat", request, collected(EVENTS)))
    assert reply["timings"] == timings


def test_running_usage_of_several_choices_counts_the_prompt_once() -> None:
    delivery = Delivery(stream=True, usage=True, running_usage=True)
    request = msgspec.structs.replace(REQUEST, choices=2, delivery=delivery)
    *chunks, _, _ = frames("chat", request, (0, [Started(3), TextDelta("a")]), (1, [Started(3), TextDelta("a")]))
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [3, 4, 4, 5]


def test_running_usage_alone_adds_no_usage_chunk() -> None:
    request = msgspec.structs.replace(REQUEST, delivery=Delivery(stream=True, running_usage=True))
    *chunks, last, done = frames("chat", request, (0, EVENTS))
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert [chunk["usage"]["completion_tokens"] for chunk in (*chunks, last)] == [0, 2, 4, 4, 6, 6]


def test_running_usage_of_an_engine_that_counts_only_at_the_end() -> None:
    request = msgspec.structs.replace(REQUEST, choices=2, delivery=Delivery(stream=True, running_usage=True))
    first = Finished(usage=Usage(3, 6, cached=1, reasoning=2))
    second = Finished(usage=Usage(completion=4))
    *chunks, last, _ = frames("chat", request, (0, [Started(), first]), (1, [Started(), TextDelta("a", 0), second]))
    assert [chunk["usage"]["total_tokens"] for chunk in (*chunks, last)] == [0, 9, 9, 9, 13]
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def test_prompt_logprobs() -> None:
    request = msgspec.structs.replace(REQUEST, logprobs=Logprobs(None, prompt=1))
    likely = {"logprob": -0.25, "rank": 1, "decoded_token": " x"}
    expected = [None, {"2": {"logprob": -1.5, "rank": None, "decoded_token": "b"}, "3": likely}]
    reply = json.loads(encode_reply("chat", request, collected(EVENTS)))
    assert reply["prompt_logprobs"] == expected
    assert reply["choices"][0]["logprobs"] is None
    first, *others, _ = frames("chat", request, (0, EVENTS))
    assert first["prompt_logprobs"] == expected
    assert all("prompt_logprobs" not in chunk for chunk in others)

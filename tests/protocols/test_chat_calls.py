"""Reasoning and tool calls in chat replies: single frames, and joined frames compared with the whole reply."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.request import Asked, GenerationRequest
from tests.protocols.chat_helpers import CHAT, REQUEST, chunk, collected, frames

LEGACY = GenerationRequest(id="chatcmpl-1", model="m", asked=(Asked("chat", "messages"), Asked("tools", "functions")))


def call(index: int, **fields: Any) -> dict[str, Any]:
    return chunk({"tool_calls": [{"index": index, **fields}]})


def test_call_frames_have_id_and_name_first_then_only_arguments() -> None:
    encoded = frames(
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
        "data: [DONE]",
    ]


def test_call_index_counts_per_choice() -> None:
    encoded = frames(
        REQUEST,
        (0, [ToolCallStart("c1", "f")]),
        (1, [ToolCallStart("c2", "f"), ToolCallDelta("{")]),
        (0, [ToolCallDelta("{}"), ToolCallStart("c3", "f")]),
    )
    entries = [(frame["choices"][0]["index"], frame["choices"][0]["delta"]["tool_calls"][0]) for frame in encoded[:-1]]
    assert [(choice, entry["index"]) for choice, entry in entries] == [(0, 0), (1, 0), (1, 0), (0, 0), (0, 1)]


def test_reasoning_frames() -> None:
    encoded = frames(REQUEST, (0, [ReasoningDelta("hm"), ReasoningDelta(""), TextDelta("so"), Finished()]))
    assert encoded[:-1] == [
        chunk({"reasoning_content": "hm", "reasoning": "hm"}),
        chunk({"content": "so"}),
        chunk({}, finish="stop"),
    ]


def test_legacy_function_call() -> None:
    events: list[Event] = [Started(), TextDelta("hm"), ToolCallStart("c1", "f"), ToolCallDelta("{}")]
    encoded = frames(LEGACY, (0, [*events, Finished("tool_calls")]))
    assert encoded == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "hm"}),
        chunk({"function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": "{}"}}),
        chunk({}, finish="function_call"),
        "data: [DONE]",
    ]
    choice = whole(LEGACY, [*events, Finished("tool_calls")])
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant",
        "content": "hm",
        "refusal": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }


def whole(request: GenerationRequest, events: list[Event]) -> dict[str, Any]:
    choice: dict[str, Any] = CHAT.encode_reply(request, 1, collected(events))["choices"][0]
    return choice


def test_reply_message_omits_absent_fields() -> None:
    text = whole(REQUEST, [Started(), TextDelta("a"), Finished()])
    assert text["message"] == {"role": "assistant", "content": "a", "refusal": None}
    empty = whole(REQUEST, [Started(), Finished()])
    assert empty["message"] == {"role": "assistant", "content": "", "refusal": None}
    only_call = whole(REQUEST, [Started(), ToolCallStart("c", "f"), ToolCallDelta("{}"), Finished("tool_calls")])
    assert only_call["finish_reason"] == "tool_calls"
    assert only_call["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


TEXT = st.text(alphabet='ab"\\\n,{}é😀\x00', max_size=4)
CALL = st.builds(
    lambda name, pieces: [ToolCallStart(f"call_{name}", name), *map(ToolCallDelta, pieces)],
    st.sampled_from(["f", "g"]),
    st.lists(TEXT, max_size=4),
)
DELTAS = st.one_of(TEXT.map(lambda text: [TextDelta(text)]), TEXT.map(lambda text: [ReasoningDelta(text)]), CALL)


def joined(encoded: list[Any]) -> dict[str, Any]:
    """Join the frames of a stream to a message, as a client does."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning": "", "calls": [], "reason": None}
    for entry in (frame["choices"][0] for frame in encoded[:-1]):
        delta = entry["delta"]
        message["role"] = delta.get("role", message["role"])
        message["content"] += delta.get("content", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        message["reasoning"] += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(message["calls"])
                message["calls"].append({key: piece[key] for key in ("id", "type")} | {"function": piece["function"]})
            else:
                message["calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        message["reason"] = entry["finish_reason"]
    return message


@given(st.lists(DELTAS, max_size=12), st.lists(st.integers(1, 40), max_size=6))
def test_joined_stream_equals_reply(deltas: list[list[Event]], cuts: list[int]) -> None:
    events: list[Event] = [Started(2), *(event for group in deltas for event in group), Finished(usage=Usage(2, 3))]
    edges = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    batches = [(0, events[start:end]) for start, end in pairwise(edges)]
    streamed = joined(frames(REQUEST, *batches))
    choice = whole(REQUEST, events)
    message = choice["message"]
    assert streamed == {
        "role": "assistant",
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "calls": message.get("tool_calls", []),
        "reason": choice["finish_reason"],
    }
    assert message.get("reasoning_content") == message.get("reasoning")

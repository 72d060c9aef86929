"""Encoding of Anthropic replies, streams and errors."""

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core import errors
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.request import GenerationRequest
from dragoman.protocols.messages.blocks import SIGNATURE
from dragoman.protocols.registry import ANTHROPIC
from tests.protocols.anthropic_stream import accumulated, read
from tests.protocols.wire import collected, encode_reply, encoder

REQUEST = GenerationRequest(id="msg_1", model="m")


def streamed(*batches: list[Event]) -> list[dict[str, Any]]:
    stream_encoder = encoder("messages", REQUEST)
    return read(b"".join([*(stream_encoder.feed(0, batch) for batch in batches), stream_encoder.end()]))


def whole(events: list[Event]) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(encode_reply("messages", REQUEST, collected(events)))
    return reply


def usage(output: int, thinking: int) -> dict[str, Any]:
    counts = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    return counts | {"output_tokens": output, "output_tokens_details": {"thinking_tokens": thinking}}


IN_MESSAGE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "service_tier": "standard",
}


def block(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **fields}}


def delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


EVENTS: list[Event] = [
    Started(7, cached_tokens=3),
    ReasoningDelta("I had "),
    ReasoningDelta("better ask."),
    TextDelta("Let "),
    TextDelta(""),
    TextDelta("me see."),
    ToolCallStart("call_1", "weather"),
    ToolCallDelta('{"city": '),
    ToolCallDelta('"Köln"}'),
    ToolCallStart("call_2", "time"),
    Finished("tool_calls", usage=Usage(7, 9, 3, 2)),
]
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "I had better ask.", "signature": SIGNATURE.sign("I had better ask.")},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "id": "call_2", "name": "time", "input": {}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "stop_details": None,
    "usage": usage(9, 2) | IN_MESSAGE,
}


def test_stream_frames() -> None:
    assert streamed(EVENTS) == [
        {
            "type": "message_start",
            "message": MESSAGE | {"content": [], "stop_reason": None, "usage": usage(0, 0) | IN_MESSAGE},
        },
        {"type": "ping"},
        block(0, "thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="I had "),
        delta(0, "thinking_delta", thinking="better ask."),
        delta(0, "signature_delta", signature=SIGNATURE.sign("I had better ask.")),
        stop(0),
        block(1, "text", text=""),
        delta(1, "text_delta", text="Let "),
        delta(1, "text_delta", text="me see."),
        stop(1),
        block(2, "tool_use", id="call_1", name="weather", input={}),
        delta(2, "input_json_delta", partial_json='{"city": '),
        delta(2, "input_json_delta", partial_json='"Köln"}'),
        stop(2),
        block(3, "tool_use", id="call_2", name="time", input={}),
        delta(3, "input_json_delta", partial_json=""),
        stop(3),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None},
            "usage": usage(9, 2),
        },
        {"type": "message_stop"},
    ]


def test_reply_message() -> None:
    assert whole(EVENTS) == MESSAGE


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (Finished("stop"), "end_turn", None),
        (Finished("stop", stop="END"), "stop_sequence", "END"),
        (Finished("length"), "max_tokens", None),
        (Finished("tool_calls"), "tool_use", None),
        (Finished("content_filter"), "refusal", None),
    ],
)
def test_stop_reason(finished: Finished, reason: str, sequence: str | None) -> None:
    events: list[Event] = [Started(1), TextDelta("a"), finished]
    for message in (whole(events), accumulated(streamed(events))):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert (message["stop_details"] is not None) is (reason == "refusal")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (" ", {}),
        ("{}", {}),
        ('{"big": 123456789012345678901234567890}', {"big": 123456789012345678901234567890}),
        ('{"city": "K', {"INVALID_JSON": '{"city": "K'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)
def test_call_input(arguments: str, expected: dict[str, Any]) -> None:
    message = whole([Started(), ToolCallStart("c", "f"), ToolCallDelta(arguments), Finished("tool_calls")])
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": expected}]


def test_error_event() -> None:
    stream_encoder = encoder("messages", REQUEST)
    stream_encoder.feed(0, [Started(), TextDelta("a")])
    assert stream_encoder.fail(errors.EngineDied("gone")) == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"},"request_id":"msg_1"}\n\n'
    )


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.BadRequest("x"), 400, "invalid_request_error"),
        (errors.Unauthorized("x"), 401, "authentication_error"),
        (errors.NotFound("x"), 404, "not_found_error"),
        (errors.RequestTimeout("x"), 408, "invalid_request_error"),
        (errors.TooLarge("x"), 413, "request_too_large"),
        (errors.EngineFailed("x"), 500, "api_error"),
        (errors.NotSupported("x"), 501, "invalid_request_error"),
        (errors.EngineDied("x"), 502, "api_error"),
        (errors.QueueFull("x"), 529, "overloaded_error"),
        (errors.EngineTimeout("x"), 504, "timeout_error"),
    ],
)
def test_error_status_and_type(error: errors.DragomanError, status: int, kind: str) -> None:
    assert ANTHROPIC.status(error) == status
    expected = {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1"}
    assert ANTHROPIC.encode_error(error, "req_1") == expected


LONG = "prompt is too long"
"""Agents recognize these words."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.BadRequest("at most 32 are allowed", param="stop_sequences"), "stop_sequences: at most 32 are allowed"),
        (errors.BadRequest("system: no", param="system"), "system: no"),
        (errors.ModelNotFound("model 'x' is not served here", param="model"), "model 'x' is not served here"),
        (errors.ContextTooLong("it is", param="messages"), f"{LONG}: it is"),
        (errors.ContextTooLong("it is", tokens=21, limit=20), f"{LONG}: 21 tokens > 20 maximum"),
        (
            errors.NoRoomForReply("it is", tokens=20, limit=19),
            f"{LONG}: 20 tokens > 19 maximum (one of 20 is reserved for the reply)",
        ),
    ],
)
def test_error_message(error: errors.DragomanError, message: str) -> None:
    assert ANTHROPIC.encode_error(error, "r")["error"]["message"] == message


def test_error_details() -> None:
    encoded = ANTHROPIC.encode_error(errors.ThreadUnsupported("no"), "r")["error"]
    assert encoded["details"] == {"error_code": "thread_unsupported_request"}


TEXT = st.text(alphabet='ab"\\\n,{}é😀\x00 ', max_size=4)
CALL = st.builds(
    lambda name, pieces: [ToolCallStart(f"call_{name}", name), *map(ToolCallDelta, pieces)],
    st.sampled_from(["f", "g"]),
    st.one_of(st.lists(TEXT, max_size=3), st.sampled_from([[], ["{}"], ['{"a"', ': "', '😀"}'], ['{"a":', " 1}"]])),
)
DELTAS = st.one_of(TEXT.map(lambda text: [TextDelta(text)]), TEXT.map(lambda text: [ReasoningDelta(text)]), CALL)
FINISHED = st.builds(
    Finished,
    st.sampled_from(FinishReason.__args__),  # type: ignore[attr-defined]
    st.sampled_from([None, "END"]),
    st.builds(Usage, st.integers(5, 9), st.integers(0, 9), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
)


@given(st.lists(DELTAS, max_size=12), FINISHED, st.lists(st.integers(1, 40), max_size=6))
def test_joined_stream_equals_message(deltas: list[list[Event]], finished: Finished, cuts: list[int]) -> None:
    usage = finished.usage or Usage()
    started = Started(usage.prompt, usage.cached, kept_tokens=usage.kept)
    events: list[Event] = [started, *(event for group in deltas for event in group), finished]
    edges = sorted({0, len(events), *(cut for cut in cuts if cut < len(events))})
    frames = streamed(*(events[start:end] for start, end in pairwise(edges)))
    assert accumulated(frames) == whole(events)


@pytest.mark.parametrize(("seconds", "short", "long"), [(300.0, 6, 0), (3600.0, 0, 6)])
def test_cache_writes_are_counted_separately(seconds: float, short: int, long: int) -> None:
    request = msgspec.structs.replace(REQUEST, keep_seconds=seconds)
    started, finished = Started(9, cached_tokens=2, kept_tokens=6), Finished(usage=Usage(9, 1, cached=2, kept=6))
    counts = json.loads(encode_reply("messages", request, collected([started, TextDelta("hi"), finished])))["usage"]
    assert counts["cache_creation"] == {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long}
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [counts[name] for name in names] == [1, 6, 2]

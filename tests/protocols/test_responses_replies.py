"""Encodes responses: events, and the final event of a stream compared with the whole reply."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dragoman.core.errors import ContextTooLong, EngineFailed, QueueFull
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.request import GenerationRequest
from dragoman.protocols.responses.calls import ClientTool
from dragoman.protocols.responses.encoder import ResponseEncoding
from dragoman.protocols.responses.server import ResponseContext
from dragoman.protocols.sealed import Seal
from tests.protocols.response_events import accumulated, read
from tests.protocols.wire import collected, decode_response

REQUEST = GenerationRequest(id="resp_1", model="m")
CLIENT_TOOLS = {
    "f": ClientTool("function", "f"),
    "n__f": ClientTool("function", "f", "n"),
    "c": ClientTool("custom", "c"),
    "shell": ClientTool("shell", "shell"),
}
CONTEXT = ResponseContext(echoed=decode_response().context.echoed, client_tools=CLIENT_TOOLS)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def encoding(context: ResponseContext = CONTEXT) -> ResponseEncoding:
    return ResponseEncoding(context, lambda: 7.5)


def streamed(*events: Event, context: ResponseContext = CONTEXT) -> list[dict[str, Any]]:
    encoder = encoding(context).encode_stream(REQUEST, 0)
    return read(encoder.feed(0, events) + encoder.end())


def whole(*events: Event, context: ResponseContext = CONTEXT) -> dict[str, Any]:
    response = encoding(context).encode_reply(REQUEST, 0, collected([*events]))
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(response))
    return decoded


def item_events(payloads: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the events between the first two and the last, without their common fields."""
    common = ("type", "sequence_number", "output_index", "content_index", "item_id")
    inner = [{name: value for name, value in payload.items() if name not in common} for payload in payloads]
    names = [payload["type"].removeprefix("response.") for payload in payloads]
    return list(zip(names, inner, strict=True))[2:-1]


def test_usage_and_times() -> None:
    final = accumulated(streamed(Started(3), TextDelta("so"), TextDelta(' "é"'), Finished(usage=Usage(3, 2, 1))))
    assert (final["status"], final["completed_at"], final["created_at"]) == ("completed", 7, 7)
    assert final["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    content = [{"type": "output_text", "text": 'so "é"', "annotations": [], "logprobs": []}]
    item = {"type": "message", "id": "msg_1_0", "role": "assistant", "status": "completed", "content": content}
    assert final["output"] == [item]


def test_encrypted_reasoning() -> None:
    context = msgspec.structs.replace(CONTEXT, encrypts_reasoning=True)
    final = accumulated(streamed(Started(), ReasoningDelta("hm"), TextDelta("so"), Finished(), context=context))
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert final["output"][0]["encrypted_content"] == Seal.REASONING.seal("hm")


def test_calls() -> None:
    payloads = streamed(
        Started(),
        ToolCallStart("c1", "n__f"),
        *map(ToolCallDelta, ('{"a', '": 1}')),
        ToolCallStart("c2", "c"),
        *map(ToolCallDelta, ('{"inp', 'ut": "x\\', "ny", '"}')),
        ToolCallStart("c3", "shell"),
        *map(ToolCallDelta, ('{"commands": ', '["ls"]}')),
        Finished("tool_calls"),
    )
    call = {"type": "function_call", "id": "fc_1_0", "call_id": "c1", "name": "f", "namespace": "n"}
    custom = {"type": "custom_tool_call", "id": "ctc_1_1", "call_id": "c2", "name": "c"}
    shell = {"type": "shell_call", "id": "sh_1_2", "call_id": "c3", "environment": None, "action": {"commands": ["ls"]}}
    assert item_events(payloads) == [
        ("output_item.added", {"item": {**call, "arguments": "", "status": "in_progress"}}),
        ("function_call_arguments.delta", {"delta": '{"a'}),
        ("function_call_arguments.delta", {"delta": '": 1}'}),
        ("function_call_arguments.done", {"name": "f", "arguments": '{"a": 1}'}),
        ("output_item.done", {"item": {**call, "arguments": '{"a": 1}', "status": "completed"}}),
        ("output_item.added", {"item": {**custom, "input": "", "status": "in_progress"}}),
        ("custom_tool_call_input.delta", {"delta": "x"}),
        ("custom_tool_call_input.delta", {"delta": "\ny"}),
        ("custom_tool_call_input.done", {"input": "x\ny"}),
        ("output_item.done", {"item": {**custom, "input": "x\ny", "status": "completed"}}),
        ("output_item.added", {"item": {**shell, "status": "in_progress"}}),
        ("output_item.done", {"item": {**shell, "status": "completed"}}),
    ]


def test_logprobs_stay_with_their_text() -> None:
    one, two = (TokenLogprob(at, text, -0.5, (TokenLogprob(9, b"x", -1.0),)) for at, text in enumerate((b"a", b"bc")))
    first, second = TextDelta("a", logprobs=(one,)), TextDelta("bc", logprobs=(two,))
    events = (Started(), first, ReasoningDelta("hm"), second, Finished())
    payloads = streamed(*events)
    assert accumulated(payloads) == whole(*events)
    output = payloads[-1]["response"]["output"]
    entries = [item["content"][0]["logprobs"] for item in output if item["type"] == "message"]
    assert [[entry["token"] for entry in entry_list] for entry_list in entries] == [["a"], ["bc"]]
    assert entries[0][0]["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [120]}]


def test_failure() -> None:
    encoder = encoding().encode_stream(REQUEST, 0)
    frames = encoder.feed(0, [Started(), ReasoningDelta("hm"), TextDelta("so")])
    *_, error, failed = read(frames + encoder.fail(EngineFailed("it broke")))
    reason = {"code": "server_error", "message": "it broke"}
    assert error == {"type": "error", **reason, "param": None, "sequence_number": error["sequence_number"]}
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == reason
    assert [item["type"] for item in failed["response"]["output"]] == ["reasoning"]


def test_failure_before_the_first_event() -> None:
    codes = {QueueFull("full"): "rate_limit_exceeded", ContextTooLong("long"): "context_length_exceeded"}
    for error, code in codes.items():
        payloads = read(encoding().encode_stream(REQUEST, 0).fail(error))
        names = [payload["type"] for payload in payloads]
        assert names == ["response.created", "response.in_progress", "error", "response.failed"]
        assert payloads[-1]["response"]["error"]["code"] == code


TEXTS = st.text(max_size=6)
SPOKEN = st.one_of(
    st.builds(TextDelta, TEXTS),
    st.builds(ReasoningDelta, TEXTS),
    st.builds(lambda name: ToolCallStart(name, name), st.sampled_from([*CLIENT_TOOLS, "unknown"])),
    st.builds(ToolCallDelta, st.one_of(TEXTS, st.sampled_from(['{"input": "', '{"commands": ["a"]}', '"}', "\\u00"]))),
)
REASONS: tuple[FinishReason, ...] = ("stop", "length", "tool_calls", "content_filter")
ENDS = st.builds(Finished, st.sampled_from(REASONS), usage=st.builds(Usage, *[st.integers(0, 9)] * 4))


def orderly(events: Sequence[Event]) -> list[Event]:
    """Drop arguments without a call and give each call a unique id."""
    kept: list[Event] = []
    for at, event in enumerate(events):
        if isinstance(event, ToolCallDelta) and not (kept and isinstance(kept[-1], ToolCallStart | ToolCallDelta)):
            continue
        kept.append(ToolCallStart(f"call_{at}", event.name) if isinstance(event, ToolCallStart) else event)
    return kept


@given(st.lists(SPOKEN, max_size=12), ENDS, st.booleans())
def test_any_stream_is_well_formed_and_ends_with_the_whole_reply(
    generated: list[Event], end: Finished, encrypts: bool
) -> None:
    events = (Started(3), *orderly(generated), end)
    context = msgspec.structs.replace(CONTEXT, encrypts_reasoning=encrypts)
    payloads = streamed(*events, context=context)
    assert accumulated(payloads) == whole(*events, context=context)
    for payload in payloads:
        EVENTS.validate_json(msgspec.json.encode(payload), strict=True)
    Response.model_validate_json(msgspec.json.encode(payloads[-1]["response"]), strict=True)


@given(st.lists(SPOKEN, max_size=12), ENDS)
def test_batching_of_events_does_not_matter(generated: list[Event], end: Finished) -> None:
    events = (Started(3), *orderly(generated), end)
    encoder = encoding().encode_stream(REQUEST, 0)
    apart = b"".join(encoder.feed(0, [event]) for event in events) + encoder.end()
    assert read(apart) == streamed(*events)

"""Reads chat completions in the variants that real servers send."""

import json
from typing import Any

import pytest

from dragoman.core.errors import BadAnswer, ContextTooLong, MalformedToolCall, ServerFailed, StreamCutOff
from dragoman.core.events import Usage
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.client.replay import calls_delta, delta, end_chunk, frames, parts, piece, read_choice, read_error, replay

A = ToolCall("a", "f", '{"x": 1}')
B = ToolCall("b", "g", '{"y": 2}')
MADE = (ToolCall("made_0", "f", '{"x": 1}'), ToolCall("made_1", "f", '{"x": 2}'))
STREAMS: dict[str, tuple[list[Any], tuple[Part, ...]]] = {
    "text": ([delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo")], (Text("Hello"),)),
    "null content": ([delta(content=None), delta(content="Hello")], (Text("Hello"),)),
    "content in parts": ([delta(content=[{"type": "text", "text": "Hello"}, "!"])], (Text("Hello!"),)),
    "a refusal": ([delta(refusal="I will not.")], (Text("I will not."),)),
    "a message instead of a delta": ([{"choices": [{"message": {"content": "Hello"}}]}], (Text("Hello"),)),
    "a text instead of a delta": ([{"choices": [{"index": 0, "text": "Hello"}]}], (Text("Hello"),)),
    "chunks without choices": ([{"choices": []}, delta(content="Hello"), {"id": "x"}], (Text("Hello"),)),
    "another choice": ([{"choices": [{"index": 1, "delta": {"content": "no"}}]}, delta(content="a")], (Text("a"),)),
    **{
        name: ([delta(**{name: "Hmm"}), delta(content="Hello")], (Reasoning("Hmm"), Text("Hello")))
        for name in ("reasoning_content", "reasoning", "thinking", "thought")
    },
    "reasoning under two names": ([delta(reasoning_content="Hmm", reasoning="Hmm")], (Reasoning("Hmm"),)),
    "reasoning in details": ([delta(reasoning_details=[{"text": "H"}, {"summary": "m"}])], (Reasoning("Hm"),)),
    "reasoning in parts": (
        [delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "Hmm"}]}]), delta(content="a")],
        (Reasoning("Hmm"), Text("a")),
    ),
    "a call": ([calls_delta(piece("", "f", index=0, id="a")), calls_delta(piece('{"x": 1}', index=0))], (A,)),
    "two calls": (
        [calls_delta(piece('{"x": 1}', "f", index=0, id="a")), calls_delta(piece('{"y": 2}', "g", index=1, id="b"))],
        (A, B),
    ),
    "two calls in one chunk": (
        [calls_delta(piece('{"x": 1}', "f", index=0, id="a"), piece('{"y": 2}', "g", index=1, id="b"))],
        (A, B),
    ),
    "calls that take turns": (
        [
            calls_delta(piece('{"x"', "f", index=0, id="a")),
            calls_delta(piece('{"y"', "g", index=1, id="b")),
            calls_delta(piece(": 1}", index=0), piece(": 2}", index=1)),
        ],
        (A, B),
    ),
    "no index": (
        [
            calls_delta(piece('{"x":', "f", id="a")),
            calls_delta(piece(" 1}")),
            calls_delta(piece('{"y":', "g", id="b")),
            calls_delta(piece(" 2}")),
        ],
        (A, B),
    ),
    "always index 0": (
        [calls_delta(piece('{"x": 1}', "f", index=0, id="a")), calls_delta(piece('{"y": 2}', "g", index=0, id="b"))],
        (A, B),
    ),
    "neither index nor id": ([calls_delta(piece('{"x": 1}', "f")), calls_delta(piece('{"x": 2}', "f"))], MADE),
    "the name in every piece": (
        [calls_delta(piece('{"x"', "f", index=0, id="a")), calls_delta(piece(": 1}", "f", index=0, id="a"))],
        (A,),
    ),
    "an id that changes": (
        [calls_delta(piece('{"x"', "f", index=0, id="a")), calls_delta(piece(": 1}", index=0, id="z"))],
        (A,),
    ),
    "the id before the name": (
        [
            calls_delta({"index": 0, "id": "a"}),
            calls_delta(piece("{", "f", index=0)),
            calls_delta(piece('"x": 1}', index=0)),
        ],
        (A,),
    ),
    "arguments as an object": ([calls_delta(piece({"x": 1}, "f", index=0, id="a"))], (ToolCall("a", "f", '{"x":1}'),)),
    "no arguments": ([calls_delta(piece(None, "f", index=0, id="a"))], (ToolCall("a", "f", "{}"),)),
    "a legacy call": (
        [delta(function_call={"name": "f", "arguments": ""}), delta(function_call={"arguments": '{"x": 1}'})],
        (ToolCall("made_0", "f", '{"x": 1}'),),
    ),
    "text within a call": (
        [calls_delta(piece('{"x"', "f", index=0, id="a")), delta(content="\n"), calls_delta(piece(": 1}", index=0))],
        (A, Text("\n")),
    ),
    "text after a call": ([calls_delta(piece('{"x": 1}', "f", index=0, id="a")), delta(content="so")], (A, Text("so"))),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_with_and_without_done_marker(name: str) -> None:
    payloads, expected = STREAMS[name]
    assert parts("chat", frames(*payloads, end_chunk(), "[DONE]")) == expected
    assert parts("chat", frames(*payloads, end_chunk()).rstrip()) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "Hello"}, (Text("Hello"),)),
        ({"content": None}, ()),
        ({"content": [{"type": "text", "text": "Hello"}], "reasoning": "Hmm"}, (Reasoning("Hmm"), Text("Hello"))),
        ({"tool_calls": [piece('{"x": 1}', "f", id="a"), piece('{"y": 2}', "g", id="b")]}, (A, B)),
        ({"content": None, "tool_calls": [piece('{"x": 1}', "f"), piece('{"x": 2}', "f")]}, MADE),
        ({"function_call": {"name": "f", "arguments": {"x": 1}}}, (ToolCall("made_0", "f", '{"x":1}'),)),
    ],
)
def test_json_body_instead_of_a_stream(message: dict[str, Any], expected: tuple[Part, ...]) -> None:
    body = {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert parts("chat", json.dumps(body, indent=1).encode()) == expected


def test_ollama_reply() -> None:
    body = {"message": {"content": "Hello"}, "done": True, "done_reason": "length", "eval_count": 3}
    choice = read_choice("chat", json.dumps(body).encode())
    assert (choice.text, choice.reason, choice.usage.completion) == ("Hello", "length", 3)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("MAX_TOKENS", "length"),
        ("eos_token", "stop"),
        ("content_filter", "content_filter"),
        ("tool_calls", "tool_calls"),
        ("function_call", "tool_calls"),
        ("never heard", "stop"),
    ],
)
def test_finish_reasons(word: str, reason: str) -> None:
    assert read_choice("chat", frames(delta(content="a"), end_chunk(word))).reason == reason


def test_reply_with_calls_has_finish_reason_tool_calls() -> None:
    data = frames(calls_delta(piece("{}", "f", id="a")), end_chunk("stop"))
    assert read_choice("chat", data).reason == "tool_calls"


def test_vllm_stop_reason_is_the_stop_string() -> None:
    last = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
    assert read_choice("chat", frames(delta(content="a"), last)).stop == "END"


@pytest.mark.parametrize(
    "last",
    [
        [end_chunk(), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}],
        [end_chunk(usage={"input_tokens": 5, "output_tokens": 7})],
        [end_chunk(), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}] * 2,
        [end_chunk(x_groq={"usage": {"prompt_tokens": 5, "completion_tokens": 7}})],
        [end_chunk(timings={"prompt_n": 2, "cache_n": 3, "predicted_n": 7})],
        [end_chunk(prompt_eval_count=5, eval_count=7)],
        [delta(content="", usage=None), end_chunk(usage={"prompt_tokens": 5, "completion_tokens": 7.0})],
    ],
)
def test_usage_field_names(last: list[Any]) -> None:
    choice = read_choice("chat", frames(delta(content="a"), *last, "[DONE]"))
    assert (choice.usage.prompt, choice.usage.completion) == (5, 7)


def test_usage_details() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert read_choice("chat", frames(end_chunk(usage=usage))).usage == Usage(9, 8, 4, 3)


HALF = frames(delta(content="Hel"))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (HALF, StreamCutOff),
        (HALF + b"data: [DONE]\n\n", StreamCutOff),
        (HALF + b'data: {"choices": [{"del', StreamCutOff),
        (HALF + b'data: {"choices": [{"del\n\n', BadAnswer),
        (HALF + frames({"error": {"message": "boom", "type": "server_error"}}), ServerFailed),
        (HALF + frames({"error": "boom"}, "[DONE]"), ServerFailed),
        (HALF + b'event: error\ndata: {"message": "boom"}\n\n', ServerFailed),
        (HALF + b'error: {"code": 500, "message": "boom"}\n\n', ServerFailed),
        (HALF + frames({"object": "error", "message": "maximum context length is 5", "code": 400}), ContextTooLong),
        (HALF + frames(end_chunk("error")), BadAnswer),
        (HALF + frames(end_chunk(), {"error": {"message": "boom"}}), ServerFailed),
        (b"data: <html>\n\n", BadAnswer),
        (b"<html>hello</html>", BadAnswer),
        (b'{"object": "list"}', BadAnswer),
        (b'{"choices": []}', BadAnswer),
        (b'{"choices": [{"mess', BadAnswer),
        (b"[1, 2]", BadAnswer),
        (b"", BadAnswer),
        (b" \n", BadAnswer),
        (b'{"error": {"message": "boom"}}', ServerFailed),
    ],
)
def test_invalid_reply(data: bytes, kind: type[Exception]) -> None:
    assert read_error("chat", data) is kind


@pytest.mark.parametrize(
    ("arguments", "raw"), [('{"x": ', '{"x": '), ("[1]", "[1]"), ('{"x": 1}{"y": 2}', '{"x": 1}{"y": 2}')]
)
def test_malformed_arguments_raise(arguments: str, raw: str) -> None:
    data = frames(calls_delta(piece(arguments, "f", index=0, id="a")), end_chunk("tool_calls"))
    with pytest.raises(MalformedToolCall) as caught:
        replay("chat", [data])
    assert caught.value.call == ToolCall("a", "f", raw)
    assert raw in caught.value.message
    assert replay("chat", [data], check_calls=False)[-2].arguments == raw  # type: ignore[union-attr]


def test_truncated_arguments_are_kept() -> None:
    data = frames(calls_delta(piece('{"x": ', "f", index=0, id="a")), end_chunk("length"))
    choice = read_choice("chat", data)
    assert (choice.reason, choice.tool_calls[0].arguments) == ("length", '{"x": ')

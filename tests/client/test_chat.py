"""Replies of chat completions, as servers really send them."""

import json
from typing import Any

import pytest

from dragoman.core.errors import BadAnswer, ContextTooLong, MalformedToolCall, ServerFailed, StreamCutOff
from dragoman.core.events import Usage
from dragoman.core.reply import Choice
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.client.playing import calling, delta, ending, every_way, frames, parts, piece, play

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
    "a thought under two names": ([delta(reasoning_content="Hmm", reasoning="Hmm")], (Reasoning("Hmm"),)),
    "a thought in details": ([delta(reasoning_details=[{"text": "H"}, {"summary": "m"}])], (Reasoning("Hm"),)),
    "a thought in parts": (
        [delta(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "Hmm"}]}]), delta(content="a")],
        (Reasoning("Hmm"), Text("a")),
    ),
    "a call": ([calling(piece("", "f", index=0, id="a")), calling(piece('{"x": 1}', index=0))], (A,)),
    "two calls": (
        [calling(piece('{"x": 1}', "f", index=0, id="a")), calling(piece('{"y": 2}', "g", index=1, id="b"))],
        (A, B),
    ),
    "two calls in one chunk": (
        [calling(piece('{"x": 1}', "f", index=0, id="a"), piece('{"y": 2}', "g", index=1, id="b"))],
        (A, B),
    ),
    "calls that take turns": (
        [
            calling(piece('{"x"', "f", index=0, id="a")),
            calling(piece('{"y"', "g", index=1, id="b")),
            calling(piece(": 1}", index=0), piece(": 2}", index=1)),
        ],
        (A, B),
    ),
    "no index": (
        [
            calling(piece('{"x":', "f", id="a")),
            calling(piece(" 1}")),
            calling(piece('{"y":', "g", id="b")),
            calling(piece(" 2}")),
        ],
        (A, B),
    ),
    "always index 0": (
        [calling(piece('{"x": 1}', "f", index=0, id="a")), calling(piece('{"y": 2}', "g", index=0, id="b"))],
        (A, B),
    ),
    "neither index nor id": ([calling(piece('{"x": 1}', "f")), calling(piece('{"x": 2}', "f"))], MADE),
    "the name in every piece": (
        [calling(piece('{"x"', "f", index=0, id="a")), calling(piece(": 1}", "f", index=0, id="a"))],
        (A,),
    ),
    "an id that changes": (
        [calling(piece('{"x"', "f", index=0, id="a")), calling(piece(": 1}", index=0, id="z"))],
        (A,),
    ),
    "the id before the name": (
        [calling({"index": 0, "id": "a"}), calling(piece("{", "f", index=0)), calling(piece('"x": 1}', index=0))],
        (A,),
    ),
    "arguments as an object": ([calling(piece({"x": 1}, "f", index=0, id="a"))], (ToolCall("a", "f", '{"x":1}'),)),
    "no arguments": ([calling(piece(None, "f", index=0, id="a"))], (ToolCall("a", "f", "{}"),)),
    "a legacy call": (
        [delta(function_call={"name": "f", "arguments": ""}), delta(function_call={"arguments": '{"x": 1}'})],
        (ToolCall("made_0", "f", '{"x": 1}'),),
    ),
    "text within a call": (
        [calling(piece('{"x"', "f", index=0, id="a")), delta(content="\n"), calling(piece(": 1}", index=0))],
        (A, Text("\n")),
    ),
    "text after a call": ([calling(piece('{"x": 1}', "f", index=0, id="a")), delta(content="so")], (A, Text("so"))),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    payloads, expected = STREAMS[name]
    assert parts("chat", frames(*payloads, ending(), "[DONE]")) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_the_same_without_an_end_mark(name: str) -> None:
    payloads, expected = STREAMS[name]
    assert parts("chat", frames(*payloads, ending()).rstrip()) == expected


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
def test_a_body_where_a_stream_was_asked_for(message: dict[str, Any], expected: tuple[Part, ...]) -> None:
    body = {"choices": [{"message": message, "finish_reason": "stop"}]}
    assert parts("chat", json.dumps(body, indent=1).encode()) == expected


def test_ollamas_own_reply() -> None:
    body = {"message": {"content": "Hello"}, "done": True, "done_reason": "length", "eval_count": 3}
    choice = every_way("chat", json.dumps(body).encode())
    assert isinstance(choice, Choice)
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
def test_reasons(word: str, reason: str) -> None:
    choice = every_way("chat", frames(delta(content="a"), ending(word)))
    assert isinstance(choice, Choice)
    assert choice.reason == reason


def test_a_reply_with_calls_ends_because_of_them() -> None:
    choice = every_way("chat", frames(calling(piece("{}", "f", id="a")), ending("stop")))
    assert isinstance(choice, Choice)
    assert choice.reason == "tool_calls"


def test_the_stop_string_that_vllm_names() -> None:
    last = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
    choice = every_way("chat", frames(delta(content="a"), last))
    assert isinstance(choice, Choice)
    assert choice.stop == "END"


@pytest.mark.parametrize(
    "last",
    [
        [ending(), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}],
        [ending(usage={"input_tokens": 5, "output_tokens": 7})],
        [ending(), {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}] * 2,
        [ending(x_groq={"usage": {"prompt_tokens": 5, "completion_tokens": 7}})],
        [ending(timings={"prompt_n": 2, "cache_n": 3, "predicted_n": 7})],
        [ending(prompt_eval_count=5, eval_count=7)],
        [delta(content="", usage=None), ending(usage={"prompt_tokens": 5, "completion_tokens": 7.0})],
    ],
)
def test_usage_under_many_names(last: list[Any]) -> None:
    choice = every_way("chat", frames(delta(content="a"), *last, "[DONE]"))
    assert isinstance(choice, Choice)
    assert (choice.usage.prompt, choice.usage.completion) == (5, 7)


def test_parts_of_the_usage() -> None:
    told = {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    choice = every_way("chat", frames(ending(usage=told)))
    assert isinstance(choice, Choice)
    assert choice.usage == Usage(9, 8, 4, 3)


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
        (HALF + frames(ending("error")), BadAnswer),
        (HALF + frames(ending(), {"error": {"message": "boom"}}), ServerFailed),
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
def test_what_is_no_reply(data: bytes, kind: type[Exception]) -> None:
    found = every_way("chat", data)
    assert isinstance(found, tuple)
    assert found[0] is kind


@pytest.mark.parametrize(
    ("arguments", "raw"), [('{"x": ', '{"x": '), ("[1]", "[1]"), ('{"x": 1}{"y": 2}', '{"x": 1}{"y": 2}')]
)
def test_malformed_arguments(arguments: str, raw: str) -> None:
    data = frames(calling(piece(arguments, "f", index=0, id="a")), ending("tool_calls"))
    with pytest.raises(MalformedToolCall) as caught:
        play("chat", [data])
    assert caught.value.call == ToolCall("a", "f", raw)
    assert raw in caught.value.message
    assert play("chat", [data], check_calls=False)[-2].arguments == raw  # type: ignore[union-attr]


def test_arguments_that_were_cut_short_are_told_as_they_are() -> None:
    data = frames(calling(piece('{"x": ', "f", index=0, id="a")), ending("length"))
    choice = every_way("chat", data)
    assert isinstance(choice, Choice)
    assert (choice.reason, choice.tool_calls[0].arguments) == ("length", '{"x": ')

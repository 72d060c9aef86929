"""The split stage: its rules, token counts and cost."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings

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
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from dragoman.formats import FORMATS
from dragoman.pipeline import split as split_module
from dragoman.pipeline.count import CountStage
from dragoman.pipeline.split import SplitStage, starts_inside_reasoning
from dragoman.pipeline.stop import StopStage
from dragoman.pipeline.text_buffer import MAX_GAP, TextBuffer
from tests.formats.cases import OUTPUTS, TOOLS
from tests.formats.replay import count_tokens, joined, play, run
from tests.support.text_splits import cut, cuttings

NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CALLED = ToolCall("", "now", "{}")


def parts(output: str, thinking: bool = False) -> tuple[Part, ...]:
    return joined(play("hermes", [output], thinking=thinking)).parts


def started() -> SplitStage:
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    stage([Started()])
    return stage


def feed(stage: SplitStage, *pieces: str) -> list[Event]:
    return [event for piece in pieces for event in stage([TextDelta(piece)])]


# Rule 1: only what may still become a marker is held back.


def test_text_passes_at_once() -> None:
    stage = started()
    assert feed(stage, "Hello") == [TextDelta("Hello")]
    assert feed(stage, " world") == [TextDelta(" world")]
    # A space may belong to a marker, and `<` may begin one.
    assert feed(stage, " <", "t") == []
    assert feed(stage, "able>") == [TextDelta(" <table>", 3)]
    assert stage([Finished()]) == [Finished()]


def test_reasoning_and_arguments_pass_at_once() -> None:
    stage = started()
    assert feed(stage, "<think>", "Well", ",") == [ReasoningDelta("Well", 2), ReasoningDelta(",")]
    assert feed(stage, "</think>", "<tool_call>", '{"name": "run", "arguments": ') == []
    first, *rest = feed(stage, '{"comm', 'and": "l', "s -l")
    assert isinstance(first, ToolCallStart)
    assert [event.arguments for event in rest if isinstance(event, ToolCallDelta)] == ['{"comm', 'and": "l', "s -l"]


def test_one_large_piece_makes_few_events() -> None:
    """An engine that produces much text at once is not answered in small events."""
    output = "<think>" + "a b " * 100 + "</think>" + "c d " * 100 + NOW
    kinds = [type(event) for event in play("hermes", [output])]
    assert kinds == [Started, ReasoningDelta, TextDelta, ToolCallStart, ToolCallDelta, Finished]


def test_empty_delta() -> None:
    output = "<think>a</think><think>"
    assert joined(play("hermes", ["", "", output])) == joined(play("hermes", [output]))


def test_stream_without_started_event() -> None:
    events = run([TextDelta("<think>a</think>b"), Finished()], SplitStage(FORMATS["hermes"]))
    assert events == [ReasoningDelta("a"), TextDelta("b", 0), Finished()]


# Rule 2: whitespace next to a marker belongs to it, all other text is kept.


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("  a  b \n", (Text("  a  b \n"),)),
        ("<think>\n a \n</think>\n\n b ", (Reasoning("a"), Text("b "))),
        (f"a \n{NOW}\n\n b", (Text("a"), CALLED, Text("b"))),
        (f"{NOW}\n{NOW} ", (CALLED, CALLED)),
    ],
)
def test_whitespace_next_to_markers(output: str, expected: tuple[Part, ...]) -> None:
    assert parts(output) == expected


# Rule 3: a malformed call is text, and calls are recognized only if tools were offered.


def test_malformed_call_becomes_text() -> None:
    found = joined(play("hermes", ["a <tool_call>b</tool_call> c"]))
    assert found.parts == (Text("a <tool_call>b</tool_call> c"),)
    assert found.reason == "stop"
    assert len(found.warnings) == 1


def test_calls_before_a_malformed_call_are_kept() -> None:
    found = joined(play("hunyuan", ['<tool_calls>[{"name": "now", "arguments": {}}, x]</tool_calls>']))
    assert found.parts == (CALLED, Text(", x]</tool_calls>"))
    assert (found.reason, len(found.warnings)) == ("tool_calls", 1)


def test_engine_warnings_are_kept() -> None:
    events = run([TextDelta("<tool_call>x"), Finished(warnings=("of the engine",))], started())
    assert joined([Started(), *events]).warnings[0] == "of the engine"
    assert len(joined([Started(), *events]).warnings) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_call_markers_are_text_without_tools(name: str) -> None:
    opens = [section.open for section in FORMATS[name].calls if section.open]
    for marker in opens:
        output = f"x{marker}y"
        assert joined(play(name, list(output), tools=())).parts == (Text(output),)


def test_reply_ends_after_one_call_without_parallel_calls() -> None:
    for pieces in ([f"a{NOW}{NOW}b"], list(f"a{NOW}{NOW}b")):
        events = play("hermes", pieces, parallel=False)
        found = joined(events)
        assert found.parts == (Text("a"), CALLED)
        assert found.reason == "tool_calls"
        assert isinstance(events[-1], Finished)
        # Up to the last character that was read, one token each.
        assert count_tokens(events) == (1 if len(pieces) == 1 else len("a" + NOW) - len("</tool_call>"))


@pytest.mark.parametrize("name", ["hunyuan", "llama3", "pythonic", "kimi", "minimax", "harmony", "mistral", "gemma"])
def test_list_ends_after_one_call_without_parallel_calls(name: str) -> None:
    output = OUTPUTS[name]["several calls"]
    whole, *others = [joined(play(name, pieces, parallel=False)) for pieces in ([output], list(output))]
    assert [whole] == others
    assert [part.name for part in whole.parts if isinstance(part, ToolCall)] == ["get_weather"]
    assert len(whole.parts) == 1


def test_no_events_after_finished() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS, parallel=False)
    events = stage([Started(), TextDelta(NOW + "x"), TextDelta("y"), Finished()])
    assert [type(event) for event in events] == [Started, ToolCallStart, ToolCallDelta, Finished]


def test_engine_finishes_a_single_call() -> None:
    found = joined(play("hermes", [f"a{NOW[:-12]}"], reason="length", parallel=False))
    assert found.parts == (Text("a"), CALLED)


def test_reply_that_is_cut_off_within_the_end_of_a_call_has_no_rest() -> None:
    closer = "</tool_call>"
    assert NOW.endswith(closer)
    for missing in range(1, len(closer)):
        found = joined(play("hermes", list(NOW[:-missing]), reason="length"))
        assert found.parts == (CALLED,)
        stopped = joined(play("hermes", list(NOW[:-missing])))
        assert stopped.parts[0] == CALLED


# Rule 4: ambiguous markers in reasoning.

AMBIGUOUS: list[tuple[str, tuple[Part, ...]]] = [
    ("<think>a `</think>` b</think>c", (Reasoning("a `</think>` b"), Text("c"))),
    ('<think>a "</think>" b</think>c', (Reasoning('a "</think>" b'), Text("c"))),
    ("<think>it's '</think>' b</think>c", (Reasoning("it's '</think>' b"), Text("c"))),
    ('<think>say "yes"</think>"Yes"', (Reasoning('say "yes"'), Text('"Yes"'))),
    ('<think>a "</think>"b"', (Reasoning('a "'), Text('"b"'))),
    ("<think>a <think>b</think> c</think>d", (Reasoning("a <think>b</think> c"), Text("d"))),
    ("<think>a `</think>` <think>b</think> c</think>d", (Reasoning("a `</think>` <think>b</think> c"), Text("d"))),
    ("<think>a <tool_call> <think>b</think> c</think>d", (Reasoning("a <tool_call> <think>b</think> c"), Text("d"))),
    ("<think>a <think>b '</think>' c</think> d</think>e", (Reasoning("a <think>b '</think>' c</think> d"), Text("e"))),
    ("<think>a <think>b</think> c", (Reasoning("a <think>b"), Text("c"))),
    ("<think>the <think> tag</think>d", (Reasoning("the <think> tag"), Text("d"))),
    (f"<think>a {NOW}", (Reasoning("a"), CALLED)),
    (f"<think>a {NOW}{NOW}", (Reasoning("a"), CALLED, CALLED)),
    (f"<think>a {NOW}</think>", (Reasoning("a"), CALLED)),
    (f"<think>a {NOW}</think>{NOW}", (Reasoning("a"), CALLED, CALLED)),
    (f"<think>a {NOW}</think>b", (Reasoning(f"a {NOW}"), Text("b"))),
    (f"<think>a {NOW} b</think>{NOW}", (Reasoning(f"a {NOW} b"), CALLED)),
    (f"<think>a `<tool_call>` b</think>{NOW}", (Reasoning("a `<tool_call>` b"), CALLED)),
    ("<think>a <tool_call> b</think>c", (Reasoning("a <tool_call> b"), Text("c"))),
    ("<think>a <tool_call> b", (Reasoning("a <tool_call> b"),)),
    (f"<think>a {NOW} and so on", (Reasoning("a"), CALLED, Text("and so on"))),
]


@pytest.mark.parametrize(("output", "expected"), AMBIGUOUS)
@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_ambiguous_markers_in_reasoning(output: str, expected: tuple[Part, ...], cuts: list[int]) -> None:
    for pieces in ([output], list(output), cut(output, cuts)):
        found = joined(play("hermes", pieces))
        assert found.parts == expected
        assert found.warnings == ()


# Rule 5: openers outside reasoning.


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a\n<think>b</think>c", (Text("a"), Reasoning("b"), Text("c"))),
        ("a <think>b</think>c", (Text("a"), Reasoning("b"), Text("c"))),
        ("a <think>b", (Text("a <think>b"),)),
        ("a\n<think>b", (Text("a"), Reasoning("b"))),
        ("a `<think>` b</think>c", (Text("a `<think>` b</think>c"),)),
        ("<think>a", (Reasoning("a"),)),
    ],
)
def test_openers_outside_reasoning(output: str, expected: tuple[Part, ...]) -> None:
    assert parts(output) == expected
    assert joined(play("hermes", list(output))).parts == expected


def test_reply_that_starts_inside_reasoning() -> None:
    assert parts("a</think>b", thinking=True) == (Reasoning("a"), Text("b"))
    assert parts("<think>a</think>b", thinking=True) == (Reasoning("a"), Text("b"))
    assert parts("a", thinking=True) == (Reasoning("a"),)


@pytest.mark.parametrize(
    ("output", "inside"),
    [
        ("a</think>b", True),
        ("<think>a</think>b", False),
        ("`</think>` a", False),
        ("`</think>` a</think>", True),
        ("", False),
    ],
)
def test_begins_in_thought(output: str, inside: bool) -> None:
    assert starts_inside_reasoning(FORMATS["hermes"], output) is inside


# Rule 6: tokens.


def token(text: str, number: int) -> TextDelta:
    return TextDelta(text, 1, (number,), (TokenLogprob(number, text.encode(), -1.0),))


def test_token_ids_go_with_the_count() -> None:
    texts = ["<think>", "a", "b", "</think>", "c", "d ", "<tool_call>"]
    texts += ['{"name": "now", "arguments": ', "{}", "}", "</tool_call>", "e"]
    events = started()([*(token(text, i) for i, text in enumerate(texts)), Finished()])
    assert count_tokens(events) == len(texts)
    expected = ((ReasoningDelta, [0, 1, 2], [1, 2]), (TextDelta, [3, 4, 5, 9, 10, 11], [4, 5, 11]))
    for kind, numbers, with_logprobs in expected:
        deltas = [event for event in events if isinstance(event, kind)]
        assert [number for delta in deltas for number in delta.tokens] == numbers
        assert [entry.token for delta in deltas for entry in delta.logprobs] == with_logprobs
    assert all(len(event.tokens) == event.count for event in events if isinstance(event, TextDelta | ToolCallDelta))


@settings(max_examples=30, deadline=None)
@given(cuts=cuttings())
def test_every_token_id_is_delivered_once_and_in_order(cuts: list[int]) -> None:
    pieces = cut(f"<think>why</think>The answer\n<table> is plain.\n{NOW}", cuts)
    events = run([*(token(piece, i) for i, piece in enumerate(pieces)), Finished()], started())
    deltas = [event for event in events if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta)]
    assert [number for delta in deltas for number in delta.tokens] == [*range(len(pieces))]
    assert count_tokens(events) == len(pieces)


def reported_usage(output: str, usage: Usage | None = None) -> Usage:
    last = run([Started(7), *map(TextDelta, output.split("|")), Finished(usage=usage)], started(), CountStage())[-1]
    assert isinstance(last, Finished)
    assert last.usage is not None
    return last.usage


def test_reasoning_tokens_are_counted() -> None:
    # The token of the opener counts with the reasoning, that of the closer with the text.
    assert reported_usage("<think>|a|b|</think>|c|d") == Usage(prompt=7, completion=6, reasoning=3)
    assert reported_usage("a|b") == Usage(prompt=7, completion=2)
    usage = Usage(prompt=9, completion=6, cached=4)
    assert reported_usage("<think>|a|b|</think>|c|d", usage) == Usage(prompt=9, completion=6, cached=4, reasoning=3)


def test_tokens_without_text_are_counted() -> None:
    assert count_tokens(play("hermes", ["a", "", "", "b", "", "<think>", "</think>"])) == 7


# Stop strings.


def stopped(pieces: Sequence[str], *stops: str) -> tuple[tuple[Part, ...], str | None]:
    events = run([Started(), *map(TextDelta, pieces), Finished()], started(), StopStage(stops))
    last = events[-1]
    assert isinstance(last, Finished)
    return joined(events).parts, last.stop


@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_stop_strings_ignore_reasoning_and_calls(cuts: list[int]) -> None:
    run = '<tool_call>{"name": "run", "arguments": {"command": "END"}}</tool_call>'
    output = f"<think>END of it</think>Say {run}the END of it"
    for pieces in ([output], list(output), cut(output, cuts)):
        expected, stop = stopped(pieces, "END")
        assert expected == (
            Reasoning("END of it"),
            Text("Say"),
            ToolCall("", "run", '{"command": "END"}'),
            Text("the "),
        )
        assert stop == "END"


def test_marker_does_not_match_stop_string() -> None:
    assert stopped(list("<think>a</think>b"), "</think>", "think") == ((Reasoning("a"), Text("b")), None)


# Cost.


class CountingBuffer(TextBuffer):
    """A buffer that counts the characters it copies."""

    moved = 0

    def feed(self, text: str) -> None:
        super().feed(text)
        CountingBuffer.moved += len(self.window)

    def take(self, length: int) -> str:
        CountingBuffer.moved += len(self.window)
        return super().take(length)

    def push_back(self, text: str) -> None:
        super().push_back(text)
        CountingBuffer.moved += len(self.window)


LONG = 200_000
WORDS = "word \\n {a, b} " * (LONG // 15)
OBJECTS = '{"key": ["a", 1, true], "b": {}}, ' * (LONG // 34)
COSTLY = {
    "argument": ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "' + WORDS + '"}}</tool_call>'),
    "array": ("hermes", '<tool_call>{"name": "plan", "arguments": {"steps": [' + OBJECTS + "1]}}</tool_call>"),
    "named": ("mistral", '[TOOL_CALLS]run[ARGS]{"command": "' + WORDS + '"}'),
    "thought": ("hermes", "<think>" + WORDS + "</think>x"),
    "thought about markers": ("hermes", "<think>" + "`</think>` <tool_call> <think> " * (LONG // 30) + "</think>x"),
    "parameter": (
        "qwen_xml",
        "<tool_call><function=run><parameter=command>" + WORDS + "</parameter></function></tool_call>",
    ),
    "other parameter": (
        "glm",
        "<tool_call>plan\n<arg_key>steps</arg_key>\n<arg_value>[" + OBJECTS + "1]</arg_value></tool_call>",
    ),
    "braces": ("gemma", '<|tool_call>call:run{command:<|"|>' + WORDS + '<|"|>}<tool_call|>'),
    "python": ("pythonic", "[run(command='" + WORDS + "')]"),
    "text": ("hermes", "a < b " * (LONG // 6)),
    "spaces": ("hermes", " " * LONG + "x"),
    "channel": ("gemma", "<|channel>thought\n" + WORDS + "<channel|>x"),
    "call inside a thought": (
        "hermes",
        '<think>a <tool_call>{"name": "run", "arguments": {"command": "' + WORDS + '"}}</tool_call>',
    ),
    "thought after a call": ("hermes", "<think>a <tool_call>" + WORDS + "</think>x"),
}

MULTIPLES = {"spaces": MAX_GAP, "call inside a thought": 100}
"""Whitespace before a marker is copied with every piece. Held text is read again in larger pieces."""


@pytest.mark.parametrize("case", COSTLY)
def test_cost_is_linear_in_the_reply(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, output = COSTLY[case]
    monkeypatch.setattr(split_module, "TextBuffer", CountingBuffer)
    monkeypatch.setattr(CountingBuffer, "moved", 0)
    events = play(name, [output[i : i + 3] for i in range(0, len(output), 3)])
    assert sum(len(repr(part)) for part in joined(events).parts) > LONG
    assert CountingBuffer.moved < MULTIPLES.get(case, 20) * len(output)


@pytest.mark.parametrize("text", ['{"html": "<think>a</think>b"}', '{"x": "' + NOW.replace('"', "'") + '"}'])
def test_constrained_answer_is_not_split(text: str) -> None:
    for pieces in ([text], list(text)):
        assert joined(play("hermes", pieces, shaped=True)).parts == (Text(text),)

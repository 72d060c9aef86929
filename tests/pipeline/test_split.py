"""The split stage: its rules, its tokens, and what it costs."""

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
from dragoman.pipeline.split import SplitStage, begins_in_thought, is_quoted
from dragoman.pipeline.stop import StopStage
from dragoman.pipeline.text_buffer import MAX_GAP, TextBuffer
from tests.formats.cases import OUTPUTS, TOOLS
from tests.formats.replay import counted, joined, play
from tests.support.cuttings import cut, cuttings

NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CALLED = ToolCall("", "now", "{}")


def parts(output: str, thinking: bool = False) -> tuple[Part, ...]:
    return joined(play("hermes", [output], thinking=thinking)).parts


def fed(stage: SplitStage, *pieces: str) -> list[Event]:
    return [event for piece in pieces for event in stage([TextDelta(piece)])]


# Rule 1: only what may still become a marker is held back.


def test_text_goes_on_at_once() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    stage([Started()])
    assert fed(stage, "Hello") == [TextDelta("Hello")]
    assert fed(stage, " world") == [TextDelta(" world")]
    # A space may belong to a marker, and `<` may begin one.
    assert fed(stage, " <", "t") == []
    assert fed(stage, "able>") == [TextDelta(" <table>", 3)]
    assert stage([Finished()]) == [Finished()]


def test_a_thought_and_arguments_go_on_at_once() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    stage([Started()])
    assert fed(stage, "<think>", "Well", ",") == [ReasoningDelta("Well", 2), ReasoningDelta(",")]
    assert fed(stage, "</think>", "<tool_call>", '{"name": "run", "arguments": ') == []
    first, *rest = fed(stage, '{"comm', 'and": "l', "s -l")
    assert isinstance(first, ToolCallStart)
    assert [event.arguments for event in rest if isinstance(event, ToolCallDelta)] == ['{"comm', 'and": "l', "s -l"]


def test_events_of_one_piece_are_few() -> None:
    """An engine that makes much at once is not answered in crumbs."""
    output = "<think>" + "a b " * 100 + "</think>" + "c d " * 100 + NOW
    kinds = [type(event) for event in play("hermes", [output])]
    assert kinds == [Started, ReasoningDelta, TextDelta, ToolCallStart, ToolCallDelta, Finished]


def test_a_delta_without_text_says_nothing() -> None:
    assert joined(play("hermes", ["", "", "<think>a</think><think>"])) == joined(
        play("hermes", ["<think>a</think><think>"])
    )


def test_a_stream_without_started_is_read_too() -> None:
    stage = SplitStage(FORMATS["hermes"])
    assert [*fed(stage, "<think>a</think>b"), *stage([Finished()])] == [
        ReasoningDelta("a"),
        TextDelta("b", 0),
        Finished(),
    ]


# Rule 2: white space next to a marker belongs to it, all other is somebody's.


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("  a  b \n", (Text("  a  b \n"),)),
        ("<think>\n a \n</think>\n\n b ", (Reasoning("a"), Text("b "))),
        (f"a \n{NOW}\n\n b", (Text("a"), CALLED, Text("b"))),
        (f"{NOW}\n{NOW} ", (CALLED, CALLED)),
    ],
)
def test_white_space(output: str, said: tuple[Part, ...]) -> None:
    assert parts(output) == said


# Rule 3: a call that cannot be read is text, and calls count only where tools were offered.


def test_a_call_that_cannot_be_read() -> None:
    found = joined(play("hermes", ["a <tool_call>b</tool_call> c"]))
    assert found.parts == (Text("a <tool_call>b</tool_call> c"),)
    assert found.reason == "stop"
    assert len(found.warnings) == 1


def test_what_was_read_before_it_stays_a_call() -> None:
    found = joined(play("hunyuan", ['<tool_calls>[{"name": "now", "arguments": {}}, x]</tool_calls>']))
    assert found.parts == (CALLED, Text(", x]</tool_calls>"))
    assert (found.reason, len(found.warnings)) == ("tool_calls", 1)


def test_warnings_of_the_engine_stay() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    last = [*fed(stage, "<tool_call>x"), *stage([Finished(warnings=("of the engine",))])][-1]
    assert isinstance(last, Finished)
    assert last.warnings[0] == "of the engine"
    assert len(last.warnings) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_without_tools_markers_of_calls_are_text(name: str) -> None:
    opens = [section.open for section in FORMATS[name].calls if section.open]
    for marker in opens:
        output = f"x{marker}y"
        assert joined(play(name, list(output), tools=())).parts == (Text(output),)


def test_one_call_is_enough_where_only_one_is_allowed() -> None:
    for pieces in ([f"a{NOW}{NOW}b"], list(f"a{NOW}{NOW}b")):
        events = play("hermes", pieces, parallel=False)
        found = joined(events)
        assert found.parts == (Text("a"), CALLED)
        assert found.reason == "tool_calls"
        assert isinstance(events[-1], Finished)
        # Up to the last character that was read, one token each.
        assert counted(events) == (1 if len(pieces) == 1 else len("a" + NOW) - len("</tool_call>"))


@pytest.mark.parametrize("name", ["hunyuan", "llama3", "pythonic", "kimi", "minimax", "harmony", "mistral", "gemma"])
def test_one_call_is_enough_in_a_list_too(name: str) -> None:
    output = OUTPUTS[name]["several calls"]
    assert isinstance(output, str)
    whole, *others = [joined(play(name, pieces, parallel=False)) for pieces in ([output], list(output))]
    assert [whole] == others
    assert [part.name for part in whole.parts if isinstance(part, ToolCall)] == ["get_weather"]
    assert len(whole.parts) == 1


def test_nothing_follows_the_end() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS, parallel=False)
    events = stage([Started(), TextDelta(NOW + "x"), TextDelta("y"), Finished()])
    assert [type(event) for event in events] == [Started, ToolCallStart, ToolCallDelta, Finished]


def test_without_a_second_call_the_end_is_the_engines() -> None:
    found = joined(play("hermes", [f"a{NOW[:-12]}"], reason="length", parallel=False))
    assert found.parts == (Text("a"), CALLED)


# Rule 4: what is in doubt in a thought.

DOUBTS: list[tuple[str, tuple[Part, ...]]] = [
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


@pytest.mark.parametrize(("output", "said"), DOUBTS)
@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_doubts(output: str, said: tuple[Part, ...], cuts: list[int]) -> None:
    for pieces in ([output], list(output), cut(output, cuts)):
        found = joined(play("hermes", pieces))
        assert found.parts == said
        assert found.warnings == ()


@pytest.mark.parametrize(
    ("before", "after", "quoted"),
    [
        ("a `", "`", True),
        ('a "', '" b', True),
        ("a '", "'", True),
        ("it'", "'", False),
        ("a ", " b", False),
        ('a "', "'", False),
        ('"a" "', '"', True),
        ('"a"', '"', False),
        ('"\n"', '"', True),
        ("", "", False),
    ],
)
def test_what_is_quoted(before: str, after: str, quoted: bool) -> None:
    assert is_quoted(before, after) is quoted


# Rule 5: openers outside of a thought.


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("a\n<think>b</think>c", (Text("a"), Reasoning("b"), Text("c"))),
        ("a <think>b</think>c", (Text("a"), Reasoning("b"), Text("c"))),
        ("a <think>b", (Text("a <think>b"),)),
        ("a\n<think>b", (Text("a"), Reasoning("b"))),
        ("a `<think>` b</think>c", (Text("a `<think>` b</think>c"),)),
        ("<think>a", (Reasoning("a"),)),
    ],
)
def test_openers(output: str, said: tuple[Part, ...]) -> None:
    assert parts(output) == said
    assert joined(play("hermes", list(output))).parts == said


def test_a_prompt_that_ends_inside_a_thought() -> None:
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
def test_whether_a_reply_begins_in_a_thought(output: str, inside: bool) -> None:
    assert begins_in_thought(FORMATS["hermes"], output) is inside


# Rule 6: tokens.


def token(text: str, number: int) -> TextDelta:
    return TextDelta(text, 1, (number,), (TokenLogprob(number, text.encode(), -1.0),))


def test_tokens_go_with_text_and_with_thoughts_and_with_nothing_else() -> None:
    texts = [
        "<think>",
        "a",
        "b",
        "</think>",
        "c",
        "d ",
        "<tool_call>",
        '{"name": "now", "arguments": ',
        "{}",
        "}",
        "</tool_call>",
        "e",
    ]
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    events = [*stage([Started()]), *stage([token(text, at) for at, text in enumerate(texts)]), *stage([Finished()])]
    assert counted(events) == len(texts)
    for kind, numbers in ((ReasoningDelta, [1, 2]), (TextDelta, [4, 5, 11])):
        deltas = [event for event in events if isinstance(event, kind)]
        assert [number for delta in deltas for number in delta.tokens] == numbers
        assert [entry.token for delta in deltas for entry in delta.logprobs] == numbers


@settings(max_examples=30, deadline=None)
@given(cuts=cuttings())
def test_tokens_of_a_text_are_told_in_order_and_once(cuts: list[int]) -> None:
    pieces = cut("<think>why</think>The answer\n<table> is plain.", cuts)
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    events = list(stage([Started()]))
    for at, piece in enumerate(pieces):
        events += stage([token(piece, at)])
    events += stage([Finished()])
    told = [number for event in events if isinstance(event, TextDelta | ReasoningDelta) for number in event.tokens]
    assert told == sorted(set(told))
    assert counted(events) == len(pieces)


def tallied(output: str, usage: Usage | None = None) -> Usage:
    stage, tally = SplitStage(FORMATS["hermes"], TOOLS), CountStage()
    events: list[Event] = list(tally(stage([Started(7)])))
    for piece in output.split("|"):
        events += tally(stage([TextDelta(piece)]))
    events += tally(stage([Finished(usage=usage)]))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.usage is not None
    return last.usage


def test_tokens_of_thoughts_are_counted() -> None:
    # The token of the opener counts with the thought, that of the closer with the text.
    assert tallied("<think>|a|b|</think>|c|d") == Usage(prompt=7, completion=6, reasoning=3)
    assert tallied("a|b") == Usage(prompt=7, completion=2)
    told = Usage(prompt=9, completion=6, cached=4)
    assert tallied("<think>|a|b|</think>|c|d", told) == Usage(prompt=9, completion=6, cached=4, reasoning=3)


def test_tokens_without_text_are_counted() -> None:
    stage = SplitStage(FORMATS["hermes"], TOOLS)
    events = [*fed(stage, "a", "", "", "b", "", "<think>", "</think>"), *stage([Finished()])]
    assert counted(events) == 7


# Stop strings.


def stopped(pieces: Sequence[str], *stops: str) -> tuple[tuple[Part, ...], str | None]:
    stage, stop = SplitStage(FORMATS["hermes"], TOOLS), StopStage(stops)
    events: list[Event] = list(stop(stage([Started()])))
    for piece in pieces:
        events += stop(stage([TextDelta(piece)]))
        if isinstance(events[-1], Finished):
            break
    else:
        events += stop(stage([Finished()]))
    last = events[-1]
    assert isinstance(last, Finished)
    return joined(events).parts, last.stop


@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_stop_strings_are_blind_to_thoughts_and_calls(cuts: list[int]) -> None:
    run = '<tool_call>{"name": "run", "arguments": {"command": "END"}}</tool_call>'
    output = f"<think>END of it</think>Say {run}the END of it"
    for pieces in ([output], list(output), cut(output, cuts)):
        said, stop = stopped(pieces, "END")
        assert said == (Reasoning("END of it"), Text("Say"), ToolCall("", "run", '{"command": "END"}'), Text("the "))
        assert stop == "END"


def test_a_marker_is_no_stop_string() -> None:
    assert stopped(list("<think>a</think>b"), "</think>", "think") == ((Reasoning("a"), Text("b")), None)


# What it costs.


class Weighed(TextBuffer):
    """A source that adds up the characters it has to move."""

    moved = 0

    def feed(self, text: str) -> None:
        super().feed(text)
        Weighed.moved += len(self.window)

    def take(self, length: int) -> str:
        Weighed.moved += len(self.window)
        return super().take(length)

    def push_back(self, text: str) -> None:
        super().push_back(text)
        Weighed.moved += len(self.window)


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
"""White space that may belong to a marker is moved with every piece; what was held is read again in larger ones."""


@pytest.mark.parametrize("what", COSTLY)
def test_a_long_reply_costs_no_more_than_its_length(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, output = COSTLY[what]
    monkeypatch.setattr(split_module, "TextBuffer", Weighed)
    monkeypatch.setattr(Weighed, "moved", 0)
    events = play(name, [output[at : at + 3] for at in range(0, len(output), 3)])
    assert sum(len(repr(part)) for part in joined(events).parts) > LONG
    assert Weighed.moved < MULTIPLES.get(what, 20) * len(output)


@pytest.mark.parametrize("text", ['{"html": "<think>a</think>b"}', '{"x": "' + NOW.replace('"', "'") + '"}'])
def test_a_shape_is_not_taken_apart(text: str) -> None:
    for pieces in ([text], list(text)):
        stage = SplitStage(FORMATS["hermes"], TOOLS, shaped=True)
        events = [*stage([Started()]), *fed(stage, *pieces), *stage([Finished()])]
        assert joined(events).parts == (Text(text),)

"""The call readers in isolation: what they report, when, and what they reject."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.events import Event, ToolCallDelta, ToolCallStart
from dragoman.core.request import Tool
from dragoman.formats.syntax import Braced, CallSection, JsonCall, NamedJson, Pythonic, Tagged
from dragoman.pipeline.call_sections import DETECTORS, READERS
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer
from tests.support.text_splits import cut, cuttings

TAGS = Tagged("<f={name}>", "<p={key}>\n", "\n</p>", "</f>")
SECTIONS = {
    "json": CallSection(JsonCall(), open="<c>", close="</c>"),
    "named": CallSection(NamedJson(("{name}[A]",)), open="[C]"),
    "tagged": CallSection(TAGS, open="<c>", close="</c>"),
    "pythonic": CallSection(Pythonic(), open="<c>", close="</c>"),
    "braced": CallSection(Braced("<q>"), open="<c>", close="</c>"),
}
PARAMETERS = {"text": {"type": "string"}, "count": {"type": "integer"}}


class Reading:
    """A reader of one kind of call at work."""

    def __init__(self, kind: str, parameters: Any = PARAMETERS) -> None:
        section, self.buffer = SECTIONS[kind], TextBuffer()
        tool = Tool("f", parameters={"type": "object", "properties": parameters})
        self.writer = EventWriter(self.buffer, {"f": tool}, parallel=True)
        self.parser: Parser[None] = READERS[type(section.call)](self.buffer, section.call, section, self.writer)
        self.events: list[Event] = []

    @property
    def reported(self) -> list[tuple[str, str]]:
        self.writer.flush(self.events)
        calls: list[tuple[str, str]] = []
        for event in self.events:
            if isinstance(event, ToolCallStart):
                calls.append((event.name, ""))
            elif isinstance(event, ToolCallDelta):
                calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
        return calls

    def read(self, pieces: Sequence[str], cut_short: bool = False) -> "Reading":
        for piece in pieces:
            self.buffer.feed(piece)
            while (waiting := next(self.parser, "done")) != "done" and self.buffer.refill():
                pass
            if waiting == "done":
                return self
        self.buffer.end(cut_short)
        assert next(self.parser, "done") == "done"
        return self


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call as a model would write it."""
    if kind == "json":
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if kind == "named":
        return f"{name}[A]" + json.dumps(arguments)
    if kind == "pythonic":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if kind == "braced":
        return f"call:{name}" + _braced(arguments)
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return f"<f={name}>" + "".join(f"<p={key}>\n{value}\n</p>" for key, value in values.items()) + "</f>"


def _braced(value: Any) -> str:
    if isinstance(value, str):
        return f"<q>{value}<q>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braced(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_braced, value)) + "]"
    return json.dumps(value)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("kind", SECTIONS)
@settings(deadline=None)
@given(count=VALUES, text=TEXTS, cuts=cuttings())
def test_arguments_round_trip(kind: str, count: Any, text: str, cuts: list[int]) -> None:
    # Without quotes, only the schema distinguishes strings from numbers.
    if kind == "tagged" and isinstance(count, str):
        count = [count]
    arguments = {"text": text, "count": count}
    output = written(kind, "f", arguments)
    for pieces in ([output], list(output), cut(output, cuts)):
        # A reader does not consume text after the call.
        reading = Reading(kind).read([*pieces, "</c> "] if kind != "named" else [*pieces, "[C]"])
        assert [(name, json.loads(reported)) for name, reported in reading.reported] == [("f", arguments)]
        assert reading.writer.warnings == []
        assert reading.buffer.window in ("", "</c> ", "[C]")


STREAMED = [
    ("json", '{"name": "f", "arguments": ', '{"text": "', "}", "}"),
    ("named", "f[A]", '{"text": "', "}", ""),
    ("tagged", "<f=f><p=text>\n", "", "", "\n</p></f>"),
    ("braced", "call:f{text:<q>", "", "", "<q>}"),
]


@pytest.mark.parametrize(("kind", "head", "opening", "closing", "tail"), STREAMED)
def test_strings_are_streamed(kind: str, head: str, opening: str, closing: str, tail: str) -> None:
    reading = Reading(kind)
    reading.buffer.feed(head + opening)
    next(reading.parser)
    for i in range(1, 50):
        reading.buffer.feed("word ")
        next(reading.parser)
        reported = reading.reported[0][1]
        # A space may belong to the end of the string, but complete words are reported.
        assert reported.startswith('{"text": "word')
        assert reported.count("word") == i


def test_python_calls_are_reported_when_complete() -> None:
    reading = Reading("pythonic")
    reading.buffer.feed("[f(a=1), g(b=(2)), h(")
    next(reading.parser)
    assert reading.reported == [("f", '{"a":1}'), ("g", '{"b":2}')]
    reading.buffer.end()
    with pytest.raises(MalformedCall):
        next(reading.parser)
    assert len(reading.reported) == 2


REFUSED = [
    ("json", "{}"),
    ("json", "x"),
    ("json", '{"name": 1}'),
    ("json", '{"name": "f", "arguments": 5}'),
    ("json", '{"name": "f", "arguments": "x"}'),
    ("json", '{"name": "f" "x"'),
    ("json", '{"name": "\\ud800"}'),
    ("json", '{"arguments": {}}'),
    ("json", '{"function": {"function": {"name": "f"}}}'),
    ("named", "[A]{}"),
    ("named", "a b[A]{}"),
    ("named", "x" * 2000 + "[A]{}"),
    ("tagged", "<f=></f>"),
    ("tagged", "<f=a b></f>"),
    ("tagged", f"<f={'x' * 2000}></f>"),
    ("pythonic", "f"),
    ("pythonic", "f(x)"),
    ("pythonic", "f(**x)"),
    ("pythonic", "f(a=1"),
    ("pythonic", "f(a=g())"),
    ("pythonic", "f(a=1]"),
    ("pythonic", "f('x"),
    ("pythonic", "f(1, 2, 3)"),
    ("pythonic", "1f()"),
    ("pythonic", "x" * 300 + "()"),
    ("pythonic", f"f({'(' * 300}1{')' * 300})"),
    ("braced", "f{}"),
    ("braced", "call:{}"),
    ("braced", "call:a b{}"),
]


@pytest.mark.parametrize(("kind", "output"), REFUSED, ids=lambda value: value[:30])
@settings(deadline=None)
@given(cuts=cuttings())
def test_non_calls_are_malformed(kind: str, output: str, cuts: list[int]) -> None:
    for pieces in ([output], cut(output, cuts)):
        with pytest.raises(MalformedCall):
            Reading(kind).read(pieces)


BROKEN = [
    # kind, output, arguments if the model stopped there, and if it was cut short
    ("json", '{"name": "f", "arguments": {"a": [1, 2', '{"a": [1, 2]}', '{"a": [1, 2'),
    ("json", '{"name": "f", "arguments": {"a": "x', '{"a": "x', '{"a": "x'),
    ("json", '{"name": "f", "arguments": {"a": "x\\', '{"a": "x\\', '{"a": "x\\'),
    ("named", 'f[A]{"a": {', '{"a": {}}', '{"a": {'),
    ("braced", "call:f{a:<q>x", '{"a": "x', '{"a": "x'),
    ("braced", "call:f{a:[1,2", '{"a": [1, 2', '{"a": [1, 2'),
    ("braced", "call:f{a", "{a", "{a"),
]


@pytest.mark.parametrize(("kind", "output", "stopped", "cut_short"), BROKEN)
@settings(deadline=None)
@given(cuts=cuttings())
def test_incomplete_calls(kind: str, output: str, stopped: str, cut_short: str, cuts: list[int]) -> None:
    for pieces in ([output], cut(output, cuts)):
        reading = Reading(kind).read(pieces)
        assert (reading.reported, reading.buffer.window) == ([("f", stopped)], "")
        assert reading.writer.warnings
        reading = Reading(kind).read(pieces, cut_short=True)
        assert (reading.reported, reading.buffer.window) == ([("f", cut_short)], "")
        assert reading.writer.warnings == []


@pytest.mark.parametrize("kind", SECTIONS)
def test_detectors_reject_other_text(kind: str) -> None:
    section, buffer = SECTIONS[kind], TextBuffer()
    buffer.feed("(")
    buffer.end()
    with pytest.raises(StopIteration) as done:
        next(DETECTORS[type(section.call)](buffer, section.call, section))
    assert done.value.value is False
    assert buffer.window == "("


@pytest.mark.parametrize(
    ("schema", "number", "null"),
    [
        ({"type": "string"}, "5", "null"),
        ({"enum": ["a", "b"]}, "5", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", None),
        ({"type": ["string", "null"]}, "5", None),
        *(
            (schema, 5, None)
            for schema in (
                {"type": "integer"},
                {"type": "object"},
                {"enum": ["a", 1]},
                {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                {},
                None,
                True,
            )
        ),
    ],
)
def test_schema_decides_whether_a_tagged_parameter_is_text(schema: Any, number: Any, null: Any) -> None:
    for value, expected in (("5", number), ("null", null)):
        reading = Reading("tagged", {"x": schema}).read([f"<f=f><p=x>\n{value}\n</p></f></c>"])
        assert [json.loads(arguments) for _, arguments in reading.reported] == [{"x": expected}]

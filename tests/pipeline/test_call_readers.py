"""The call readers in isolation: what they report, when, and what they reject."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.formats.syntax import Braced, CallSection, JsonCall, NamedJson, Pythonic, Tagged
from dragoman.pipeline.call_readers import DETECTORS, READERS, MalformedCall
from dragoman.pipeline.call_readers.call_sink import parameter_kind
from dragoman.pipeline.text_buffer import TextBuffer
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


class RecordingSink:
    """Records what a reader reports, piece by piece."""

    def __init__(self) -> None:
        self.started = False
        self.strict = False
        self.calls: list[tuple[str, list[str]]] = []
        self.warnings: list[str] = []

    def start(self, name: str) -> None:
        self.started = True
        self.calls.append((name, []))

    def arguments(self, text: str) -> None:
        self.calls[-1][1].append(text)

    def end(self) -> None:
        self.started = False

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def parameters(self, name: str) -> Mapping[str, Any]:
        return PARAMETERS

    @property
    def reported(self) -> list[tuple[str, str]]:
        return [(name, "".join(pieces)) for name, pieces in self.calls]


def read(kind: str, pieces: Sequence[str], cut_short: bool = False) -> tuple[RecordingSink, str]:
    """Return the sink and the unread text."""
    section, buffer, sink = SECTIONS[kind], TextBuffer(), RecordingSink()
    reading = READERS[type(section.call)](buffer, section.call, section, sink)
    for piece in pieces:
        buffer.feed(piece)
        while (waiting := next(reading, "done")) != "done" and buffer.refill():
            pass
        if waiting == "done":
            return sink, buffer.window
    buffer.end(cut_short)
    assert next(reading, "done") == "done"
    return sink, buffer.window


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
        sink, left = read(kind, [*pieces, "</c> "] if kind != "named" else [*pieces, "[C]"])
        assert [(name, json.loads(reported)) for name, reported in sink.reported] == [("f", arguments)]
        assert sink.warnings == []
        assert left in ("", "</c> ", "[C]")


STREAMED = [
    ("json", '{"name": "f", "arguments": ', '{"text": "', "}", "}"),
    ("named", "f[A]", '{"text": "', "}", ""),
    ("tagged", "<f=f><p=text>\n", "", "", "\n</p></f>"),
    ("braced", "call:f{text:<q>", "", "", "<q>}"),
]


@pytest.mark.parametrize(("kind", "head", "opening", "closing", "tail"), STREAMED)
def test_strings_are_streamed(kind: str, head: str, opening: str, closing: str, tail: str) -> None:
    section, buffer, sink = SECTIONS[kind], TextBuffer(), RecordingSink()
    reading = READERS[type(section.call)](buffer, section.call, section, sink)
    buffer.feed(head + opening)
    next(reading)
    for i in range(1, 50):
        buffer.feed("word ")
        next(reading)
        reported = sink.reported[0][1]
        # A space may belong to the end of the string, but complete words are reported.
        assert reported.startswith('{"text": "word')
        assert reported.count("word") == i


def test_python_calls_are_reported_when_complete() -> None:
    section, buffer, sink = SECTIONS["pythonic"], TextBuffer(), RecordingSink()
    reading = READERS[Pythonic](buffer, section.call, section, sink)
    buffer.feed("[f(a=1), g(b=(2)), h(")
    next(reading)
    assert sink.reported == [("f", '{"a":1}'), ("g", '{"b":2}')]
    buffer.end()
    with pytest.raises(MalformedCall):
        next(reading)
    assert len(sink.reported) == 2


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
            read(kind, pieces)


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
        sink, left = read(kind, pieces)
        assert (sink.reported, left, len(sink.warnings)) == ([("f", stopped)], "", 1)
        sink, left = read(kind, pieces, cut_short=True)
        assert (sink.reported, left, sink.warnings) == ([("f", cut_short)], "", [])


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
    ("schema", "kind"),
    [
        ({"type": "string"}, "text"),
        ({"type": "integer"}, "json"),
        ({"type": "object"}, "json"),
        ({"enum": ["a", "b"]}, "text"),
        ({"enum": ["a", 1]}, "either"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "optional"),
        ({"type": ["string", "null"]}, "optional"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "json"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "either"),
        ({}, "either"),
        (None, "either"),
        (True, "either"),
    ],
)
def test_parameter_kind(schema: object, kind: str) -> None:
    assert parameter_kind(schema) == kind

"""The readers of calls by themselves: what they tell, how soon, and what they refuse."""

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
from tests.support.cuttings import cut, cuttings

TAGS = Tagged("<f={name}>", "<p={key}>\n", "\n</p>", "</f>")
SECTIONS = {
    "json": CallSection(JsonCall(), open="<c>", close="</c>"),
    "named": CallSection(NamedJson(("{name}[A]",)), open="[C]"),
    "tagged": CallSection(TAGS, open="<c>", close="</c>"),
    "pythonic": CallSection(Pythonic(), open="<c>", close="</c>"),
    "braced": CallSection(Braced("<q>"), open="<c>", close="</c>"),
}
PARAMETERS = {"text": {"type": "string"}, "count": {"type": "integer"}}


class Heard:
    """A sink that notes what it is told, each piece by itself."""

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

    def warn(self, words: str) -> None:
        self.warnings.append(words)

    def parameters(self, name: str) -> Mapping[str, Any]:
        return PARAMETERS

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(name, "".join(pieces)) for name, pieces in self.calls]


def read(kind: str, pieces: Sequence[str], cut_short: bool = False) -> tuple[Heard, str]:
    """What was told, and what was left of the text."""
    section, buffer, heard = SECTIONS[kind], TextBuffer(), Heard()
    reading = READERS[type(section.call)](buffer, section.call, section, heard)
    for piece in pieces:
        buffer.feed(piece)
        while (waiting := next(reading, "done")) != "done" and buffer.refill():
            pass
        if waiting == "done":
            return heard, buffer.window
    buffer.end(cut_short)
    assert next(reading, "done") == "done"
    return heard, buffer.window


def written(kind: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model would write it."""
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
def test_arguments_come_back_as_they_went(kind: str, count: Any, text: str, cuts: list[int]) -> None:
    # Where strings have no quotes, only the schema tells one from a number: these tools have one of each.
    if kind == "tagged" and isinstance(count, str):
        count = [count]
    arguments = {"text": text, "count": count}
    output = written(kind, "f", arguments)
    for pieces in ([output], list(output), cut(output, cuts)):
        # What follows a call is not the reader's.
        heard, left = read(kind, [*pieces, "</c> "] if kind != "named" else [*pieces, "[C]"])
        assert [(name, json.loads(told)) for name, told in heard.told] == [("f", arguments)]
        assert heard.warnings == []
        assert left in ("", "</c> ", "[C]")


STREAMED = [
    ("json", '{"name": "f", "arguments": ', '{"text": "', "}", "}"),
    ("named", "f[A]", '{"text": "', "}", ""),
    ("tagged", "<f=f><p=text>\n", "", "", "\n</p></f>"),
    ("braced", "call:f{text:<q>", "", "", "<q>}"),
]


@pytest.mark.parametrize(("kind", "head", "opening", "closing", "tail"), STREAMED)
def test_a_string_is_told_while_it_is_written(kind: str, head: str, opening: str, closing: str, tail: str) -> None:
    section, buffer, heard = SECTIONS[kind], TextBuffer(), Heard()
    reading = READERS[type(section.call)](buffer, section.call, section, heard)
    buffer.feed(head + opening)
    next(reading)
    for at in range(1, 50):
        buffer.feed("word ")
        next(reading)
        told = heard.told[0][1]
        # A space may belong to what ends the string; a word that is written is told.
        assert told.startswith('{"text": "word')
        assert told.count("word") == at


def test_python_is_told_when_a_call_is_whole() -> None:
    section, buffer, heard = SECTIONS["pythonic"], TextBuffer(), Heard()
    reading = READERS[Pythonic](buffer, section.call, section, heard)
    buffer.feed("[f(a=1), g(b=(2)), h(")
    next(reading)
    assert heard.told == [("f", '{"a":1}'), ("g", '{"b":2}')]
    buffer.end()
    with pytest.raises(MalformedCall):
        next(reading)
    assert len(heard.told) == 2


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
def test_what_is_no_call_is_refused(kind: str, output: str, cuts: list[int]) -> None:
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
def test_what_is_not_closed(kind: str, output: str, stopped: str, cut_short: str, cuts: list[int]) -> None:
    for pieces in ([output], cut(output, cuts)):
        heard, left = read(kind, pieces)
        assert (heard.told, left, len(heard.warnings)) == ([("f", stopped)], "", 1)
        heard, left = read(kind, pieces, cut_short=True)
        assert (heard.told, left, heard.warnings) == ([("f", cut_short)], "", [])


@pytest.mark.parametrize("kind", SECTIONS)
def test_what_cannot_begin_a_call(kind: str) -> None:
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
def test_how_a_value_is_written(schema: object, kind: str) -> None:
    assert parameter_kind(schema) == kind

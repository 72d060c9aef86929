"""The call readers: what they report, when, and what they reject."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.events import Started, TextDelta, ToolCallDelta
from dragoman.core.request import Text, Tool, ToolCall
from dragoman.formats import FORMATS
from dragoman.formats.syntax import ModelFormat
from dragoman.pipeline.split import SplitStage
from dragoman.prompt.plain_text_tools import format_calls
from tests.formats.replay import joined, play, run
from tests.support.text_splits import cut, cuttings

TOOL = Tool("f", parameters={"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}})
OPENERS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "qwen_xml": "<tool_call>",
    "pythonic": "<|python_start|>",
    "gemma": "<|tool_call>",
}
"""A format for each kind of call, with the text that opens a section."""

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("syntax", [syntax for syntax in FORMATS.values() if syntax.calls], ids=lambda form: form.name)
@settings(max_examples=25, deadline=None)
@given(count=VALUES, text=TEXTS, cuts=cuttings())
def test_arguments_round_trip(syntax: ModelFormat, count: Any, text: str, cuts: list[int]) -> None:
    # Without quotes, only the schema distinguishes strings from numbers.
    if isinstance(count, str):
        count = [count]
    arguments = {"text": text, "count": count}
    output = format_calls([ToolCall("", "f", json.dumps(arguments)), ToolCall("", "f", "{}")], syntax)
    for pieces in ([output], list(output), cut(output, cuts)):
        found = joined(play(syntax.name, pieces, tools=(TOOL,)))
        calls = [(part.name, json.loads(part.arguments)) for part in found.parts if isinstance(part, ToolCall)]
        assert calls == [("f", arguments), ("f", {})]
        assert len(found.parts) == 2
        assert found.warnings == ()


STREAMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "'),
    ("qwen_xml", "<tool_call><function=f><parameter=text>\n"),
    ("gemma", '<|tool_call>call:f{text:<|"|>'),
]


@pytest.mark.parametrize(("name", "head"), STREAMED)
def test_strings_are_streamed(name: str, head: str) -> None:
    stage = SplitStage(FORMATS[name], [TOOL])
    events = run([Started(), TextDelta(head)], stage)
    for i in range(1, 50):
        events += stage([TextDelta("word ")])
        reported = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
        # A space may belong to the end of the string, but complete words are reported.
        assert reported.startswith('{"text": "word')
        assert reported.count("word") == i


def test_python_calls_are_reported_when_complete() -> None:
    found = joined(play("pythonic", ["<|python_start|>[f(a=1), g(b=(2)), h("], tools=(TOOL,)))
    assert found.parts == (ToolCall("", "f", '{"a":1}'), ToolCall("", "g", '{"b":2}'), Text(", h("))


REFUSED = [
    ("hermes", "{}"),
    ("hermes", "x"),
    ("hermes", '{"name": 1}'),
    ("hermes", '{"name": "f", "arguments": 5}'),
    ("hermes", '{"name": "f", "arguments": "x"}'),
    ("hermes", '{"name": "f" "x"'),
    ("hermes", '{"name": "\\ud800"}'),
    ("hermes", '{"arguments": {}}'),
    ("hermes", '{"function": {"function": {"name": "f"}}}'),
    ("mistral", "[ARGS]{}"),
    ("mistral", "a b[ARGS]{}"),
    ("mistral", "x" * 2000 + "[ARGS]{}"),
    ("qwen_xml", "<function=></function>"),
    ("qwen_xml", "<function=a b></function>"),
    ("qwen_xml", f"<function={'x' * 2000}></function>"),
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
    ("gemma", "f{}"),
    ("gemma", "call:{}"),
    ("gemma", "call:a b{}"),
]


@pytest.mark.parametrize(("name", "output"), REFUSED, ids=lambda value: value[:30])
@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_unreadable_calls_are_text(name: str, output: str, cuts: list[int]) -> None:
    text = OPENERS[name] + output
    for pieces in ([text], cut(text, cuts)):
        found = joined(play(name, pieces, tools=(TOOL,)))
        assert found.parts == (Text(text),)
        assert len(found.warnings) == 1


INCOMPLETE = [
    # format, output, arguments if the model stopped there, and if it was cut short
    ("hermes", '{"name": "f", "arguments": {"a": [1, 2', '{"a": [1, 2]}', '{"a": [1, 2'),
    ("hermes", '{"name": "f", "arguments": {"a": "x', '{"a": "x', '{"a": "x'),
    ("hermes", '{"name": "f", "arguments": {"a": "x\\', '{"a": "x\\', '{"a": "x\\'),
    ("mistral", 'f[ARGS]{"a": {', '{"a": {}}', '{"a": {'),
    ("gemma", 'call:f{a:<|"|>x', '{"a": "x', '{"a": "x'),
    ("gemma", "call:f{a:[1,2", '{"a": [1, 2', '{"a": [1, 2'),
    ("gemma", "call:f{a", "{a", "{a"),
]


@pytest.mark.parametrize(("name", "output", "stopped", "cut_short"), INCOMPLETE)
@settings(max_examples=20, deadline=None)
@given(cuts=cuttings())
def test_incomplete_calls(name: str, output: str, stopped: str, cut_short: str, cuts: list[int]) -> None:
    text = OPENERS[name] + output
    for pieces in ([text], cut(text, cuts)):
        found = joined(play(name, pieces, tools=(TOOL,)))
        assert found.parts == (ToolCall("", "f", stopped),)
        assert found.warnings
        found = joined(play(name, pieces, tools=(TOOL,), reason="length"))
        assert found.parts == (ToolCall("", "f", cut_short),)
        assert found.warnings == ()


@pytest.mark.parametrize(
    ("schema", "number", "null"),
    [
        ({"type": "string"}, "5", "null"),
        ({"enum": ["a", "b"]}, "5", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", None),
        ({"type": ["string", "null"]}, "5", None),
        ({"type": "integer"}, 5, None),
        ({"type": "object"}, 5, None),
        ({"enum": ["a", 1]}, 5, None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5, None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 5, None),
        ({}, 5, None),
        (None, 5, None),
        (True, 5, None),
    ],
)
def test_schema_decides_whether_a_tagged_parameter_is_text(schema: Any, number: Any, null: Any) -> None:
    tool = Tool("f", parameters={"properties": {"x": schema}})
    for value, expected in (("5", number), ("null", null)):
        output = f"<tool_call><function=f><parameter=x>\n{value}\n</parameter></function></tool_call>"
        (call,) = joined(play("qwen_xml", [output], tools=(tool,))).parts
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"x": expected}

"""Random output in every format: the cutting does not matter, no text is lost, nothing raises."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.events import FinishReason
from dragoman.core.request import Reasoning, Text, ToolCall
from dragoman.formats import FORMATS
from dragoman.formats.syntax import ModelFormat
from tests.formats.cases import TOOLS
from tests.formats.replay import Joined, count_tokens, joined, play
from tests.support.text_splits import cut, cut_in_two, cuttings

AWKWARD = [
    *(" ", "\n", "\n\n", "a", "Hello ", "`", '"', "'", "{", "}", "[", "]", ",", ":", ";", "\\", "<", ">", "1", "true"),
    *("get_weather", "now", '{"name": "get_weather", "arguments": {"city": "P"}}', '{"name": "now", "parameters": {}}'),
    *('{"name": "now", "arguments": ', '{"city": "x"}', "{}", 'get_weather(city="x")', "[now()]", "call:now{}"),
    *("call:get_weather{city:", "x=1", "function", "```", "```json", "to=functions.now", "analysis", "thought"),
    *("assistant", "é😀", "é😀", "é😀"),
]
FIELDS = {"{name}": "get_weather", "{key}": "city", "{index}": "0", "{string}": "true", "{id}": "abc"}


def words(syntax: ModelFormat) -> list[str]:
    """Markers of the format and other text."""
    own = []
    for text in syntax.texts:
        filled = text
        for field, value in FIELDS.items():
            filled = filled.replace(field, value)
        own += [text, filled]
    return [word for word in (*own, *sorted(syntax.markers) * 2, *AWKWARD) if word]


WORDS = {name: words(syntax) for name, syntax in FORMATS.items()}


def check(name: str, text: str, *cuttings: list[str], tools: bool = True, **options: Any) -> Joined:
    """Return the reply, which is the same for every cutting."""
    found = []
    for pieces in ([text], list(text), *cuttings):
        events = play(name, pieces, tools=TOOLS if tools else (), **options)
        found.append(joined(events))
        ends_early = options.get("parallel") is False and any(isinstance(p, ToolCall) for p in found[-1].parts)
        assert ends_early or count_tokens(events) == len(pieces)
        assert found[-1] == found[0], pieces
    return found[0]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=cuttings(), thinking=st.booleans(), tools=st.booleans(), parallel=st.booleans())
def test_random_output(
    name: str, data: st.DataObject, cuts: list[int], thinking: bool, tools: bool, parallel: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(WORDS[name]), min_size=1, max_size=14)))
    reason: FinishReason = data.draw(st.sampled_from(["stop", "length"]))
    whole = check(name, text, cut(text, cuts), thinking=thinking, tools=tools, parallel=parallel, reason=reason)
    has_calls = any(isinstance(part, ToolCall) for part in whole.parts)
    assert tools or not has_calls
    # Harmony headers are not part of the text.
    if name != "harmony" and (parallel or not has_calls):
        assert repr(whole.parts).count("😀") == text.count("😀")
    if name == "plain":
        assert whole.parts == (Text(text),)


SPACE = [" ", "\n", "\n\n", "\t", "    ", "\r\n", " \n", "a", "x ", "json\n", "python", "'", '"']
LONG = [" " * 255, " " * 256, " " * 257, "\n" * 258, "a" * 255, "b" * 300]
"""Lengths around the limit up to which the reader keeps white space and text."""
FENCES = [tick * length for tick in "`~" for length in range(1, 9)]


def neighbours(syntax: ModelFormat) -> st.SearchStrategy[str]:
    """Runs of backticks and tildes, markers, prefixes of markers, and white space, next to each other."""
    markers = sorted({*syntax.markers, *filter(None, syntax.texts)}) or ["<think>"]
    beginnings = [marker[:end] for marker in markers for end in range(1, len(marker))]
    words = st.sampled_from
    mixed = words(FENCES) | words(markers) | words(beginnings) | words(SPACE) | words(LONG) | words(WORDS[syntax.name])
    return st.lists(mixed, min_size=1, max_size=8).map("".join)


NEIGHBOURS = {name: neighbours(syntax) for name, syntax in FORMATS.items()}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), cuts=cuttings(), thinking=st.booleans(), tools=st.booleans(), shaped=st.booleans())
def test_fences_next_to_markers(
    name: str, data: st.DataObject, cuts: list[int], thinking: bool, tools: bool, shaped: bool
) -> None:
    text = data.draw(NEIGHBOURS[name])
    check(name, text, cut(text, cuts), *cut_in_two(text), thinking=thinking, tools=tools, shaped=shaped)


FENCED = [
    "``````<think>a</think>b",
    "`````` <think>a</think>b",
    "a\n```\n<think>a</think>\n```\nb",
    "```````\n<think>a</think>",
    "````\n```\n<think>a</think>",
    "````\n```\n````\n<think>a</think>b",
    "``<think>a</think>`<think>b</think>",
]


@pytest.mark.parametrize("text", FENCED)
@pytest.mark.parametrize("name", ["hermes", "phi", "json", "mistral_array"])
def test_reasoning_after_backticks(name: str, text: str) -> None:
    check(name, text, *cut_in_two(text))


def test_longer_fence_is_not_closed_by_a_shorter_one() -> None:
    for text in ("``````<think>a</think>b", "````\n```\n<think>a</think>"):
        assert joined(play("hermes", [text])).parts == (Text(text),)
    closed = joined(play("hermes", ["````\n```\n````\n<think>a</think>b"]))
    assert closed.parts == (Text("````\n```\n````"), Reasoning("a"), Text("b"))

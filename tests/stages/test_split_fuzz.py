"""Whatever a model prints, in every format: no cutting matters, nothing is lost, nothing raises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.conversation import Text, ToolCall
from dragoman.events import FinishReason
from dragoman.formats import FORMATS
from dragoman.stages.syntax import ModelFormat
from tests.cuttings import cut, cuttings
from tests.formats.cases import TOOLS
from tests.formats.playing import Joined, counted, joined, play

AWKWARD = [
    *(" ", "\n", "\n\n", "a", "Hello ", "`", '"', "'", "{", "}", "[", "]", ",", ":", ";", "\\", "<", ">", "1", "true"),
    *("get_weather", "now", '{"name": "get_weather", "arguments": {"city": "P"}}', '{"name": "now", "parameters": {}}'),
    *('{"name": "now", "arguments": ', '{"city": "x"}', "{}", 'get_weather(city="x")', "[now()]", "call:now{}"),
    *("call:get_weather{city:", "x=1", "function", "```", "```json", "to=functions.now", "analysis", "thought"),
    *("assistant", "é😀", "é😀", "é😀"),
]
FIELDS = {"{name}": "get_weather", "{key}": "city", "{index}": "0", "{string}": "true", "{id}": "abc"}


def words(syntax: ModelFormat) -> list[str]:
    """What the format is made of, and what may come between."""
    own = []
    for text in syntax._texts():
        filled = text
        for field, value in FIELDS.items():
            filled = filled.replace(field, value)
        own += [text, filled]
    return [word for word in (*own, *sorted(syntax.markers) * 2, *AWKWARD) if word]


WORDS = {name: words(syntax) for name, syntax in FORMATS.items()}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=cuttings(), thinking=st.booleans(), tools=st.booleans(), parallel=st.booleans())
def test_whatever_is_printed(
    name: str, data: st.DataObject, cuts: list[int], thinking: bool, tools: bool, parallel: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(WORDS[name]), min_size=1, max_size=14)))
    reason: FinishReason = data.draw(st.sampled_from(["stop", "length"]))

    def events_of(pieces: list[str]) -> Joined:
        events = play(name, pieces, tools=TOOLS if tools else (), thinking=thinking, reason=reason, parallel=parallel)
        found = joined(events)
        ended_early = not parallel and any(isinstance(part, ToolCall) for part in found.parts)
        if not ended_early:
            assert counted(events) == len(pieces)
            # A header of harmony is about the text and not part of it.
            assert name == "harmony" or repr(found.parts).count("😀") == text.count("😀")
        return found

    whole = events_of([text])
    assert events_of(list(text)) == whole
    assert events_of(cut(text, cuts)) == whole
    if name == "plain":
        assert whole.parts == (Text(text),)
    if not tools:
        assert not any(isinstance(part, ToolCall) for part in whole.parts)

"""Output of every model family, cut in every way."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings

from dragoman.core.events import Event
from dragoman.core.request import Reasoning, Text, ToolCall
from dragoman.formats import FORMATS
from tests.formats.cases import OUTPUTS, RECORDED, SCENARIOS, SPECIAL, Case
from tests.formats.replay import Joined, collected, count_tokens, joined, play, with_parsed_arguments, without_ids
from tests.support.text_splits import cut, cuttings

CASES = [*RECORDED, *SPECIAL]


def events_of(case: Case, pieces: Sequence[str]) -> list[Event]:
    return play(case.format, pieces, tools=case.tools, thinking=case.said.thinking, reason=case.said.reason)


def check(case: Case, found: Joined) -> None:
    said = case.said
    if said.exact:
        assert found.parts == said.parts
    else:
        assert with_parsed_arguments(found.parts) == with_parsed_arguments(said.parts)
    assert bool(found.warnings) == said.warns
    called = any(isinstance(part, ToolCall) for part in said.parts)
    assert found.reason == ("tool_calls" if called and said.reason == "stop" else said.reason)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.name}")
@settings(max_examples=15, deadline=None)
@given(cuts=cuttings())
def test_recorded_output_in_every_cutting(case: Case, cuts: list[int]) -> None:
    whole = joined(events_of(case, [case.output]))
    check(case, whole)
    for pieces in (list(case.output), cut(case.output, cuts)):
        events = events_of(case, pieces)
        assert joined(events) == whole
        assert count_tokens(events) == len(pieces)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.name}")
def test_collected_reply_equals_the_stream(case: Case) -> None:
    events = events_of(case, list(case.output))
    choice, found = collected(events), joined(events)
    assert without_ids(choice.parts) == found.parts
    assert choice.reason == found.reason
    ids = [part.id for part in choice.parts if isinstance(part, ToolCall)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_covers_all_scenarios(name: str) -> None:
    """Only formats without reasoning or calls lack some scenarios."""
    syntax = FORMATS[name]
    thoughts = {"thought, text, call", "opener in the prompt", "call that ends a thought"}
    expected = set(SCENARIOS)
    if not syntax.thoughts and syntax.channels is None:
        expected -= thoughts
    if name == "plain":
        expected = {"look-alikes"}
    assert set(OUTPUTS[name]) == expected


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case.format}: {case.name}")
def test_without_tools_output_is_all_text(case: Case) -> None:
    events = play(case.format, list(case.output), tools=(), thinking=case.said.thinking, reason=case.said.reason)
    found = joined(events)
    assert not any(isinstance(part, ToolCall) for part in found.parts)
    assert found.reason == case.said.reason
    assert not found.warnings
    for part in case.said.parts:
        if isinstance(part, Text | Reasoning):
            assert any(part.text in other.text for other in found.parts if isinstance(other, Text | Reasoning))
    if "escapes" in case.name:
        assert any("mkdir {a,b" in other.text for other in found.parts if isinstance(other, Text))

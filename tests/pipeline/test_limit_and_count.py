"""The stages that limit and count tokens."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, Usage
from dragoman.pipeline import Stage
from dragoman.pipeline.count import CountStage, LimitStage


def feed(stage: Stage, events: Sequence[Event], sizes: Sequence[int]) -> list[Event]:
    """Pass the events through the stage in lists of these sizes."""
    out: list[Event] = []
    rest = list(events)
    for size in sizes:
        out += stage(rest[:size])
        rest = rest[size:]
    return [*out, *stage(rest)] if rest else out


SIZES = st.lists(st.integers(min_value=1, max_value=4), max_size=8)


@given(sizes=SIZES)
def test_limit_ends_after_the_last_token(sizes: list[int]) -> None:
    events: list[Event] = [Started(1), TextDelta("a"), TextDelta("", count=0), ReasoningDelta("b"), TextDelta("c")]
    out = feed(LimitStage(2), events, sizes)
    end = out.index(Finished("length"))
    assert out[:end] == events[:4]


def test_limit_leaves_a_short_reply_alone() -> None:
    events: list[Event] = [TextDelta("a"), Finished("stop")]
    assert LimitStage(2)(events) == events


def test_limit_of_zero() -> None:
    assert LimitStage(0)([Started(), TextDelta("a")]) == [Started(), Finished("length")]


@given(sizes=SIZES)
def test_count_uses_token_counts_of_deltas(sizes: list[int]) -> None:
    calls: list[Event] = [ReasoningDelta("x", count=2), ToolCallDelta("{", count=1)]
    events: list[Event] = [Started(5, 2), TextDelta("abc", count=3), *calls, Finished("stop", "END")]
    last = Finished("stop", "END", Usage(prompt=5, completion=6, cached=2, reasoning=2))
    assert feed(CountStage(), events, sizes) == [*events[:-1], last]


def test_count_prefers_the_engines_usage() -> None:
    events: list[Event] = [TextDelta("a"), Finished(usage=Usage(prompt=9, completion=4))]
    assert CountStage()(events) == events

"""The small stages: limit, tally, blocks."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dragoman.events import (
    BlockEnd,
    BlockStart,
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.stages import Stage
from dragoman.stages.blocks import Blocks
from dragoman.stages.limit import Limit
from dragoman.stages.tally import Tally


def feed(stage: Stage, events: Sequence[Event], sizes: Sequence[int]) -> list[Event]:
    """All events through the stage, in lists of these sizes."""
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
    out = feed(Limit(2), events, sizes)
    end = out.index(Finished("length"))
    assert out[:end] == events[:4]


def test_limit_leaves_a_short_reply_alone() -> None:
    events: list[Event] = [TextDelta("a"), Finished("stop")]
    assert Limit(2)(events) == events


def test_limit_of_nothing_lets_no_token_through() -> None:
    assert Limit(0)([Started(), TextDelta("a")]) == [Started(), Finished("length")]


@given(sizes=SIZES)
def test_tally_counts_tokens_not_pieces(sizes: list[int]) -> None:
    tally = Tally()
    events: list[Event] = [
        Started(5, 2),
        TextDelta("abc", count=3),
        ReasoningDelta("x", count=2),
        ToolCallDelta("{", count=1),
    ]
    assert feed(tally, events, sizes) == events
    assert tally.usage == Usage(prompt=5, completion=6, cached=2, reasoning=2)


def test_tally_believes_the_engine() -> None:
    tally, told = Tally(), Usage(prompt=9, completion=4)
    tally([TextDelta("a"), Finished(usage=told)])
    assert tally.usage == told


@given(sizes=SIZES)
def test_blocks_follow_one_another(sizes: list[int]) -> None:
    events: list[Event] = [
        Started(),
        ReasoningDelta("hm"),
        TextDelta("a"),
        TextDelta(""),
        TextDelta("b"),
        ToolCallStart("1", "f"),
        ToolCallDelta("{}"),
        ToolCallStart("2", "g"),
        Finished(),
    ]
    assert feed(Blocks(), events, sizes) == [
        Started(),
        BlockStart(0, "reasoning"),
        ReasoningDelta("hm"),
        BlockEnd(0, "reasoning"),
        BlockStart(1, "text"),
        TextDelta("a"),
        TextDelta(""),
        TextDelta("b"),
        BlockEnd(1, "text"),
        BlockStart(2, "tool_call"),
        ToolCallStart("1", "f"),
        ToolCallDelta("{}"),
        BlockEnd(2, "tool_call"),
        BlockStart(3, "tool_call"),
        ToolCallStart("2", "g"),
        BlockEnd(3, "tool_call"),
        Finished(),
    ]


def test_a_delta_without_text_opens_no_block() -> None:
    assert Blocks()([TextDelta(""), Finished()]) == [TextDelta(""), Finished()]

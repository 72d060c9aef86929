"""Stop strings: the same outcome for every cutting of the text."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, TokenLogprob, ToolCallStart, Usage
from dragoman.pipeline.stop import StopMatcher, StopStage
from tests.support.cuttings import cut, cuttings

CASES = [
    # text, stops, visible, matched
    ("hello world", ("wor",), "hello ", "wor"),
    ("hello world", ("x",), "hello world", None),
    ("abc", ("abc", "b"), "a", "b"),  # b completes first
    ("xabc", ("abc", "c"), "x", "abc"),  # both complete at c: the longest
    ("xabc", ("c", "bc"), "xa", "bc"),
    ("aaab", ("aab",), "a", "aab"),  # the beginning of a stop inside a stop
    ("ababac", ("abac",), "ab", "abac"),
    ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
    ("END", ("END",), "", "END"),
    ("EN", ("END",), "EN", None),  # held back until the end, then let go
    ("a😀b😀", ("😀b",), "a", "😀b"),
    ("he said STOP. STOP", ("STOP",), "he said ", "STOP"),
    ("]]^-", ("]^", "^-"), "]", "]^"),  # characters that mean something in a pattern
    ("", ("x",), "", None),
]


def play(pieces: Sequence[str], stops: Sequence[str]) -> list[Event]:
    stage = StopStage(stops)
    out: list[Event] = []
    for piece in pieces:
        out += stage([TextDelta(piece)])
        if out and isinstance(out[-1], Finished):
            return out
    return [*out, *stage([Finished()])]


def outcome(events: Sequence[Event]) -> tuple[str, str | None]:
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.stop


@pytest.mark.parametrize(("text", "stops", "visible", "matched"), CASES)
@given(cuts=cuttings())
def test_every_cutting_gives_the_same(
    text: str, stops: tuple[str, ...], visible: str, matched: str | None, cuts: list[int]
) -> None:
    assert outcome(play([text], stops)) == (visible, matched)
    assert outcome(play(list(text), stops)) == (visible, matched)
    assert outcome(play(cut(text, cuts), stops)) == (visible, matched)


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule itself, as plainly as it can be said: earliest end, then longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


@given(
    text=st.text(alphabet="abc", max_size=60),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=cuttings(),
)
def test_agrees_with_the_plain_rule(text: str, stops: list[str], cuts: list[int]) -> None:
    assert outcome(play(cut(text, cuts), stops)) == reference(text, stops)


@given(
    text=st.text(alphabet="abx", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    stage, seen = StopStage(stops), ""
    for at, char in enumerate(text, start=1):
        out = stage([TextDelta(char)])
        seen += "".join(event.text for event in out if isinstance(event, TextDelta))
        if out and isinstance(out[-1], Finished):
            return
        held = text[len(seen) : at]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_is_inert_in_reasoning_and_a_thought_breaks_a_stop() -> None:
    stage = StopStage(["END"])
    out = [*stage([ReasoningDelta("END"), TextDelta("E"), ReasoningDelta("N"), TextDelta("ND")]), *stage([Finished()])]
    assert out == [ReasoningDelta("END"), TextDelta("E"), ReasoningDelta("N"), TextDelta("ND"), Finished()]


def test_other_events_keep_their_place() -> None:
    stage = StopStage(["END"])
    out = stage([Started(3), TextDelta("E"), ToolCallStart("call_1", "f")])
    assert out == [Started(3), TextDelta("E"), ToolCallStart("call_1", "f")]


def test_what_comes_with_the_end_of_the_engine_counts_as_if_it_came_later() -> None:
    told = Finished(usage=Usage(prompt=3, completion=9))
    stopped = StopStage(["END"])([TextDelta("an "), TextDelta("END"), TextDelta(" and more"), told])
    assert stopped == [TextDelta("an "), TextDelta("", 1), Finished("stop", stop="END")]
    uncounted = StopStage(["END"])([TextDelta("an END and more", 0), told])
    assert uncounted == [TextDelta("an ", 0), Finished("stop", stop="END", usage=told.usage)]


def test_tokens_go_with_the_text_they_begin_in() -> None:
    def delta(text: str, token: int) -> TextDelta:
        return TextDelta(text, tokens=(token,), logprobs=(TokenLogprob(token, text.encode(), -1.0),))

    stage = StopStage(["STOP"])
    out = stage([delta("a", 1), delta("bST", 2), delta("OP", 3)])
    tokens = [token for event in out if isinstance(event, TextDelta) for token in event.tokens]
    assert outcome(out) == ("ab", "STOP")
    assert tokens == [1, 2]  # the token that is cut away whole is not told, but it counts
    assert sum(event.count for event in out if isinstance(event, TextDelta)) == 3


def test_a_token_without_text_passes() -> None:
    stage = StopStage(["STOP"])
    assert stage([TextDelta("", tokens=(7,))]) == [TextDelta("", tokens=(7,))]


class Counted(list[int]):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, at: int) -> int:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("text", ["a" * 20_000, ("a" * 50 + "c") * 400, "ab" * 10_000])
def test_every_character_is_looked_at_once(text: str) -> None:
    matcher = StopMatcher(["a" * 50 + "b", "ab" * 20 + "c"])
    matcher._fallback = fallback = Counted(matcher._fallback)
    for at in range(0, len(text), 4):
        assert matcher.feed(text[at : at + 4]) is None
    # Each step back gives up a character that an earlier step had taken: there cannot be more of them than characters.
    assert fallback.reads <= len(text)


def test_what_is_held_back_is_not_read_again() -> None:
    stage, text = StopStage(["a" * 50 + "b"]), ("a" * 40 + "c") * 100
    fed, feed = [], stage._matcher.feed

    def noted(piece: str) -> tuple[int, str] | None:
        fed.append(piece)
        return feed(piece)

    stage._matcher.feed = noted  # type: ignore[method-assign,assignment]
    for at in range(0, len(text), 3):
        stage([TextDelta(text[at : at + 3])])
    assert "".join(fed) == text

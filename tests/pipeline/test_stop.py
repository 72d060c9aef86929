"""Stop strings: the result does not depend on how the text is cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, TokenLogprob, ToolCallStart, Usage
from dragoman.pipeline.stop import StopStage
from tests.formats.replay import run
from tests.support.text_splits import cut, cuttings

CASES = [
    # text, stops, visible, matched
    ("hello world", ("wor",), "hello ", "wor"),
    ("hello world", ("x",), "hello world", None),
    ("abc", ("abc", "b"), "a", "b"),  # b completes first
    ("xabc", ("abc", "c"), "x", "abc"),  # both complete at c: the longest wins
    ("xabc", ("c", "bc"), "xa", "bc"),
    ("aaab", ("aab",), "a", "aab"),  # a stop string that begins inside another match
    ("ababac", ("abac",), "ab", "abac"),
    ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
    ("END", ("END",), "", "END"),
    ("EN", ("END",), "EN", None),  # held back until the end, then released
    ("a😀b😀", ("😀b",), "a", "😀b"),
    ("he said STOP. STOP", ("STOP",), "he said ", "STOP"),
    ("]]^-", ("]^", "^-"), "]", "]^"),  # special characters of patterns
    ("", ("x",), "", None),
]


def play(pieces: Sequence[str], stops: Sequence[str]) -> list[Event]:
    return run([*map(TextDelta, pieces), Finished()], StopStage(stops))


def outcome(events: Sequence[Event]) -> tuple[str, str | None]:
    last = events[-1]
    assert isinstance(last, Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.stop


@pytest.mark.parametrize(("text", "stops", "visible", "matched"), CASES)
@given(cuts=cuttings())
def test_result_is_independent_of_cutting(
    text: str, stops: tuple[str, ...], visible: str, matched: str | None, cuts: list[int]
) -> None:
    assert outcome(play([text], stops)) == (visible, matched)
    assert outcome(play(list(text), stops)) == (visible, matched)
    assert outcome(play(cut(text, cuts), stops)) == (visible, matched)


def reference(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The naive implementation of the rule: earliest end, then longest."""
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
def test_matches_the_naive_implementation(text: str, stops: list[str], cuts: list[int]) -> None:
    assert outcome(play(cut(text, cuts), stops)) == reference(text, stops)


@given(
    text=st.text(alphabet="abx", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_holds_back_only_possible_stops(text: str, stops: list[str]) -> None:
    stage, seen = StopStage(stops), ""
    for at, char in enumerate(text, start=1):
        out = stage([TextDelta(char)])
        seen += "".join(event.text for event in out if isinstance(event, TextDelta))
        if out and isinstance(out[-1], Finished):
            return
        held = text[len(seen) : at]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_reasoning_is_not_searched_and_ends_a_partial_match() -> None:
    stage = StopStage(["END"])
    out = [*stage([ReasoningDelta("END"), TextDelta("E"), ReasoningDelta("N"), TextDelta("ND")]), *stage([Finished()])]
    assert out == [ReasoningDelta("END"), TextDelta("E"), ReasoningDelta("N"), TextDelta("ND"), Finished()]


def test_other_events_keep_their_order() -> None:
    stage = StopStage(["END"])
    out = stage([Started(3), TextDelta("E"), ToolCallStart("call_1", "f")])
    assert out == [Started(3), TextDelta("E"), ToolCallStart("call_1", "f")]


def test_events_after_the_stop_do_not_count() -> None:
    last = Finished(usage=Usage(prompt=3, completion=9))
    stopped = StopStage(["END"])([TextDelta("an "), TextDelta("END"), TextDelta(" and more"), last])
    assert stopped == [TextDelta("an "), TextDelta("", 1), Finished("stop", stop="END")]
    uncounted = StopStage(["END"])([TextDelta("an END and more", 0), last])
    assert uncounted == [TextDelta("an ", 0), Finished("stop", stop="END", usage=last.usage)]


def test_tokens_are_counted_with_their_text() -> None:
    def delta(text: str, token: int) -> TextDelta:
        return TextDelta(text, tokens=(token,), logprobs=(TokenLogprob(token, text.encode(), -1.0),))

    stage = StopStage(["STOP"])
    out = stage([delta("a", 1), delta("bST", 2), delta("OP", 3)])
    tokens = [token for event in out if isinstance(event, TextDelta) for token in event.tokens]
    assert outcome(out) == ("ab", "STOP")
    assert tokens == [1, 2, 3]  # the removed token counts too
    assert sum(event.count for event in out if isinstance(event, TextDelta)) == 3


def test_token_without_text_passes() -> None:
    stage = StopStage(["STOP"])
    assert stage([TextDelta("", tokens=(7,))]) == [TextDelta("", tokens=(7,))]


class Nodes(list[dict[str, int]]):
    """Nodes of an automaton that count how often they are visited."""

    visits = 0

    def __getitem__(self, at: int) -> dict[str, int]:  # type: ignore[override]
        self.visits += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("text", ["a" * 20_000, ("a" * 50 + "c") * 400, "ab" * 10_000, ("a" * 40 + "c") * 500])
def test_each_character_is_processed_once(text: str) -> None:
    stage = StopStage(["a" * 50 + "b", "ab" * 20 + "c"])
    stage._matcher._next = nodes = Nodes(stage._matcher._next)
    assert outcome(run([*map(TextDelta, cut(text, [*range(0, len(text), 4)])), Finished()], stage)) == (text, None)
    # Two per character, and one for each fallback, which gives up a character that an earlier step consumed.
    assert nodes.visits <= 3 * len(text)

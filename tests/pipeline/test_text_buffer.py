"""The text that arrives in pieces: what is asked of it gets the same answer for every cutting."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.pipeline.text_buffer import MOST_GAP, REMEMBERED, Found, Gap, Markers, Reading, Source
from tests.support.cuttings import cut, cuttings

T = TypeVar("T")


def read(reading: Callable[[Source], Reading[T]], pieces: Sequence[str]) -> tuple[T, Source]:
    """What the reading returns, and the source as it leaves it, once all the pieces are there."""
    source = Source()
    running, answer = reading(source), None
    for piece in (*pieces, None):
        if piece is None:
            source.end()
        else:
            source.feed(piece)
        if answer is None:
            try:
                next(running)
            except StopIteration as done:
                answer = (done.value,)
    assert answer is not None
    return answer[0], source


def until(markers: Markers, pieces: Sequence[str]) -> tuple[str, Found, str]:
    kept: list[str] = []
    found, source = read(lambda source: source.until(markers, kept.append), pieces)
    return "".join(kept), found, source.window


CASES: list[tuple[str, Gap, str, Found, str]] = [
    ("hello", "space", "hello", Found(""), ""),
    ("a <x> b", "space", "a", Found("<x>", " "), " b"),
    ("a <x> b", "none", "a ", Found("<x>"), " b"),
    ("a\n\n<x>", "line", "a\n", Found("<x>", "\n"), ""),
    ("a \n <x>", "line", "a \n ", Found("<x>"), ""),
    ("a<x<xy><x>", "space", "a<x", Found("<xy>"), "<x>"),
    ("a <x", "space", "a <x", Found(""), ""),
    ("a  ", "space", "a  ", Found(""), ""),
    ("<x>", "space", "", Found("<x>"), ""),
    ("a" + " " * (MOST_GAP + 5) + "<x>", "space", "a" + " " * 5, Found("<x>", " " * MOST_GAP), ""),
]


@pytest.mark.parametrize(("text", "gap", "before", "found", "after"), CASES)
@settings(deadline=None)
@given(cuts=cuttings())
def test_until(text: str, gap: Gap, before: str, found: Found, after: str, cuts: list[int]) -> None:
    markers = Markers(["<x>", "<xy>"], gap)
    for pieces in ([text], list(text), cut(text, cuts)):
        assert until(markers, pieces) == (before, found, after)


@settings(deadline=None)
@given(text=st.text(alphabet="<xy> \n", max_size=40), cuts=cuttings(), gap=st.sampled_from(["space", "line", "none"]))
def test_until_loses_nothing(text: str, cuts: list[int], gap: Gap) -> None:
    markers = Markers(["<x>", "<yy>", "x<"], gap)
    before, found, after = until(markers, cut(text, cuts))
    assert before + found.text + after == text
    assert not markers.search(before)
    assert until(markers, [text]) == (before, found, after)


@settings(deadline=None)
@given(text=st.text(alphabet="<xy>a", max_size=40))
def test_no_more_is_held_back_than_may_be_a_marker(text: str) -> None:
    markers = Markers(["<x>", "<yy>"], "none")
    source, seen = Source(), list[str]()
    running = source.until(markers, seen.append)
    for at, char in enumerate(text, start=1):
        source.feed(char)
        try:
            next(running)
        except StopIteration:
            return
        held = text[len("".join(seen)) : at]
        assert held == source.window
        assert not held or any(marker.startswith(held) for marker in markers.all)


BEGINNINGS = [("abc", ("ab", "abc"), "abc"), ("abd", ("ab", "abc"), "ab"), ("ab", ("abc",), ""), ("", ("a",), "")]


@pytest.mark.parametrize(("text", "texts", "expected"), BEGINNINGS)
@settings(deadline=None)
@given(cuts=cuttings())
def test_begins_waits_for_the_longest(text: str, texts: tuple[str, ...], expected: str, cuts: list[int]) -> None:
    found, source = read(lambda source: source.begins(texts), cut(text, cuts))
    assert (found, source.window) == (expected, text)


@settings(deadline=None)
@given(cuts=cuttings())
def test_literal_takes_all_or_nothing(cuts: list[int]) -> None:
    for text, taken in (("<abc>", True), ("<abd>", False), ("<ab", False)):
        found, source = read(lambda source: source.literal("<abc>"), cut(text, cuts))
        assert found is taken
        assert source.window == ("" if taken else text)


@settings(deadline=None)
@given(cuts=cuttings())
def test_space_and_next_and_has(cuts: list[int]) -> None:
    _, source = read(lambda source: source.space(), cut(" \n\t a ", cuts))
    assert source.window == "a "
    assert read(lambda source: source.next(), cut("ab", cuts))[0] == "a"
    assert read(lambda source: source.next(), [])[0] == ""
    assert read(lambda source: source.has(2), cut("ab", cuts))[0]
    assert not read(lambda source: source.has(3), cut("ab", cuts))[0]


def test_what_is_put_back_is_taken_again() -> None:
    source = Source()
    source.feed("abcdef")
    assert source.take(4) == "abcd"
    source.record()
    assert source.take(2) == "ef"
    source.put_back("f")
    assert (source.position, source.recent, source.window) == (5, "abcde", "f")
    assert source.recorded() == "e"
    assert source.take(1) == "f"
    assert source.recorded() == ""


def test_what_was_taken_is_remembered_for_a_while() -> None:
    source = Source()
    source.feed("x" * REMEMBERED)
    source.take(REMEMBERED)
    source.passed("yz")
    assert source.position == REMEMBERED + 2
    assert source.recent == "x" * (REMEMBERED - 2) + "yz"


def test_much_text_at_once_is_handed_out_in_pieces() -> None:
    source, text = Source(), "".join(map(str, range(2000)))
    source.feed(text)
    source.end(cut=True)
    assert len(source.window) < len(text)
    assert (source.ended, source.cut) == (False, False)
    taken = ""
    while not source.ended:
        taken += source.take(len(source.window))
        source.refill()
    assert taken + source.window == text
    assert source.cut
    source.put_back(taken)
    assert (source.ended, source.window) == (False, text[: len(source.window)])


def test_no_markers_are_never_found() -> None:
    markers = Markers([])
    assert until(markers, ["a", "b"]) == ("ab", Found(""), "")
    assert markers.first.search("ab") is None

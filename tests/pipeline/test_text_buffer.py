"""The text buffer: parsers return the same result however the text is cut."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.pipeline.text_buffer import MAX_GAP, Gap, MarkerMatch, Markers, TextBuffer
from tests.support.text_splits import cut, cuttings

T = TypeVar("T")


def until(markers: Markers, pieces: Sequence[str]) -> tuple[str, MarkerMatch, str]:
    """Return the text before the marker, the marker, and the text after it."""
    buffer, before = TextBuffer(), list[str]()
    reading = buffer.read_until(markers, before.append)
    match: MarkerMatch | None = None
    for piece in (*pieces, None):
        if piece is None:
            buffer.end()
        else:
            buffer.feed(piece)
        if match is None:
            try:
                next(reading)
            except StopIteration as done:
                match = done.value
    assert match is not None
    return "".join(before), match, buffer.window


CASES: list[tuple[str, Gap, str, MarkerMatch, str]] = [
    ("hello", "space", "hello", MarkerMatch(""), ""),
    ("a <x> b", "space", "a", MarkerMatch("<x>", " "), " b"),
    ("a <x> b", "none", "a ", MarkerMatch("<x>"), " b"),
    ("a\n\n<x>", "line", "a\n", MarkerMatch("<x>", "\n"), ""),
    ("a \n <x>", "line", "a \n ", MarkerMatch("<x>"), ""),
    ("a<x<xy><x>", "space", "a<x", MarkerMatch("<xy>"), "<x>"),
    ("a <x", "space", "a <x", MarkerMatch(""), ""),
    ("a  ", "space", "a  ", MarkerMatch(""), ""),
    ("<x>", "space", "", MarkerMatch("<x>"), ""),
    ("a" + " " * (MAX_GAP + 5) + "<x>", "space", "a" + " " * 5, MarkerMatch("<x>", " " * MAX_GAP), ""),
]


@pytest.mark.parametrize(("text", "gap", "before", "match", "after"), CASES)
@settings(deadline=None)
@given(cuts=cuttings())
def test_read_until(text: str, gap: Gap, before: str, match: MarkerMatch, after: str, cuts: list[int]) -> None:
    markers = Markers("<x>", "<xy>", gap=gap)
    for pieces in ([text], list(text), cut(text, cuts)):
        assert until(markers, pieces) == (before, match, after)


@settings(deadline=None)
@given(text=st.text(alphabet="<xy> \n", max_size=40), cuts=cuttings(), gap=st.sampled_from(["space", "line", "none"]))
def test_read_until_preserves_text(text: str, cuts: list[int], gap: Gap) -> None:
    markers = Markers("<x>", "<yy>", "x<", gap=gap)
    before, match, after = until(markers, cut(text, cuts))
    assert before + match.text + after == text
    assert not markers.pattern.search(before)
    assert until(markers, [text]) == (before, match, after)


@settings(deadline=None)
@given(text=st.text(alphabet="<xy>a", max_size=40))
def test_only_possible_markers_are_held_back(text: str) -> None:
    markers = Markers("<x>", "<yy>", gap="none")
    buffer, seen = TextBuffer(), list[str]()
    running = buffer.read_until(markers, seen.append)
    for at, char in enumerate(text, start=1):
        buffer.feed(char)
        try:
            next(running)
        except StopIteration:
            return
        held = text[len("".join(seen)) : at]
        assert held == buffer.window
        assert not held or any(marker.startswith(held) for marker in markers.all)


def test_large_input_is_windowed() -> None:
    buffer, text = TextBuffer(), "".join(map(str, range(2000)))
    buffer.feed(text)
    buffer.end(cut=True)
    assert len(buffer.window) < len(text)
    assert (buffer.ended, buffer.cut) == (False, False)
    taken = ""
    while not buffer.ended:
        taken += buffer.take(len(buffer.window))
        buffer.refill()
    assert taken + buffer.window == text
    assert buffer.cut
    buffer.push_back(taken)
    assert (buffer.ended, buffer.window) == (False, text[: len(buffer.window)])

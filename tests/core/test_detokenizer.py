"""Text is the same for every cutting of its bytes into tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.detokenizer import Detokenizer
from tests.support.cuttings import cut_bytes, cuttings

CASES = ["", "plain", "é", "日本語", "a😀b", "👩‍👩‍👧 e\u0301", "\ufeff\x00\u202e", "�"]


def pieces(parts: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.feed(part) for part in parts), detokenizer.flush()]


@pytest.mark.parametrize("text", CASES)
@given(cuts=cuttings())
def test_every_cutting_gives_the_same(text: str, cuts: list[int]) -> None:
    data = text.encode()
    for parts in ([data], [bytes([byte]) for byte in data], cut_bytes(data, cuts)):
        assert "".join(pieces(parts)) == text


@given(text=st.text(), cuts=cuttings())
def test_characters_come_whole_and_at_once(text: str, cuts: list[int]) -> None:
    """After each token exactly those characters are out whose last byte has come."""
    detokenizer, seen, read = Detokenizer(), "", b""
    for part in cut_bytes(text.encode(), cuts):
        read += part
        seen += detokenizer.feed(part)
        assert seen == read.decode("utf-8", "ignore")
    assert detokenizer.flush() == ""


@given(data=st.binary(max_size=60), cuts=cuttings())
def test_bytes_that_are_no_text_are_the_same_too(data: bytes, cuts: list[int]) -> None:
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces(cut_bytes(data, cuts))) == whole
    assert "".join(pieces([bytes([byte]) for byte in data])) == whole


def test_an_unfinished_character_is_let_go_at_the_end() -> None:
    assert pieces(["😀".encode()[:3]]) == ["", "�"]

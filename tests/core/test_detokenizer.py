"""The text does not depend on how its bytes are split into tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.events import Detokenizer
from tests.support.text_splits import cut_bytes, cuttings

CASES = ["", "plain", "é", "日本語", "a😀b", "👩‍👩‍👧 e\u0301", "\ufeff\x00\u202e", "�"]


def pieces(parts: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [*(detokenizer.feed(part) for part in parts), detokenizer.flush()]


@pytest.mark.parametrize("text", CASES)
@given(cuts=cuttings())
def test_text_split_at_any_byte(text: str, cuts: list[int]) -> None:
    data = text.encode()
    for parts in ([data], [bytes([byte]) for byte in data], cut_bytes(data, cuts)):
        assert "".join(pieces(parts)) == text


@given(text=st.text(), cuts=cuttings())
def test_characters_are_complete_and_immediate(text: str, cuts: list[int]) -> None:
    """After each token, exactly the characters whose last byte has arrived are returned."""
    detokenizer, seen, read = Detokenizer(), "", b""
    for part in cut_bytes(text.encode(), cuts):
        read += part
        seen += detokenizer.feed(part)
        assert seen == read.decode("utf-8", "ignore")
    assert detokenizer.flush() == ""


@given(data=st.binary(max_size=60), cuts=cuttings())
def test_invalid_bytes_split_at_any_byte(data: bytes, cuts: list[int]) -> None:
    whole = data.decode("utf-8", "replace")
    assert "".join(pieces(cut_bytes(data, cuts))) == whole
    assert "".join(pieces([bytes([byte]) for byte in data])) == whole


def test_incomplete_character_at_the_end() -> None:
    assert pieces(["😀".encode()[:3]]) == ["", "�"]

"""Ways to cut a text into pieces: whole, character by character, in two, at random."""

import itertools

from hypothesis import strategies as st


def cut(text: str, places: list[int]) -> list[str]:
    """The text cut at these places, taken modulo its length; pieces may be empty."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def cut_in_two(text: str) -> list[list[str]]:
    """Every cut into two pieces."""
    return [[text[:place], text[place:]] for place in range(1, len(text))]


def cut_bytes(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def cuttings() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(min_value=0, max_value=10_000), max_size=20)

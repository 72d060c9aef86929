"""Normalization, truncation and encoding of embeddings."""

import math
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dragoman.core.embeddings import Embedding

NUMBERS = st.floats(-1e3, 1e3, width=32)
VECTORS = st.lists(NUMBERS, min_size=1, max_size=40)


@given(VECTORS)
def test_vector_is_normalized_little_endian_float32(values: list[float]) -> None:
    assume(math.hypot(*values) > 1e-6)
    made = Embedding.of(values, tokens=3)
    numbers = struct.unpack(f"<{len(values)}f", made.vector)
    assert made.values == list(numbers)
    assert (made.dimensions, made.tokens) == (len(values), 3)
    assert math.hypot(*numbers) == pytest.approx(1, abs=1e-6)
    length = math.hypot(*values)
    assert numbers == pytest.approx([value / length for value in values], abs=1e-6)


@given(VECTORS, st.data())
def test_cut_vector_is_normalized(values: list[float], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values)))
    assume(math.hypot(*values[:size]) > 1e-3 * math.hypot(*values) > 1e-6)
    whole = Embedding.of(values, tokens=3)
    part = whole.cut(size)
    assert (part.dimensions, part.tokens) == (size, 3)
    assert part.values == pytest.approx(Embedding.of(values[:size]).values, abs=1e-3)
    assert math.hypot(*part.values) == pytest.approx(1, abs=1e-6)
    assert whole.cut(whole.dimensions) == whole


@given(VECTORS.flatmap(lambda one: st.tuples(st.just(one), st.lists(NUMBERS, min_size=len(one), max_size=len(one)))))
def test_likeness_is_the_cosine(pair: tuple[list[float], list[float]]) -> None:
    one, other = (Embedding.of(values) for values in pair)
    assume(any(one.values) and any(other.values))
    cosine = np.dot(*pair) / (math.hypot(*pair[0]) * math.hypot(*pair[1]))
    assert one.cosine_similarity(other) == other.cosine_similarity(one) == pytest.approx(cosine, abs=1e-5)
    assert one.cosine_similarity(one) == pytest.approx(1, abs=1e-6)


def test_zero_vector_stays_zero() -> None:
    assert Embedding.of([0, 0, 0]).values == [0, 0, 0]
    assert Embedding.of([0, 0, 1]).cut(2).values == [0, 0]


def test_any_iterable_of_numbers() -> None:
    assert Embedding.of(np.array([3.0, 4.0])) == Embedding.of([3, 4]) == Embedding.of(iter((0.6, 0.8)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e39])
def test_nan_and_infinity_are_rejected(wrong: float) -> None:
    with pytest.raises(ValueError, match="embedding contains NaN or infinity"):
        Embedding.of([1.0, wrong])

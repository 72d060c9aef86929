"""Texts as vectors: what is asked, and what an engine makes of it.

Rules
1. A vector has length 1, so that its product with another tells how alike the two texts are: 1 is the same, 0 nothing.
   Only where there is nothing to tell, all of it is 0.
2. Everywhere but in JSON a vector is the bytes of its numbers as little-endian floats of 32 bits.
"""

import math
import sys
from array import array
from collections.abc import Iterable
from typing import Self

import msgspec

from dragoman.conversation import Asked

MAX_INPUTS = 2048

Input = str | tuple[int, ...]
"""A text, or its token ids."""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """`dimensions` is how many numbers of each vector are wanted; `base64` how they are to be written."""

    inputs: tuple[Input, ...]
    model: str = ""
    dimensions: int | None = None
    base64: bool = False
    asked: tuple[Asked, ...] = ()


class RerankRequest(msgspec.Struct, frozen=True):
    query: str
    documents: tuple[str, ...]
    model: str = ""
    top: int | None = None
    return_documents: bool = False
    asked: tuple[Asked, ...] = ()

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.query, *self.documents)


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """What an engine makes of one input, and how many tokens that had."""

    vector: bytes
    tokens: int = 0

    @classmethod
    def of(cls, values: Iterable[float], tokens: int = 0) -> Self:
        """From plain numbers, of any length."""
        numbers = array("f", values)
        length = math.hypot(*numbers)
        if not math.isfinite(length):
            raise ValueError("a vector has a number that is none")
        if length:
            numbers = array("f", [number / length for number in numbers])
        return cls(_swapped(numbers).tobytes(), tokens)

    @property
    def dimensions(self) -> int:
        return len(self.vector) // 4

    @property
    def values(self) -> list[float]:
        return _swapped(array("f", self.vector)).tolist()

    def cut(self, dimensions: int) -> "Embedding":
        """Its first numbers, again of length 1."""
        return self if dimensions == self.dimensions else Embedding.of(self.values[:dimensions], self.tokens)

    def likeness(self, other: "Embedding") -> float:
        return sum(map(float.__mul__, self.values, other.values))


def _swapped(numbers: "array[float]") -> "array[float]":
    """To or from little-endian; the array is ours to change."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

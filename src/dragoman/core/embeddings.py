"""Texts as vectors: what is asked, and what an engine makes of it.

Rules
1. A vector has length 1, so that its product with another tells how alike the two texts are: 1 is the same, 0 nothing.
   Only where there is nothing to tell, all of it is 0.
2. Everywhere but in JSON a vector is the bytes of its numbers as little-endian floats of 32 bits.
"""

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked

MAX_INPUTS = 2048
T = TypeVar("T")

Input = str | tuple[int, ...]
"""A text, or its token ids."""


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """`dimensions` is how many numbers of each vector are wanted; `base64` how they are to be written;
    `listed` whether a list was sent, and not one input as it is."""

    inputs: tuple[Input, ...]
    model: str = ""
    dimensions: int | None = None
    base64: bool = False
    listed: bool = False
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


def each(inputs: Sequence[Input], read: Callable[[Input], T]) -> list[T]:
    """What an engine makes of each input; where it refuses one, the error tells which, as `input[3]`."""
    made = []
    for at, entry in enumerate(inputs):
        try:
            made.append(read(entry))
        except BadRequest as error:
            error.param = f"input[{at}]"
            raise
    return made


def _swapped(numbers: "array[float]") -> "array[float]":
    """To or from little-endian; the array is ours to change."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

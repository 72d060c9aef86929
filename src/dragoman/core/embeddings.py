"""Requests for embeddings and reranking, and the embeddings that engines return.

Rules
1. A vector has length 1, so that the dot product of two vectors is their cosine similarity. A zero vector stays zero.
2. Except in JSON, a vector is stored as little-endian 32-bit floats.
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
    """`dimensions` is the requested length of the vectors, `base64` their encoding. `listed`: the input was a list."""

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
    """The vector of one input, and the number of its tokens."""

    vector: bytes
    tokens: int = 0

    @classmethod
    def of(cls, values: Iterable[float], tokens: int = 0) -> Self:
        """Build an embedding from a vector of any length. The vector is normalized."""
        numbers = array("f", values)
        length = math.hypot(*numbers)
        if not math.isfinite(length):
            raise ValueError("embedding contains NaN or infinity")
        if length:
            numbers = array("f", [number / length for number in numbers])
        return cls(_to_little_endian(numbers).tobytes(), tokens)

    @property
    def dimensions(self) -> int:
        return len(self.vector) // 4

    @property
    def values(self) -> list[float]:
        return _to_little_endian(array("f", self.vector)).tolist()

    def cut(self, dimensions: int) -> "Embedding":
        """Return the first `dimensions` numbers, normalized again."""
        return self if dimensions == self.dimensions else Embedding.of(self.values[:dimensions], self.tokens)

    def cosine_similarity(self, other: "Embedding") -> float:
        return sum(map(float.__mul__, self.values, other.values))


def map_inputs(inputs: Sequence[Input], read: Callable[[Input], T]) -> list[T]:
    """Apply `read` to each input. A BadRequest gets the parameter of its input, such as `input[3]`."""
    results = []
    for at, entry in enumerate(inputs):
        try:
            results.append(read(entry))
        except BadRequest as error:
            error.param = f"input[{at}]"
            raise
    return results


def _to_little_endian(numbers: "array[float]") -> "array[float]":
    """Swap the bytes on a big-endian machine, in place. The inverse is the same operation."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers

"""What a GGUF file says of itself at its beginning, without loading it.

file   := "GGUF" version:u32 tensors:u64 pairs:u64 pair* tensor* padding data
pair   := key:text kind:u32 value
text   := length:u64 bytes
value  := a number of its kind | text | array
array  := kind:u32 length:u64 value*                 not kept: vocabularies are all that needs them
tensor := name:text dimensions:u32 size:u64* kind:u32 offset:u64          the innermost size first
"""

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from dragoman.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9

BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""The kinds of tensors that are met most: their names, and how many weights are in how many bytes."""
MOST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
PART = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<of>\d{5})")
"""The name of one of several files that are one model."""

Value = str | int | float | bool
T = TypeVar("T")


class Tensor(msgspec.Struct, frozen=True):
    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int
    """From the beginning of the data."""

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Zero where the kind is not known."""
        _, weights, size = BLOCKS.get(self.kind, ("", 1, 0))
        return self.elements // weights * size


class Outline(msgspec.Struct, frozen=True):
    """Where everything is in a file."""

    metadata: Mapping[str, Value]
    places: Mapping[str, int]
    """Where the values of the metadata begin."""
    tensors: tuple[Tensor, ...]
    pairs_end: int
    data_start: int
    alignment: int


def read_metadata(path: Path) -> dict[str, Value]:
    return _read(path, _Reader.pairs)


def read_outline(path: Path) -> Outline:
    return _read(path, _Reader.outline)


def _read(path: Path, what: "Callable[[_Reader], T]") -> T:
    try:
        with path.open("rb") as file:
            return what(_Reader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a GGUF file: {error}") from error


def parts_of(path: Path) -> list[Path]:
    """All files of the model whose first file this is."""
    part = PART.fullmatch(path.stem)
    if part is None:
        return [path]
    of = int(part["of"])
    return [path.with_name(f"{part['stem']}-{at:05}-of-{of:05}{path.suffix}") for at in range(1, of + 1)]


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.tensors = 0
        self.places: dict[str, int] = {}

    def outline(self) -> Outline:
        metadata = self.pairs()
        pairs_end = self.file.tell()
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError(f"its alignment is {alignment}")
        tensors = tuple([self._tensor() for _ in range(self.tensors)])
        data_start = -(-self.file.tell() // alignment) * alignment
        if any(data_start + tensor.offset + tensor.bytes > self.size for tensor in tensors):
            raise ValueError("it is cut off")
        return Outline(metadata, self.places, tensors, pairs_end, data_start, alignment)

    def _tensor(self) -> Tensor:
        name = self._text()
        dimensions = int(self._number("<I"))
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        sizes = tuple([int(self._number("<Q")) for _ in range(dimensions)])
        return Tensor(name, sizes, int(self._number("<I")), int(self._number("<Q")))

    def pairs(self) -> dict[str, Value]:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is unknown")
        self.tensors = int(self._number("<Q"))
        found: dict[str, Value] = {}
        for _ in range(int(self._number("<Q"))):
            key = self._text()
            kind = int(self._number("<I"))
            place = self.file.tell()
            value = self._value(kind)
            if value is not None:
                found[key] = value
                self.places[key] = place
        return found

    def _value(self, kind: int) -> Value | None:
        """A value that is kept; None for an array, which is left behind."""
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._number(_form(kind))
        inner, length = int(self._number("<I")), int(self._number("<Q"))
        if inner == TEXT:
            for _ in range(length):
                self._skip(int(self._number("<Q")))
        else:
            self._skip(length * struct.calcsize(_form(inner)))
        return None

    def _text(self) -> str:
        return self._bytes(int(self._number("<Q"))).decode("utf-8", "replace")

    def _number(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _bytes(self, length: int) -> bytes:
        self._check(length)
        return self.file.read(length)

    def _skip(self, length: int) -> None:
        self._check(length)
        self.file.seek(length, os.SEEK_CUR)

    def _check(self, length: int) -> None:
        if length > self.size - self.file.tell():
            raise ValueError("it is cut off")


def _form(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a value has the unknown kind {kind}")
    return NUMBERS[kind]

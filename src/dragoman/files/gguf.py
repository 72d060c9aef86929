"""Reads the header of a GGUF file without loading the model.

file   := "GGUF" version:u32 tensors:u64 pairs:u64 pair* tensor* padding data
pair   := key:text kind:u32 value
text   := length:u64 bytes
value  := a number of its kind | text | array
array  := kind:u32 length:u64 value*                 skipped: only vocabularies are arrays
tensor := name:text dimensions:u32 size:u64* kind:u32 offset:u64          the innermost size first

Rules
1. A file is read only if it is a regular file. Anything else (a pipe, a device) is refused without waiting for it.
2. Every count and length is checked against the file's size and the limits below before anything is read. So the time
   and memory for a header are bounded, whatever the file contains.
3. If only some keys are requested, reading stops when they have been found.
"""

import math
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from dragoman.core.errors import ConfigError, truncate

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9

TENSOR_KINDS = {
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
"""The common kinds of tensors: name, weights per block, bytes per block."""
MAX_DIMENSIONS = 4
MAX_PAIRS = 10_000
MAX_TENSORS = 100_000
MAX_ARRAY_TEXTS = 2_000_000
"""In all arrays together. The largest vocabularies and their merges have 800,000."""
MAX_KEY_BYTES = 65_535

MAX_TEXT_BYTES = 1 << 20
MAX_HEADER_BYTES = 64 << 20
BUFFER_BYTES = 64 * 1024
_LENGTH = struct.Struct("<Q")
DEFAULT_ALIGNMENT = 32
PART = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<of>\d{5})")
"""The name of one file of a split model."""

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
        """Zero if the kind is unknown."""
        _, weights, size = TENSOR_KINDS.get(self.kind, ("", 1, 0))
        return self.elements // weights * size


class Outline(msgspec.Struct, frozen=True):
    """The header of a file, with the positions of its parts."""

    metadata: Mapping[str, Value]
    places: Mapping[str, int]
    """Offsets of the metadata values."""
    tensors: tuple[Tensor, ...]
    pairs_end: int
    data_start: int
    alignment: int


def read_metadata(path: Path, keys: Collection[str] | None = None) -> dict[str, Value]:
    """Read all pairs except arrays. With `keys`, reading stops when all of them have been found."""
    return _read(path, lambda reader: reader.pairs(keys))


def check_model(path: Path) -> None:
    """Raise a ConfigError if the file, or another one of its split model, is not a valid GGUF file."""
    for part in list_parts(path):
        read_outline(part)


def check_gguf(path: Path, name: str) -> None:
    """Raise a ConfigError if the file, called `name` in the message, is not a valid GGUF file."""
    try:
        read_outline(path)
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path} is not a GGUF file: ")
        raise ConfigError(f"{name} is not a valid GGUF file: {reason}") from error


def read_outline(path: Path) -> Outline:
    return _read(path, _HeaderReader.outline)


def _read(path: Path, action: "Callable[[_HeaderReader], T]") -> T:
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=BUFFER_BYTES) as file:
            return action(_HeaderReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a GGUF file: {error}") from error


def list_parts(path: Path) -> list[Path]:
    """Return all files of the model whose first file this is."""
    part = PART.fullmatch(path.stem)
    if part is None:
        return [path]
    of = int(part["of"])
    return [path.with_name(f"{part['stem']}-{at:05}-of-{of:05}{path.suffix}") for at in range(1, of + 1)]


class _HeaderReader:
    def __init__(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        self.file = file
        self.size = status.st_size
        self.at = 0
        self.tensors = 0
        self.array_texts = 0
        self.places: dict[str, int] = {}

    def outline(self) -> Outline:
        metadata = self.pairs()
        pairs_end = self.at
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment.bit_count() != 1:
            raise ValueError(f"its alignment is {str(alignment)[:100]}")
        tensors = tuple([self._tensor() for _ in range(self.tensors)])
        data_start = -(-self.at // alignment) * alignment
        needed = max((data_start + tensor.offset + tensor.bytes for tensor in tensors), default=0)
        if needed > self.size:
            raise ValueError(f"it is cut off: it has {self.size} bytes, and its tensors need {needed}")
        return Outline(metadata, self.places, tensors, pairs_end, data_start, alignment)

    def _tensor(self) -> Tensor:
        name = self._text(MAX_KEY_BYTES)
        dimensions = int(self._number("<I"))
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {truncate(name)} has {dimensions} dimensions")
        sizes = tuple([int(self._number("<Q")) for _ in range(dimensions)])
        return Tensor(name, sizes, int(self._number("<I")), int(self._number("<Q")))

    def pairs(self, keys: Collection[str] | None = None) -> dict[str, Value]:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is unknown")
        self.tensors = self._count("tensors", MAX_TENSORS)
        found: dict[str, Value] = {}
        for _ in range(self._count("pairs of metadata", MAX_PAIRS)):
            key = self._text(MAX_KEY_BYTES)
            kind = int(self._number("<I"))
            position = self.at
            value = self._value(kind)
            if value is not None:
                found[key] = value
                self.places[key] = position
            if keys is not None and all(name in found for name in keys):
                break
        return found

    def _value(self, kind: int) -> Value | None:
        """Read a number or a text. Skip an array and return None."""
        if kind == TEXT:
            return self._text(MAX_TEXT_BYTES)
        if kind != ARRAY:
            return self._number(_struct_format(kind))
        inner, length = int(self._number("<I")), int(self._number("<Q"))
        if inner == TEXT:
            self._skip_texts(length)
        else:
            self._skip(length * struct.calcsize(_struct_format(inner)))
        return None

    def _skip_texts(self, count: int) -> None:
        self.array_texts += count
        if self.array_texts > MAX_ARRAY_TEXTS:
            raise ValueError(f"its arrays have more than {MAX_ARRAY_TEXTS} texts")
        for _ in range(count):
            (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size))
            self._skip(length)

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("<Q"))
        if count > most:
            raise ValueError(f"it has {count} {what}, more than {most}")
        return count

    def _text(self, longest: int) -> str:
        length = int(self._number("<Q"))
        if length > longest:
            raise ValueError(f"it has a text of {length} bytes, more than {longest}")
        return self._bytes(length).decode("utf-8", "replace")

    def _number(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _bytes(self, length: int) -> bytes:
        self._advance(length)
        found = self.file.read(length)
        if len(found) < length:
            # The file was truncated after its size was read.
            raise self._cut_off()
        return found

    def _skip(self, length: int) -> None:
        self._advance(length)
        self.file.seek(self.at)

    def _cut_off(self) -> ValueError:
        return ValueError(f"it is cut off: it has {self.size} bytes, and its header needs {self.at} or more")

    def _advance(self, length: int) -> None:
        self.at += length
        if self.at > self.size:
            raise self._cut_off()
        if self.at > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")


def _struct_format(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a value has the unknown kind {kind}")
    return NUMBERS[kind]

"""What a GGUF file says of itself at its beginning, without loading it.

file  := "GGUF" version:u32 tensors:u64 pairs:u64 pair*
pair  := key:text kind:u32 value
text  := length:u64 bytes
value := a number of its kind | text | array
array := kind:u32 length:u64 value*                 not kept: vocabularies are all that needs them
"""

import os
import re
import struct
from pathlib import Path
from typing import BinaryIO

from dragoman.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, ARRAY = 8, 9

PART = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<of>\d{5})")
"""The name of one of several files that are one model."""

Value = str | int | float | bool


def read_metadata(path: Path) -> dict[str, Value]:
    try:
        with path.open("rb") as file:
            return _Reader(file).pairs()
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
    return [path.with_name(f"{part['stem']}-{at:05}-of-{of:05}.gguf") for at in range(1, of + 1)]


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def pairs(self) -> dict[str, Value]:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is unknown")
        self._number("<Q")
        found: dict[str, Value] = {}
        for _ in range(int(self._number("<Q"))):
            key = self._text()
            value = self._value(int(self._number("<I")))
            if value is not None:
                found[key] = value
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

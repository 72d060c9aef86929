"""A GGUF file anew, with some of its kinds of weights as Q8_0 and everything else as it is.

    Q8_0 := (scale:f16 weight:i8[32])*          8.5 bits per weight, computed where it lies in the file

The metadata is copied byte for byte, but for the one number that says what most of the weights are. The same file
gives the same bytes.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dragoman.files.gguf import Outline, Tensor, read_outline

WEIGHTS_AT_ONCE = 1 << 22
"""Their floats are all that is in memory: 16 MB."""
Q8_0 = GGMLQuantizationType.Q8_0

Bytes = NDArray[np.uint8]
Progress = Callable[[float], object]


class _Output:
    """A file, and the hash of what is in it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size += len(data)

    def pad(self, alignment: int) -> None:
        self.write(bytes(-self.size % alignment))


def requantise(source: Path, target: Path, slow: Collection[int], progress: Progress) -> str:
    """Write the file with the `slow` kinds of tensors as Q8_0, and give its sha256. `progress` is told which part of
    the work is done."""
    outline = read_outline(source)
    data: Bytes = np.memmap(source, dtype=np.uint8, mode="r")
    weights, done = sum(tensor.elements for tensor in outline.tensors), 0
    with target.open("xb") as file:
        output = _Output(file)
        output.write(_head(data, outline, slow))
        for tensor in outline.tensors:
            output.pad(outline.alignment)
            for part, count in _parts(tensor, data[outline.data_start + tensor.offset :], slow):
                output.write(part.reshape(-1).data)
                done += count
                progress(done / weights)
        output.pad(outline.alignment)
        file.flush()
        os.fsync(file.fileno())
    return output.digest.hexdigest()


def _head(data: Bytes, outline: Outline, slow: Collection[int]) -> bytes:
    """Everything before the weights."""
    head = bytearray(data[: outline.pairs_end].tobytes())
    if place := outline.places.get("general.file_type"):
        struct.pack_into("<I", head, place, LlamaFileType.MOSTLY_Q8_0)
    offset = 0
    for tensor in outline.tensors:
        kind = Q8_0 if tensor.kind in slow else GGMLQuantizationType(tensor.kind)
        name, sizes = tensor.name.encode(), tensor.sizes
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        offset += -(-_bytes(tensor.elements, kind) // outline.alignment) * outline.alignment
    return bytes(head)


def _parts(tensor: Tensor, data: Bytes, slow: Collection[int]) -> Iterator[tuple[Bytes, int]]:
    """A tensor's new bytes by some rows at a time, and how many weights are in them."""
    kind = GGMLQuantizationType(tensor.kind)
    width = tensor.sizes[0]
    rows = data[: _bytes(tensor.elements, kind)].reshape(-1, _bytes(width, kind))
    step = max(WEIGHTS_AT_ONCE // width, 1)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        count = len(part) * width
        yield np.ascontiguousarray(quantize(dequantize(part, kind), Q8_0) if tensor.kind in slow else part), count


def _bytes(weights: int, kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    return weights // block * size

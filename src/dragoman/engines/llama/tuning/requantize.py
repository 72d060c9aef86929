"""Copies a GGUF file and converts tensors of certain types to Q8_0.

    Q8_0 := (scale:f16 weight:i8[32])*          8.5 bits per weight

Metadata is copied byte for byte, except for `general.file_type`. The output is deterministic.
"""

import os
import struct
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dragoman.files.gguf import Outline, Tensor, read_outline

WEIGHTS_AT_ONCE = 1 << 22
"""16 MB as floats."""
Q8_0 = GGMLQuantizationType.Q8_0

Bytes = NDArray[np.uint8]
ReportProgress = Callable[[float], object]


def requantize(source: Path, target: Path, slow: Collection[int], progress: ReportProgress) -> None:
    """Write the file with tensors of the `slow` types as Q8_0. `progress` is called with the completed fraction."""
    outline = read_outline(source)
    data: Bytes = np.memmap(source, dtype=np.uint8, mode="r")
    weights, done = sum(tensor.elements for tensor in outline.tensors), 0
    with target.open("xb") as file:
        file.write(_head(data, outline, slow))
        for tensor in outline.tensors:
            file.write(bytes(-file.tell() % outline.alignment))
            for part, count in _parts(tensor, data[outline.data_start + tensor.offset :], slow):
                file.write(part.reshape(-1).data)
                done += count
                progress(done / weights)
        file.write(bytes(-file.tell() % outline.alignment))
        file.flush()
        os.fsync(file.fileno())


def _head(data: Bytes, outline: Outline, slow: Collection[int]) -> bytes:
    """Return the bytes before the tensor data."""
    head = bytearray(data[: outline.pairs_end].tobytes())
    if position := outline.places.get("general.file_type"):
        struct.pack_into("<I", head, position, LlamaFileType.MOSTLY_Q8_0)
    offset = 0
    for tensor in outline.tensors:
        kind = Q8_0 if tensor.kind in slow else GGMLQuantizationType(tensor.kind)
        name, sizes = tensor.name.encode(), tensor.sizes
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        offset += -(-_bytes(tensor.elements, kind) // outline.alignment) * outline.alignment
    return bytes(head)


def _parts(tensor: Tensor, data: Bytes, slow: Collection[int]) -> Iterator[tuple[Bytes, int]]:
    """Yield a tensor's new bytes, some rows at a time, with the number of weights in them."""
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

"""A small model of a slow layout: the first layers of the real one."""

import struct
from pathlib import Path

import numpy as np

from dragoman.gguf import Outline, Tensor, read_outline

LAYERS = 4


def cut(original: Path, target: Path, layers: int = LAYERS, missing: str = "") -> Path:
    """The model with its first layers only, and without the tensor that is `missing`."""
    outline = read_outline(original)
    data = np.memmap(original, dtype=np.uint8, mode="r")
    kept = [tensor for tensor in outline.tensors if _layer(tensor) < layers and tensor.name != missing]
    head = bytearray(data[: outline.pairs_end].tobytes())
    struct.pack_into("<Q", head, 8, len(kept))
    struct.pack_into("<I", head, outline.places["llama.block_count"], layers)
    offset = 0
    for tensor in kept:
        name = tensor.name.encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.sizes))
        head += struct.pack(f"<{len(tensor.sizes)}QIQ", *tensor.sizes, tensor.kind, offset)
        offset += _padded(tensor.bytes, outline)
    head += bytes(-len(head) % outline.alignment)
    with target.open("wb") as file:
        file.write(head)
        for tensor in kept:
            start = outline.data_start + tensor.offset
            file.write(data[start : start + tensor.bytes].tobytes().ljust(_padded(tensor.bytes, outline), b"\0"))
    return target


def _layer(tensor: Tensor) -> int:
    return int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else -1


def _padded(size: int, outline: Outline) -> int:
    return -(-size // outline.alignment) * outline.alignment

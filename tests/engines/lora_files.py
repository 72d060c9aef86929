"""Writes random LoRA adapters for SmolLM2."""

import struct
from pathlib import Path

import numpy as np

from tests.support.gguf_files import header, pair, tensor, text

WIDTH = 576
"""Embedding width of SmolLM2-135M."""
RANK = 4
STRING, FLOAT = 8, 6
ALIGNMENT = 32


def write_adapter(path: Path, *, architecture: str = "llama", seed: int = 1, width: int = WIDTH) -> Path:
    """Write an adapter for the attention of four layers, strong enough to change replies."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer in (5, 10, 15, 20):
        name = f"blk.{layer}.attn_output.weight"
        tensors[f"{name}.lora_a"] = rng.normal(size=(RANK, width)).astype(np.float32)
        tensors[f"{name}.lora_b"] = rng.normal(size=(width, RANK)).astype(np.float32)
    pairs = [
        pair("general.type", STRING, text("adapter")),
        pair("general.architecture", STRING, text(architecture)),
        pair("adapter.type", STRING, text("lora")),
        pair("adapter.lora.alpha", FLOAT, struct.pack("<f", 0.2 * RANK)),
    ]
    infos, data = [], b""
    for name, values in tensors.items():
        infos.append(tensor(name, *reversed(values.shape), offset=len(data)))
        data += _padded(values.tobytes())
    path.write_bytes(_padded(header(len(pairs), *pairs, *infos, tensors=len(infos))) + data)
    return path


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)

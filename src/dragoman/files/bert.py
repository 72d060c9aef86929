"""Converts a BERT sentence model of Hugging Face to the GGUF format of llama.cpp.

    folder := config.json  vocab.txt  model.safetensors

Rules
1. Matrices are stored as float16. Vectors, position and type embeddings stay float32: they are small, and their error
   affects every token.
2. llama.cpp's vocabulary marks the beginning of a word (▁), BERT's the continuation of one (##).
3. The output is deterministic.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf.constants import GGUFValueType
from gguf.gguf_writer import GGUFWriter
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError

Array = NDArray[np.generic]
Value = str | bool | int | float | list[str] | list[int]

NORMAL, CONTROL = 1, 3
MEAN_POOLING, MOSTLY_HALF_FLOATS = 1, 1
SPECIAL = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "unknown": "[UNK]",
    "seperator": "[SEP]",  # as llama.cpp spells it
    "padding": "[PAD]",
    "cls": "[CLS]",
    "mask": "[MASK]",
}

NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
FLOAT32_TENSORS = ("position_embd.weight", "token_types.weight")


class BertConfig(msgspec.Struct, frozen=True):
    """The relevant fields of `config.json`."""

    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_hidden_layers: int
    layer_norm_eps: float
    type_vocab_size: int


def convert(folder: Path, target: Path, name: str) -> None:
    """Write the model in the folder, which uses mean pooling, to `target`."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=BertConfig)
        words = (folder / "vocab.txt").read_text("utf-8").split("\n")
        if words[-1] == "":
            words.pop()
        metadata = _build_metadata(config, words, name)
        weights = folder / "model.safetensors"
        tensors = {new: array for name, array in _read_safetensors(weights) if (new := _rename_tensor(name))}
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name} cannot be converted: {error}") from error
    _write(target, metadata, {name: _convert_array(name, array) for name, array in tensors.items()})


def _rename_tensor(name: str) -> str:
    """Return llama.cpp's name of a tensor; empty if llama.cpp does not use it."""
    stem, _, kind = name.removeprefix("bert.").rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    if not stem.startswith("encoder.layer."):
        return ""
    number, _, part = stem.removeprefix("encoder.layer.").partition(".")
    return f"blk.{number}.{LAYER_NAMES[part]}.{kind}"


def _convert_array(name: str, array: Array) -> Array:
    return array.astype(np.float16 if array.ndim == 2 and name not in FLOAT32_TENSORS else np.float32)


def _read_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    """file := size:u64 header:JSON data"""
    data = np.memmap(path, mode="r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    header: dict[str, Any] = json.loads(data[8 : 8 + size].tobytes())
    for name, entry in header.items():
        # Other types are position ids, which llama.cpp computes.
        if name == "__metadata__" or entry["dtype"] not in ("F32", "F16"):
            continue
        begin, end = entry["data_offsets"]
        values = data[8 + size + begin : 8 + size + end].view("<f4" if entry["dtype"] == "F32" else "<f2")
        yield name, values.reshape(entry["shape"])


def _build_metadata(config: BertConfig, words: Sequence[str], name: str) -> dict[str, Value]:
    special = set(SPECIAL.values())
    ids = {f"tokenizer.ggml.{role}_token_id": words.index(word) for role, word in SPECIAL.items()}
    return {
        "general.name": name,
        "general.file_type": MOSTLY_HALF_FLOATS,
        "bert.block_count": config.num_hidden_layers,
        "bert.context_length": config.max_position_embeddings,
        "bert.embedding_length": config.hidden_size,
        "bert.feed_forward_length": config.intermediate_size,
        "bert.attention.head_count": config.num_attention_heads,
        "bert.attention.layer_norm_epsilon": config.layer_norm_eps,
        "bert.attention.causal": False,
        "bert.pooling_type": MEAN_POOLING,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.token_type_count": config.type_vocab_size,
        "tokenizer.ggml.tokens": [word if word in special else _convert_token(word) for word in words],
        "tokenizer.ggml.token_type": [CONTROL if word in special else NORMAL for word in words],
        **ids,
    }


def _convert_token(word: str) -> str:
    return word[2:] if word.startswith("##") else f"▁{word}"


def _write(target: Path, metadata: Mapping[str, Value], tensors: Mapping[str, Array]) -> None:
    writer = GGUFWriter(target, "bert")
    for key, value in metadata.items():
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with target.open("rb+") as file:
        os.fsync(file.fileno())

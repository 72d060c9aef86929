"""Converts SmolLM2 from GGUF to a directory for vLLM: `python -m tests.engines.vllm_model MODEL.gguf DIRECTORY`.

The weights are dequantized to half precision. The vocabulary, chat template and configuration come from the GGUF file.
"""

import atexit
import json
import os
import shutil
import struct
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3

WITH_VLLM = "DRAGOMAN_VLLM" in os.environ
"""Set by `make test-vllm`, which runs the tests with the real vLLM."""
CPU_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 * 1024 * 1024}


@cache
def smollm2_folder(gguf: Path) -> Path:
    """Convert the model once per process; the directory is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="dragoman-smollm2-"))
    atexit.register(shutil.rmtree, folder)
    return convert(gguf, folder)


def convert(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, groups = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        weights[_name(tensor.name)] = _deinterleave(tensor.name, values, heads, groups)
    _write_safetensors(folder / "model.safetensors", weights)
    _write(folder / "config.json", _config(fields))
    _write(folder / "tokenizer.json", tokenizer_file(fields))
    _write(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _write(folder / "generation_config.json", {"eos_token_id": fields["tokenizer.ggml.eos_token_id"]})
    return folder


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def _deinterleave(name: str, values: NDArray[np.float16], heads: int, groups: int) -> NDArray[np.float16]:
    """Undo llama.cpp's interleaving of the rotary dimensions of each head."""
    count = heads if ".attn_q." in name else groups if ".attn_k." in name else 0
    if not count:
        return values
    rows, columns = values.shape
    return values.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def tokenizer_file(fields: dict[str, Any]) -> dict[str, Any]:
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": at,
            "content": name,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if kind == CONTROL
    ]
    splitting = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitting},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {name: at for at, name in enumerate(names)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    names = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[fields["tokenizer.ggml.eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _write_safetensors(path: Path, tensors: dict[str, NDArray[np.float16]]) -> None:
    """Write a length, a JSON header, then the tensors."""
    head, at = {}, 0
    for name, values in tensors.items():
        head[name] = {"dtype": "F16", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    described = json.dumps(head).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])))

"""A small BERT with random weights: converted to GGUF, run by llama.cpp, and compared with numpy."""

import asyncio
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.files import bert
from dragoman.files.gguf import read_metadata

Array = NDArray[np.float32]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "wor", "##ld", ",", "[unused0]"]
WIDTH, INNER, HEADS, LAYERS, CONTEXT, EPSILON = 64, 96, 4, 2, 24, 1e-12
CONFIG = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "layer_norm_eps": EPSILON,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}


def weights() -> dict[str, Array]:
    chance = np.random.default_rng(7)

    def some(*shape: int) -> Array:
        return chance.normal(0, 0.3, shape).astype(np.float32)

    def dense(name: str, inner: int, outer: int) -> dict[str, Array]:
        return {f"{name}.weight": some(outer, inner), f"{name}.bias": some(outer)}

    def norm(name: str) -> dict[str, Array]:
        return {f"{name}.weight": 1 + some(WIDTH), f"{name}.bias": some(WIDTH)}

    found = {
        "embeddings.word_embeddings.weight": some(len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": some(CONTEXT, WIDTH),
        "embeddings.token_type_embeddings.weight": some(2, WIDTH),
        **norm("embeddings.LayerNorm"),
        **dense("pooler.dense", WIDTH, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            found |= dense(f"{at}.attention.self.{part}", WIDTH, WIDTH)
        found |= dense(f"{at}.attention.output.dense", WIDTH, WIDTH) | norm(f"{at}.attention.output.LayerNorm")
        found |= dense(f"{at}.intermediate.dense", WIDTH, INNER) | dense(f"{at}.output.dense", INNER, WIDTH)
        found |= norm(f"{at}.output.LayerNorm")
    return found


def safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    kinds = {"float32": "F32", "float16": "F16", "int64": "I64"}
    for name, array in tensors.items():
        places = [offset, offset + array.nbytes]
        header[name] = {"dtype": kinds[array.dtype.name], "shape": list(array.shape), "data_offsets": places}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def write_model(folder: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    safetensors(folder / "model.safetensors", tensors)


def converted(folder: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """Write a model with these tensors, and convert it."""
    write_model(folder, tensors)
    bert.convert(folder, folder / "tiny.gguf", "tiny")
    return folder / "tiny.gguf"


def last_layer(found: dict[str, Array], tokens: list[int]) -> Array:
    """The hidden states of the last layer."""

    def dense(name: str, x: Array) -> Array:
        return x @ found[f"{name}.weight"].T + found[f"{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + EPSILON)
        made: Array = scaled * found[f"{name}.weight"] + found[f"{name}.bias"]
        return made

    def heads(x: Array) -> Array:
        return x.reshape(len(tokens), HEADS, -1).transpose(1, 0, 2)

    x = found["embeddings.word_embeddings.weight"][tokens] + found["embeddings.token_type_embeddings.weight"][0]
    x = norm("embeddings.LayerNorm", x + found["embeddings.position_embeddings.weight"][: len(tokens)])
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = (heads(dense(f"{at}.attention.self.{part}", x)) for part in ("query", "key", "value"))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(WIDTH // HEADS)
        odds = np.exp(scores - scores.max(axis=2, keepdims=True))
        seen = (odds / odds.sum(axis=2, keepdims=True)) @ v
        x = norm(
            f"{at}.attention.output.LayerNorm",
            x + dense(f"{at}.attention.output.dense", seen.transpose(1, 0, 2).reshape(len(tokens), WIDTH)),
        )
        inner = dense(f"{at}.intermediate.dense", x)
        gelu = np.array([[value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in row] for row in inner])
        x = norm(f"{at}.output.LayerNorm", x + dense(f"{at}.output.dense", gelu))
    return x


async def embedded(path: Path, text: str) -> tuple[list[int], Array]:
    engine = LlamaEngine("tiny", LlamaOptions(path=str(path), threads=1))
    await engine.start()
    try:
        tokens = [2, *await engine.tokenize(text, False), 3]
        (made,) = await engine.embed([text])
        assert made.tokens == len(tokens)
        return tokens, np.array(made.values, dtype=np.float32)
    finally:
        await engine.stop()


def test_llama_matches_numpy(tmp_path: Path) -> None:
    found = weights()
    path = converted(tmp_path, {**found, "embeddings.position_ids": np.arange(CONTEXT)})
    tokens, made = asyncio.run(embedded(path, "Hello, worlds  xyz"))
    assert [WORDS[token] for token in tokens] == ["[CLS]", "hello", ",", "world", "##s", "[UNK]", "[SEP]"]
    mean = last_layer(found, tokens).mean(axis=0)
    assert float(made @ mean / np.linalg.norm(mean)) > 0.9999
    metadata = read_metadata(path)
    assert (metadata["general.name"], metadata["bert.context_length"]) == ("tiny", CONTEXT)
    assert metadata["bert.attention.causal"] is False
    assert metadata["tokenizer.ggml.seperator_token_id"] == 3


def test_conversion_is_deterministic_with_or_without_prefix(tmp_path: Path) -> None:
    found = weights()
    named = {f"bert.{name}": array for name, array in found.items()}
    one, two, three = [converted(tmp_path, tensors).read_bytes() for tensors in (found, found, named)]
    assert one == two == three
    halves = {name: array.astype(np.float16) for name, array in found.items()}
    assert len(converted(tmp_path, halves).read_bytes()) == len(one)


@pytest.mark.parametrize(("pooling", "row"), [(2, 0), (3, -1)])
def test_other_pooling_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: int, row: int) -> None:
    monkeypatch.setattr(bert, "MEAN_POOLING", pooling)
    found = weights()
    tokens, made = asyncio.run(embedded(converted(tmp_path, found), "hello worlds"))
    expected = last_layer(found, tokens)[row]
    assert float(made @ expected / np.linalg.norm(expected)) > 0.9999


def test_ranking_model_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "MEAN_POOLING", 4)
    with pytest.raises(ConfigError, match="is a reranking model"):
        asyncio.run(embedded(converted(tmp_path, weights()), "hello"))


@pytest.mark.parametrize("file", ["config.json", "vocab.txt", "model.safetensors"])
def test_invalid_files(tmp_path: Path, file: str) -> None:
    write_model(tmp_path, weights())
    (tmp_path / file).write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00{]")
    with pytest.raises(ConfigError, match="tiny cannot be converted"):
        bert.convert(tmp_path, tmp_path / "tiny.gguf", "tiny")

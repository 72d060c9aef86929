"""Validates directories of LoRA adapters.

directory := adapter_config.json  {"r": RANK, ...}
             adapter_model.safetensors | adapter_model.bin | adapter_model.pt

vLLM accepts an adapter for a model of another hidden size and computes wrong results, so the sizes are compared here if
both can be read.
"""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ConfigError

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = tuple(f"adapter_model.{suffix}" for suffix in ("safetensors", "bin", "pt"))
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
INPUT_WEIGHTS = re.compile(r"\.layers\.\d+\.self_attn\.[qkv]_proj\.lora_A\.")
"""Weights whose input dimension is the hidden size of the model."""
OTHER_ENCODERS = re.compile(r"vision|visual|audio|encoder")


def read_rank(directory: Path) -> int:
    file = directory / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{directory} is not a LoRA adapter: it has no {CONFIG_FILE}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON") from error
    rank = config.get("r") if isinstance(config, dict) else None
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{file} has no rank `r`; is it a LoRA adapter?")
    return rank


def check(directory: Path, model: Path) -> None:
    """Raise if the directory is not an adapter that fits the model. `model` need not be a directory."""
    read_rank(directory)
    weights = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{directory} has no adapter weights: expected {' or '.join(WEIGHT_FILES)}")
    if weights.suffix != ".safetensors":
        return
    size, expected = _adapter_size(_read_header(weights)), _hidden_size(model)
    if size is not None and expected is not None and size != expected:
        raise ConfigError(f"{directory} is for a model with hidden size {size}; this model has {expected}")


def _read_header(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length)) if length <= MAX_HEADER_BYTES else None
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as safetensors") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} cannot be read as safetensors")
    return header


def _adapter_size(header: Mapping[str, Any]) -> int | None:
    for name, tensor in header.items():
        if INPUT_WEIGHTS.search(name) and not OTHER_ENCODERS.search(name):
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            return shape[1] if isinstance(shape, list) and len(shape) == 2 and isinstance(shape[1], int) else None
    return None


def _hidden_size(model: Path) -> int | None:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # Multimodal models have a section per modality.
    sections = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = (section.get("hidden_size") for section in sections if isinstance(section, dict))
    return next((size for size in sizes if isinstance(size, int)), None)

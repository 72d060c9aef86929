"""Folders of LoRA adapters, as far as their files tell.

folder := adapter_config.json  {"r": RANK, ...}
          adapter_model.safetensors | adapter_model.bin | adapter_model.pt

vLLM takes an adapter that was made for a model of another size, and computes something with what fits of it: here it is
refused, where both sizes can be read.
"""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ConfigError

SETTINGS = "adapter_config.json"
WEIGHTS = tuple(f"adapter_model.{ending}" for ending in ("safetensors", "bin", "pt"))
LONGEST_HEADER = 100_000_000
"""What safetensors allows."""
FROM_THE_STREAM = re.compile(r"\.layers\.\d+\.self_attn\.[qkv]_proj\.lora_A\.")
"""Weights that read what the layers of a model hand on, and so are as wide as that."""
OTHER_TOWERS = re.compile(r"vision|visual|audio|encoder")


def rank(folder: Path) -> int:
    file = folder / SETTINGS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} is no folder of a LoRA adapter: there is no {SETTINGS} in it") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON") from error
    rank = found.get("r") if isinstance(found, dict) else None
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{file} names no rank, `r`; is it one of a LoRA adapter?")
    return rank


def check(folder: Path, model: Path) -> None:
    """Whether it is an adapter, and one that may be of this model; `model` need not be a folder."""
    rank(folder)
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{folder} has no weights of an adapter: {' or '.join(WEIGHTS)}")
    if weights.suffix != ".safetensors":
        return
    width, wanted = _width(_header(weights)), _hidden_size(model)
    if width is not None and wanted is not None and width != wanted:
        raise ConfigError(
            f"{folder} is an adapter of a model whose layers are {width} wide; those of this are {wanted}"
        )


def _header(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            found = json.loads(opened.read(length)) if length <= LONGEST_HEADER else None
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as safetensors") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} cannot be read as safetensors")
    return found


def _width(header: Mapping[str, Any]) -> int | None:
    for name, tensor in header.items():
        if FROM_THE_STREAM.search(name) and not OTHER_TOWERS.search(name):
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            return shape[1] if isinstance(shape, list) and len(shape) == 2 and isinstance(shape[1], int) else None
    return None


def _hidden_size(model: Path) -> int | None:
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    # Models that see have one of each kind.
    sections = [found, found.get("text_config")] if isinstance(found, dict) else []
    sizes = (section.get("hidden_size") for section in sections if isinstance(section, dict))
    return next((size for size in sizes if isinstance(size, int)), None)

"""LoRA adapters: their configuration, the checks of their files, and loading them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.engines.llama.binding import Adapter, LlamaModel
from dragoman.files.gguf import read_metadata, read_outline


class AdapterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    scale: float = 1.0
    """Factor for the adapter's changes to the weights."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError("scale: expected a finite number")


Entry = str | AdapterOptions


def adapter_path(entry: Entry) -> Path:
    return Path(entry if isinstance(entry, str) else entry.path).expanduser()


def load_adapter(model: LlamaModel, name: str, entry: Entry) -> tuple[Adapter, float]:
    """Return the adapter and its scale."""
    path = adapter_path(entry)
    if not path.is_file():
        raise ConfigError(f"llama: adapter {name}: no file at {path}")
    return Adapter(model, path), 1.0 if isinstance(entry, str) else entry.scale


def adapter_problems(model_file: Path, entries: Mapping[str, Entry]) -> Sequence[tuple[str, str]]:
    """Return a name and a message for each adapter file that does not fit the model. Missing files are skipped."""
    architecture = _architecture(model_file)
    files = {name: adapter_path(entry) for name, entry in entries.items()}
    problems = [(name, _problem(file, architecture)) for name, file in files.items() if file.is_file()]
    return [(name, message) for name, message in problems if message]


def _problem(file: Path, architecture: str | None) -> str | None:
    try:
        metadata = read_outline(file).metadata
    except ConfigError as error:
        return str(error)
    own = metadata.get("general.architecture")
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        return f"{file} is not a LoRA adapter; create one with llama.cpp's convert_lora_to_gguf.py"
    if architecture is not None and own != architecture:
        return f"{file} is for models of architecture {own}, but this model is {architecture}"
    return None


def _architecture(model_file: Path) -> str | None:
    """Return None if the model file is missing or unreadable."""
    try:
        architecture = read_metadata(model_file).get("general.architecture")
    except ConfigError:
        return None
    return None if architecture is None else str(architecture)

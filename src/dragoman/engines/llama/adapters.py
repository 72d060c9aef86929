"""LoRA adapters: what a configuration says of them, what their files do, and how they get into a model."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.engines.llama.binding import Adapter, Model
from dragoman.files.gguf import read_metadata, read_outline


class AdapterOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    scale: float = 1.0
    """How strong its changes are."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError("scale: expected a number that is finite")


Entry = str | AdapterOptions


def file_of(entry: Entry) -> Path:
    return Path(entry if isinstance(entry, str) else entry.path).expanduser()


def loaded(model: Model, name: str, entry: Entry) -> tuple[Adapter, float]:
    path = file_of(entry)
    if not path.is_file():
        raise ConfigError(f"llama: there is no file of the adapter {name} at {path}")
    return Adapter(model, path), 1.0 if isinstance(entry, str) else entry.scale


def mistakes(model_file: Path, entries: Mapping[str, Entry]) -> Sequence[tuple[str, str]]:
    """What would keep the adapters from being loaded with the model, by their names, as far as their files tell; that
    one is not there is for others to say."""
    architecture = _architecture(model_file)
    files = {name: file_of(entry) for name, entry in entries.items()}
    found = [(name, _mistake(file, architecture)) for name, file in files.items() if file.is_file()]
    return [(name, words) for name, words in found if words]


def _mistake(file: Path, architecture: str | None) -> str | None:
    try:
        metadata = read_outline(file).metadata
    except ConfigError as error:
        return str(error)
    own = metadata.get("general.architecture")
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        return f"{file} is a GGUF file, but no LoRA adapter; convert_lora_to_gguf.py of llama.cpp makes one"
    if architecture is not None and own != architecture:
        return f"{file} is for models of the architecture {own}, and this one is {architecture}"
    return None


def _architecture(model_file: Path) -> str | None:
    """None where the model is not here yet, or cannot be read."""
    try:
        found = read_metadata(model_file).get("general.architecture")
    except ConfigError:
        return None
    return None if found is None else str(found)

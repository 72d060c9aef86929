"""Reads `models.yaml`, the list of models of Lethean's server.

    file  := (models: entries)? entries          entries at the root are the same as those below `models`
    entry := NAME: PATH | NAME: {path: PATH, ...keys of a model}

Rules
1. A relative path is relative to the directory of the file. A directory of weights is for the engine that loads them.
2. A key that a model does not have is ignored with a warning: the file may be shared with another server.
"""

from pathlib import Path
from typing import Any

import msgspec

from dragoman.config.config_file import ConfigFile, read_config_file, resolve_path
from dragoman.config.diagnostics import Locations
from dragoman.config.model_spec import COMMON_KEYS, ModelSpec, read_models
from dragoman.core.errors import ConfigError
from dragoman.engines import DEFAULT_ENGINE, DIRECTORY_ENGINE, engine_class
from dragoman.files.addresses import HUB
from dragoman.files.sources import is_model_directory


def read_models_yaml(path: str) -> dict[str, ModelSpec]:
    file = read_config_file(path, {})
    nested = file.get_mapping(file.values, "models")
    file.raise_errors()
    entries = {name: entry for name, entry in file.values.items() if name != "models"} | nested
    lines = {f"models.{key}": line for key, line in file.locations.lines.items()} | dict(file.locations.lines)
    models = {name.strip(): _convert_entry(file, entry) for name, entry in entries.items()}
    known = {name: _select_known_keys(entry) for name, entry in models.items()}
    converted = ConfigFile({"models": known}, Locations(path, lines))
    found = read_models(converted)
    converted.raise_errors()
    ignored = {name: tuple(key for key in models[name] if key not in known[name]) for name in found}
    return {name: msgspec.structs.replace(model, ignored_keys=ignored[name]) for name, model in found.items()}


def _convert_entry(file: ConfigFile, entry: Any) -> Any:
    """Return the entry as it would be in the configuration, with keys that a model does not have."""
    if isinstance(entry, str):
        entry = {"path": entry}
    if not isinstance(entry, dict):
        return entry
    path = entry.get("path")
    if isinstance(path, str) and path and not path.startswith(HUB):
        path = resolve_path(path, file.directory)
        entry = {**entry, "path": path}
        if "engine" not in entry and is_model_directory(Path(path)):
            entry["engine"] = DIRECTORY_ENGINE
    return entry


def _select_known_keys(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    try:
        options = engine_class(entry.get("engine", DEFAULT_ENGINE)).Options
    except (ConfigError, TypeError):
        # Reported where the engine is read.
        return entry
    known = {*COMMON_KEYS, *options.__struct_fields__}
    return {key: value for key, value in entry.items() if key in known}

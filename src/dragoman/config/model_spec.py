"""Reads the entries of `models:`.

model := SOURCE
       | {engine, source or path, sampling, keep_alive, fallback, ray, ...the engine's own options}

For an engine that loads a directory (vllm) the source is a directory or ORG/REPO of the hub, with or without `hf:`.

The engines llama and vllm have the option `adapters`. Each adapter is a model too:

adapters := {name: PATH | {path: PATH, scale: NUMBER}}
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dragoman.config.config_file import ConfigFile, resolve_path, resolve_source
from dragoman.config.quantities import parse_duration
from dragoman.config.sections import ReplicaSettings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, parse_validation_error
from dragoman.core.request import RepetitionPenalty, Sampling
from dragoman.core.types import Count, Word
from dragoman.engines import DEFAULT_ENGINE, DIRECTORY_ENGINE, ENGINES, engine_class
from dragoman.files import sources
from dragoman.files.addresses import HUB
from dragoman.files.sources import BUILT_IN, SOURCE_KINDS, is_model_directory
from dragoman.formats import get_format

COMMON_KEYS = ("engine", "source", "path", "sampling", "keep_alive", "fallback", "ray")
"""Keys that are the same for every engine."""
MODEL_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/-]+")

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Defaults for requests that do not set these."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_p: Share | None = None
    seed: int | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Count | None = None

    def fill(self, asked: Sampling) -> Sampling:
        """Replace each None by the default. An explicit 0 is kept."""
        missing = {
            name: getattr(self, name)
            for name in Sampling.__struct_fields__
            if name != "logit_bias" and getattr(asked, name) is None
        }
        return msgspec.structs.replace(asked, **missing)


NO_DEFAULTS = SamplingDefaults()


class ModelSpec(msgspec.Struct, frozen=True):
    """One configured model. `options` are the engine's own; `adapters` are further model names it serves."""

    name: str
    engine: str
    source: str | None = None
    options: Mapping[str, Any] = {}
    sampling: SamplingDefaults = NO_DEFAULTS
    keep_alive: float | None = None
    """Seconds; None means the setting for all models."""
    adapters: tuple[str, ...] = ()
    fallback: str | None = None
    """The model that answers when this one cannot."""
    ray: ReplicaSettings = ReplicaSettings()
    location: str | None = None
    """FILE:LINE of the entry, if it has one."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of its entry in `models.yaml` that a model does not have."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.adapters)

    @property
    def file(self) -> str | None:
        """The source, if it is a single file that Dragoman can download. vllm finds its directories itself."""
        return None if self.source is None or engine_class(self.engine).loads_directory else self.source

    def locate(self) -> Path | None:
        """Return the model's file or directory, None if it can be downloaded. Raises ConfigError for a wrong path."""
        if self.file is not None:
            return sources.locate(self.file)
        directory = None if self.source is None else Path(self.source).expanduser()
        if directory is None or directory.is_dir():
            return directory
        if str(self.source).startswith(HUB):
            return None
        raise ConfigError(f"folder not found: {self.source}")

    def build_options(self, path: Path | None = None) -> msgspec.Struct:
        """Convert the entry to the options of its engine. `path` is the model's file, once it is known."""
        values = dict(self.options)
        if self.source is not None:
            values["path"] = str(path or self.source)
        try:
            return msgspec.convert(values, engine_class(self.engine).Options)
        except msgspec.ValidationError as error:
            where, message = parse_validation_error(error)
            raise ConfigError(f"{where.removeprefix('.')}: {message}" if where else message) from error

    @property
    def is_open(self) -> bool:
        """Whether it serves all models that its engine finds, each as NAME/MODEL."""
        return self.options.get("models") == "all"

    def includes(self, name: str) -> bool:
        """Whether the name belongs to this open model."""
        return self.is_open and name.lower().startswith(f"{self.name.lower()}/")

    def equals_except_location(self, other: "ModelSpec") -> bool:
        return msgspec.structs.replace(self, location=other.location) == other

    def can_share_engine(self, other: "ModelSpec") -> bool:
        """Whether a running engine of one can also serve the other. Models of different names share a file."""
        if self.name.lower() == other.name.lower():
            return (self.engine, self.source, self.options) == (other.engine, other.source, other.options)
        is_same = (self.engine, self.options, self.ray) == (other.engine, other.options, other.ray)
        if not is_same or self.adapters or self.engine not in ENGINES or self.source is None or other.source is None:
            return False
        return self.source == other.source or self._real_path == other._real_path is not None

    @property
    def _real_path(self) -> str | None:
        """The path of the model on this machine, without links; None if there is no such file yet."""
        try:
            path = self.locate()
        except ConfigError:
            return None
        return None if path is None else os.path.realpath(path)

    def resolve_paths(self, directory: Path) -> "ModelSpec":
        """Return the same model, with the paths of its files relative to a directory."""
        source = None if self.source is None else resolve_source(self.source, directory)
        options = dict(self.options)
        if self.adapters:
            options["adapters"] = _resolve_adapters(options["adapters"], directory)
        return msgspec.structs.replace(self, source=source, options=options)

    def with_layout(self, layout: str | None) -> "ModelSpec":
        """Set the layout, if the engine has this option. `auto` is left out, because it is the default."""
        if self.engine not in ENGINES or "layout" not in engine_class(self.engine).Options.__struct_fields__:
            return self
        options = {name: value for name, value in self.options.items() if name != "layout"}
        return msgspec.structs.replace(self, options=options | ({"layout": layout} if layout == "as-is" else {}))


def model_from_flag(name: str, source: str, engine: str | None) -> ModelSpec:
    """Build the model of a `--model` flag. Without an engine, the source decides: a directory or a file."""
    if engine is None and not is_model_directory(Path(source).expanduser()):
        return ModelSpec(name, DEFAULT_ENGINE, source)
    engine = engine or DIRECTORY_ENGINE
    cls = engine_class(engine)
    if not cls.loads_directory:
        return ModelSpec(name, engine, source)
    _check_directory(source, Path(source), engine)
    if not cls.is_installed():
        raise ConfigError(f"{source} is for {engine}, which is not installed: pip install 'dragoman[{engine}]'")
    return ModelSpec(name, engine, _resolve_directory(source, Path()))


def _check_directory(source: str, path: Path, engine: str) -> None:
    """Refuse a file as the source of an engine that loads directories."""
    if source.startswith(HUB) or not path.expanduser().is_file():
        return
    if source.lower().endswith(".gguf"):
        message = (
            f"is a GGUF file, which {DEFAULT_ENGINE} runs: leave the engine out; {engine} takes a folder or ORG/REPO"
        )
    else:
        message = f"is a file; {engine} takes the folder of a model, or ORG/REPO of the hub"
    raise ConfigError(f"{source} {message}")


def read_models(file: ConfigFile) -> dict[str, ModelSpec]:
    models: dict[str, ModelSpec] = {}
    names: dict[str, str] = {}
    for name, entry in file.get_mapping(file.values, "models").items():
        key = f"models.{name}"
        if _claim_name(file, name, names, key):
            models[name] = _read_model(file, name, {} if entry is None else entry, key)
    for name, model in models.items():
        for adapter in model.adapters:
            _claim_name(file, adapter, names, f"models.{name}.adapters.{adapter}")
    return models


def _claim_name(file: ConfigFile, name: str, names: dict[str, str], key: str) -> bool:
    """Add the name to `names`. If it is invalid or taken, record an error and return False."""
    other = names.get(name.lower())
    if not MODEL_NAME.fullmatch(name):
        file.add_error(key, "a model name may contain only letters, digits and . _ - : /, and must not begin with /")
    elif other is not None:
        taken = "another model has this name" if other == name else f"differs from the model {other} only in case"
        file.add_error(key, taken)
    else:
        names[name.lower()] = name
        return True
    return False


def _read_model(file: ConfigFile, name: str, entry: Any, key: str) -> ModelSpec:
    if isinstance(entry, str):
        entry = {"source": entry}
    if not isinstance(entry, dict):
        file.add_error(key, f"expected a source or a mapping, got {type(entry).__name__}")
        return ModelSpec(name, DEFAULT_ENGINE)
    # As in other sections, null means the default.
    entry = {option: value for option, value in entry.items() if value is not None}
    if "path" in entry and "source" in entry:
        file.add_error(f"{key}.path", "path and source mean the same; give one of them")
    source_key = "path" if "path" in entry else "source"
    engine = file.convert(entry.get("engine", DEFAULT_ENGINE), Word, f"{key}.engine")
    source = file.convert(entry.get(source_key), Word | None, f"{key}.{source_key}")
    if source_key not in entry and engine == DEFAULT_ENGINE and name in BUILT_IN:
        source = name
    options = {option: value for option, value in entry.items() if option not in COMMON_KEYS}
    adapters: Any = None
    cls = file.parse(engine, engine_class, f"{key}.engine")
    if cls is not None:
        if source is not None:
            source = _read_source(file, cls, engine, source, f"{key}.{source_key}")
        elif source_key not in entry and _requires_source(cls):
            file.add_error(key, f"source is missing: a path, {SOURCE_KINDS} or a built-in name ({', '.join(BUILT_IN)})")
        _check_options(file, cls, options, key)
    if engine in ENGINES:
        # A custom engine may use these names for something else.
        file.parse(options.get("format"), _check_format, f"{key}.format")
        adapters = options.get("adapters")
    if isinstance(adapters, dict):
        options["adapters"] = _resolve_adapters(adapters, file.directory)
    line = file.locations.lines.get(key)
    return ModelSpec(
        name,
        engine or DEFAULT_ENGINE,
        source,
        options,
        file.convert(entry.get("sampling", {}), SamplingDefaults, f"{key}.sampling") or NO_DEFAULTS,
        file.parse(entry.get("keep_alive"), parse_duration, f"{key}.keep_alive"),
        tuple(adapters) if isinstance(adapters, dict) else (),
        file.convert(entry.get("fallback"), Word | None, f"{key}.fallback"),
        file.convert(entry.get("ray", {}), ReplicaSettings, f"{key}.ray") or ReplicaSettings(),
        None if line is None else f"{file.locations.file}:{line}",
    )


def _read_source(file: ConfigFile, cls: type[Engine], engine: str, source: str, key: str) -> str:
    if "path" not in cls.Options.__struct_fields__:
        file.add_error(key, f"the engine {engine} takes no source")
    if not cls.loads_directory:
        return resolve_source(source, file.directory)
    path = Path(resolve_path(source, file.directory))
    file.parse(source, lambda written: _check_directory(written, path, engine), key)
    return _resolve_directory(source, file.directory)


def _resolve_directory(source: str, directory: Path) -> str:
    """Return the path of an existing directory, or the `hf:` name of a repository."""
    if source.startswith(HUB):
        return source
    path = resolve_path(source, directory)
    return path if source.startswith((".", "/", "~")) or Path(path).exists() else f"{HUB}{source}"


def _requires_source(cls: type[Engine]) -> bool:
    return any(field.name == "path" and field.required for field in msgspec.structs.fields(cls.Options))


def _check_options(file: ConfigFile, cls: type[Engine], options: Mapping[str, Any], key: str) -> None:
    fields = cls.Options.__struct_fields__
    has_source = "path" in fields
    common = [name for name in COMMON_KEYS if has_source or name not in ("source", "path")]
    file.check_keys(options, [*common, *(name for name in fields if name != "path")], key)
    known = {name: value for name, value in options.items() if name in fields}
    file.convert({"path": "", **known} if has_source else known, cls.Options, key)


def _check_format(name: object) -> None:
    if isinstance(name, str):
        get_format(name)


def _resolve_adapters(adapters: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    return {name: _resolve_adapter(adapter, directory) for name, adapter in adapters.items()}


def _resolve_adapter(adapter: Any, directory: Path) -> Any:
    if isinstance(adapter, str):
        return resolve_path(adapter, directory)
    path = adapter.get("path") if isinstance(adapter, dict) else None
    return {**adapter, "path": resolve_path(path, directory)} if isinstance(path, str) else adapter

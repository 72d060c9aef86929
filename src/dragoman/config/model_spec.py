"""Reads the entries of `models:`.

model := SOURCE
       | {engine, source or path, sampling, keep_alive, fallback, ray, ...the engine's own options}

For an engine that loads a directory (vllm) the source is a directory or ORG/REPO of the hub, with or without `hf:`.

The engines llama and vllm have the option `adapters`. Each adapter is a model too:

adapters := {name: PATH | {path: PATH, scale: NUMBER}}
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dragoman.config.config_file import ConfigFile, resolve_path, type_name
from dragoman.config.quantities import parse_duration
from dragoman.config.sections import ReplicaSettings
from dragoman.core.errors import ConfigError
from dragoman.core.request import RepetitionPenalty, Sampling
from dragoman.core.types import Count, Word
from dragoman.engines import ENGINES, engine_class
from dragoman.files.hub import PREFIX as HUB
from dragoman.files.sources import BUILT_IN, SOURCE_KINDS, is_model_directory
from dragoman.formats import get_format

DIRECTORY_ENGINE = "vllm"
"""The default engine for a model directory."""
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
    place: str | None = None
    """FILE:LINE of the entry, if it has one."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.adapters)

    @property
    def file(self) -> str | None:
        """The source, if it is a single file that Dragoman can download. vllm finds its directories itself."""
        return None if self.source is None or engine_class(self.engine).loads_directory else self.source

    @property
    def is_open(self) -> bool:
        """Whether it serves all models that its engine finds, each as NAME/MODEL."""
        return self.options.get("models") == "all"

    def has(self, name: str) -> bool:
        """Whether the name belongs to this open model."""
        return self.is_open and name.lower().startswith(f"{self.name.lower()}/")

    def equals_except_location(self, other: "ModelSpec") -> bool:
        """Whether the two are equal except for the location of their entries."""
        return msgspec.structs.replace(self, place=other.place) == other

    def can_share_engine(self, other: "ModelSpec") -> bool:
        """Whether a running engine of one can also serve the other."""
        return (self.engine, self.source, self.options) == (other.engine, other.source, other.options)


def model_from_flag(name: str, source: str, engine: str | None) -> ModelSpec:
    """Build the model of a `--model` flag. Without an engine, a model directory means vllm, anything else llama."""
    if engine is None and not is_model_directory(Path(source).expanduser()):
        return ModelSpec(name, "llama", source)
    engine = engine or DIRECTORY_ENGINE
    cls = engine_class(engine)
    if not cls.loads_directory:
        return ModelSpec(name, engine, source)
    if error := _check_directory(source, Path(source), engine):
        raise ConfigError(error)
    if not cls.is_installed():
        raise ConfigError(f"{source} is for {engine}, which is not installed: pip install 'dragoman[{engine}]'")
    return ModelSpec(name, engine, _resolve_directory(source, Path()))


def _check_directory(source: str, path: Path, engine: str) -> str | None:
    """Return an error if the source of an engine that loads directories is a file."""
    if source.startswith(HUB) or not path.expanduser().is_file():
        return None
    if source.lower().endswith(".gguf"):
        return f"{source} is a GGUF file, which llama runs: leave the engine out; {engine} takes a folder or ORG/REPO"
    return f"{source} is a file; {engine} takes the folder of a model, or ORG/REPO of the hub"


COMMON_KEYS = ("engine", "source", "path", "sampling", "keep_alive", "fallback", "ray")
"""Keys that are the same for every engine."""


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
        message = "a model name may contain only letters, digits and . _ - : /, and must not begin with /"
        file.add_error(key, message)
    elif other is not None:
        message = "another model has this name" if other == name else f"differs from the model {other} only in case"
        file.add_error(key, message)
    else:
        names[name.lower()] = name
        return True
    return False


def _read_model(file: ConfigFile, name: str, entry: Any, key: str) -> ModelSpec:
    if isinstance(entry, str):
        entry = {"source": entry}
    if not isinstance(entry, dict):
        file.add_error(key, f"expected a source or a mapping, got {type_name(entry)}")
        return ModelSpec(name, "llama")
    if "path" in entry and "source" in entry:
        file.add_error(f"{key}.path", "path and source mean the same; give one of them")
    source_key = "path" if "path" in entry else "source"
    engine = file.convert(entry.get("engine", "llama"), Word, f"{key}.engine")
    source = file.convert(entry.get(source_key), Word | None, f"{key}.{source_key}")
    if entry.get(source_key) is None and engine == "llama" and name in BUILT_IN:
        source = name
    options = {option: value for option, value in entry.items() if option not in COMMON_KEYS}
    adapters: dict[str, Any] = {}
    if engine is not None:
        valid = _check_options(file, engine, source, entry, options, key)
        # A custom engine may use this option name for something else.
        adapters = valid.get("adapters", {}) if engine in ENGINES else {}
    if adapters:
        options["adapters"] = {adapter: _resolve_adapter(file, entry) for adapter, entry in adapters.items()}
    return ModelSpec(
        name,
        engine or "llama",
        None if source is None else _resolve_source(file, source, engine),
        options,
        _read_sampling(file, entry, key),
        file.parse(entry, "keep_alive", parse_duration, key),
        tuple(adapters),
        file.convert(entry.get("fallback"), Word | None, f"{key}.fallback"),
        _read_replicas(file, entry, key),
        f"{file.name}:{file.lines[key]}" if key in file.lines else None,
    )


def _resolve_source(file: ConfigFile, source: str, engine: str | None) -> str:
    if engine not in ENGINES or not engine_class(engine).loads_directory:
        return file.resolve_source(source)
    return _resolve_directory(source, file.directory)


def _resolve_directory(source: str, directory: Path) -> str:
    """Return the path of an existing directory, or the `hf:` name of a repository."""
    if source.startswith(HUB):
        return source
    path = resolve_path(source, directory)
    return path if source.startswith((".", "/", "~")) or Path(path).exists() else f"{HUB}{source}"


def _resolve_adapter(file: ConfigFile, adapter: Any) -> Any:
    if isinstance(adapter, str):
        return resolve_path(adapter, file.directory)
    return {**adapter, "path": resolve_path(adapter["path"], file.directory)}


def _read_sampling(file: ConfigFile, entry: dict[str, Any], key: str) -> SamplingDefaults:
    values = file.get_mapping(entry, "sampling", key)
    file.check_keys(values, SamplingDefaults.__struct_fields__, f"{key}.sampling")
    return msgspec.convert(file.select_valid(values, SamplingDefaults, f"{key}.sampling"), SamplingDefaults)


def _read_replicas(file: ConfigFile, entry: dict[str, Any], key: str) -> ReplicaSettings:
    values = file.get_mapping(entry, "ray", key)
    file.check_keys(values, ReplicaSettings.__struct_fields__, f"{key}.ray")
    valid = file.select_valid(values, ReplicaSettings, f"{key}.ray")
    # Values that are valid alone may contradict each other.
    return file.convert(valid, ReplicaSettings, f"{key}.ray") or ReplicaSettings()


def _check_options(
    file: ConfigFile, engine: str, source: str | None, entry: dict[str, Any], options: dict[str, Any], key: str
) -> dict[str, Any]:
    """Check the source and the engine's own options, and return the valid options."""
    try:
        struct = engine_class(engine).Options
    except ConfigError as error:
        file.add_error(f"{key}.engine", str(error))
        return {}
    has_source = "path" in struct.__struct_fields__
    if source is not None and engine_class(engine).loads_directory:
        problem = _check_directory(source, Path(resolve_path(source, file.directory)), engine)
        if problem is not None:
            file.add_error(f"{key}.{'path' if 'path' in entry else 'source'}", problem)
    if source is not None and not has_source:
        file.add_error(f"{key}.source", f"the engine {engine} takes no source")
    own = [name for name in struct.__struct_fields__ if name != "path"]
    known = [name for name in COMMON_KEYS if has_source or name not in ("source", "path")] + own
    file.check_keys(options, known, key)
    is_required = any(field.name == "path" and field.required for field in msgspec.structs.fields(struct))
    if is_required and entry.get("source", entry.get("path")) is None and source is None:
        file.add_error(key, f"source is missing: a path, {SOURCE_KINDS} or a built-in name ({', '.join(BUILT_IN)})")
    # Errors of the source are recorded above.
    values = {"path": "", **options} if has_source else options
    valid = file.select_valid(values, struct, key)
    if len(valid) == len(values):
        # Values that are valid alone may contradict each other.
        file.convert(values, struct, key)
    if engine in ENGINES:
        _check_format(file, struct, options, f"{key}.format")
    return valid


def _check_format(file: ConfigFile, struct: type[msgspec.Struct], options: dict[str, Any], key: str) -> None:
    """Check that the format exists, unless it is the engine's default, which may mean automatic detection."""
    default = next((field.default for field in msgspec.structs.fields(struct) if field.name == "format"), None)
    chosen: Any = options.get("format", default)
    if chosen == default or not isinstance(chosen, str):
        return
    try:
        get_format(chosen)
    except ConfigError as error:
        file.add_error(key, str(error))

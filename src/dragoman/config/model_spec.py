"""One entry of `models:`.

model := SOURCE
       | {engine, source or path, sampling, keep_alive, fallback, ray, ...the engine's own options}

For engines of folders (vllm) the source is a folder, or ORG/REPO of the hub, which `hf:` may precede.

Among the options of llama and vllm are `adapters`, each of which is a model too:

adapters := {name: PATH | {path: PATH, scale: NUMBER}}
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dragoman.config.config_file import File, kind
from dragoman.config.paths import located
from dragoman.config.quantities import duration
from dragoman.config.ray_options import Replicas
from dragoman.core.errors import ConfigError
from dragoman.core.request import RepetitionPenalty, Sampling
from dragoman.core.types import Count, Word
from dragoman.engines import ENGINES, engine_class
from dragoman.files.hub import PREFIX as HUB
from dragoman.files.sources import BUILT_IN, KINDS, is_model_folder
from dragoman.formats import named

FOLDER_ENGINE = "vllm"
"""For a folder that nobody names an engine for."""
MODEL_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/-]+")

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What holds where a request is silent."""

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
        """An explicit 0 is an answer, and stays."""
        return Sampling(
            temperature=self.temperature if asked.temperature is None else asked.temperature,
            top_p=self.top_p if asked.top_p is None else asked.top_p,
            top_k=self.top_k if asked.top_k is None else asked.top_k,
            min_p=self.min_p if asked.min_p is None else asked.min_p,
            seed=self.seed if asked.seed is None else asked.seed,
            repetition_penalty=(
                self.repetition_penalty if asked.repetition_penalty is None else asked.repetition_penalty
            ),
            presence_penalty=self.presence_penalty if asked.presence_penalty is None else asked.presence_penalty,
            frequency_penalty=self.frequency_penalty if asked.frequency_penalty is None else asked.frequency_penalty,
            logit_bias=asked.logit_bias,
        )


NO_DEFAULTS = SamplingDefaults()


class ModelSpec(msgspec.Struct, frozen=True):
    """`options` are for the engine; `source` says where its file comes from. `adapters` are the names of the models
    that its engine makes of it, beside itself."""

    name: str
    engine: str
    source: str | None = None
    options: Mapping[str, Any] = {}
    sampling: SamplingDefaults = NO_DEFAULTS
    keep_alive: float | None = None
    """Seconds; None: as for all models."""
    adapters: tuple[str, ...] = ()
    fallback: str | None = None
    """The model that answers when this one cannot."""
    ray: Replicas = Replicas()
    place: str | None = None
    """FILE:LINE of its entry; None: there is none."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.adapters)

    @property
    def file(self) -> str | None:
        """Its source, where that is one file, which we can bring; engines of folders find theirs by themselves."""
        return None if self.source is None or engine_class(self.engine).takes_folder else self.source

    @property
    def is_open(self) -> bool:
        """Whether it stands for all models that its engine finds, each called NAME/MODEL."""
        return self.options.get("models") == "all"

    def has(self, name: str) -> bool:
        """Whether that may be one of them."""
        return self.is_open and name.lower().startswith(f"{self.name.lower()}/")

    def same_but_for_place(self, other: "ModelSpec") -> bool:
        """Whether they differ in nothing but where they are written down."""
        return msgspec.structs.replace(self, place=other.place) == other

    def runs_like(self, other: "ModelSpec") -> bool:
        """Whether the engine of one can stay for the other."""
        return (self.engine, self.source, self.options) == (other.engine, other.source, other.options)


def flagged(name: str, source: str, engine: str | None) -> ModelSpec:
    """A model of the command line. Without an engine, what lies there decides: a folder of Hugging Face's is vllm's."""
    if engine is None and not _is_folder(source):
        return ModelSpec(name, "llama", source)
    engine = engine or FOLDER_ENGINE
    cls = engine_class(engine)
    if not cls.takes_folder:
        return ModelSpec(name, engine, source)
    if wrong := _no_folder(source, Path(source), engine):
        raise ConfigError(wrong)
    if not cls.is_installed():
        raise ConfigError(f"{source} is for {engine}, which is not installed: pip install 'dragoman[{engine}]'")
    return ModelSpec(name, engine, _folder_or_hub(source, Path()))


def _is_folder(source: str) -> bool:
    return is_model_folder(Path(source).expanduser())


def _no_folder(source: str, path: Path, engine: str) -> str | None:
    """What is wrong with a source that is a file, for an engine of folders."""
    if source.startswith(HUB) or not path.expanduser().is_file():
        return None
    if source.lower().endswith(".gguf"):
        return f"{source} is a GGUF file, which llama runs: leave the engine out; {engine} takes a folder or ORG/REPO"
    return f"{source} is a file; {engine} takes the folder of a model, or ORG/REPO of the hub"


OURS = ("engine", "source", "path", "sampling", "keep_alive", "fallback", "ray")
"""Keys that are the same for every engine."""


def read_models(file: File) -> dict[str, ModelSpec]:
    models: dict[str, ModelSpec] = {}
    seen: dict[str, str] = {}
    for name, entry in file.mapping(file.values, "models").items():
        key = f"models.{name}"
        if _is_free(file, name, seen, key):
            models[name] = _model(file, name, {} if entry is None else entry, key)
    for name, model in models.items():
        for adapter in model.adapters:
            _is_free(file, adapter, seen, f"models.{name}.adapters.{adapter}")
    return models


def _is_free(file: File, name: str, seen: dict[str, str], key: str) -> bool:
    """Whether a model may have the name, which is taken then; why it may not is noted."""
    other = seen.get(name.lower())
    if not MODEL_NAME.fullmatch(name):
        file.note(key, "a model's name has letters, digits and . _ - : / only, and begins with no /")
    elif other is not None:
        same = "another model has this name" if other == name else f"{other} is the same name but for its case"
        file.note(key, same)
    else:
        seen[name.lower()] = name
        return True
    return False


def _model(file: File, name: str, entry: Any, key: str) -> ModelSpec:
    if isinstance(entry, str):
        entry = {"source": entry}
    if not isinstance(entry, dict):
        file.note(key, f"expected a source or a mapping, got {kind(entry)}")
        return ModelSpec(name, "llama")
    if "path" in entry and "source" in entry:
        file.note(f"{key}.path", "path and source are the same thing; give one of them")
    given = "path" if "path" in entry else "source"
    engine = file.convert(entry.get("engine", "llama"), Word, f"{key}.engine")
    source = file.convert(entry.get(given), Word | None, f"{key}.{given}")
    if entry.get(given) is None and engine == "llama" and name in BUILT_IN:
        source = name
    options = {option: value for option, value in entry.items() if option not in OURS}
    adapters: dict[str, Any] = {}
    if engine is not None:
        fitting = _check_options(file, engine, source, entry, options, key)
        # Engines of others may call something else by this name.
        adapters = fitting.get("adapters", {}) if engine in ENGINES else {}
    if adapters:
        options["adapters"] = {adapter: _located(file, entry) for adapter, entry in adapters.items()}
    return ModelSpec(
        name,
        engine or "llama",
        None if source is None else _placed(file, source, engine),
        options,
        _sampling(file, entry, key),
        file.parsed(entry, "keep_alive", duration, key),
        tuple(adapters),
        file.convert(entry.get("fallback"), Word | None, f"{key}.fallback"),
        _replicas(file, entry, key),
        f"{file.name}:{file.lines[key]}" if key in file.lines else None,
    )


def _placed(file: File, source: str, engine: str | None) -> str:
    """A source from the file's folder. For an engine of folders it may be a name of the hub, which is no path."""
    if engine not in ENGINES or not engine_class(engine).takes_folder:
        return file.from_here(source)
    return _folder_or_hub(source, file.folder)


def _folder_or_hub(source: str, folder: Path) -> str:
    if source.startswith(HUB):
        return source
    path = located(source, folder)
    return path if source.startswith((".", "/", "~")) or Path(path).exists() else f"{HUB}{source}"


def _located(file: File, adapter: Any) -> Any:
    """With its path from the file's folder; what it looks like has been checked."""
    if isinstance(adapter, str):
        return located(adapter, file.folder)
    return {**adapter, "path": located(adapter["path"], file.folder)}


def _sampling(file: File, entry: dict[str, Any], key: str) -> SamplingDefaults:
    values = file.mapping(entry, "sampling", key)
    file.check_keys(values, SamplingDefaults.__struct_fields__, f"{key}.sampling")
    return msgspec.convert(file.fitting(values, SamplingDefaults, f"{key}.sampling"), SamplingDefaults)


def _replicas(file: File, entry: dict[str, Any], key: str) -> Replicas:
    values = file.mapping(entry, "ray", key)
    file.check_keys(values, Replicas.__struct_fields__, f"{key}.ray")
    fitting = file.fitting(values, Replicas, f"{key}.ray")
    # Each of them is right; together they may not be.
    return file.convert(fitting, Replicas, f"{key}.ray") or Replicas()


def _check_options(
    file: File, engine: str, source: str | None, entry: dict[str, Any], options: dict[str, Any], key: str
) -> dict[str, Any]:
    """Those that fit."""
    try:
        wanted = engine_class(engine).Options
    except ConfigError as error:
        file.note(f"{key}.engine", str(error))
        return {}
    takes_file = "path" in wanted.__struct_fields__
    if source is not None and engine_class(engine).takes_folder:
        wrong = _no_folder(source, Path(located(source, file.folder)), engine)
        if wrong is not None:
            file.note(f"{key}.{'path' if 'path' in entry else 'source'}", wrong)
    if source is not None and not takes_file:
        file.note(f"{key}.source", f"the engine {engine} takes no source")
    own = [name for name in wanted.__struct_fields__ if name != "path"]
    known = [name for name in OURS if takes_file or name not in ("source", "path")] + own
    file.check_keys(options, known, key)
    if takes_file and entry.get("source", entry.get("path")) is None and source is None and "path" in _required(wanted):
        file.note(key, f"source is missing: a path, {KINDS} or a built-in name ({', '.join(BUILT_IN)})")
    # What is wrong with the source has been said.
    given = {"path": "", **options} if takes_file else options
    fitting = file.fitting(given, wanted, key)
    if len(fitting) == len(given):
        # Each of them is right; an engine may know of some that do not go together.
        file.convert(given, wanted, key)
    if engine in ENGINES:
        _check_format(file, wanted, options, f"{key}.format")
    return fitting


def _check_format(file: File, wanted: type[msgspec.Struct], options: dict[str, Any], key: str) -> None:
    """An engine's default may mean that it finds out by itself; anything else is a format that there is."""
    default = next((field.default for field in msgspec.structs.fields(wanted) if field.name == "format"), None)
    chosen: Any = options.get("format", default)
    if chosen == default or not isinstance(chosen, str):
        return
    try:
        named(chosen)
    except ConfigError as error:
        file.note(key, str(error))


def _required(struct: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(struct) if field.required]

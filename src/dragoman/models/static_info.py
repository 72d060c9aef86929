"""What is known of a model before it is loaded: what its configuration and its file say."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.config.diagnostics import Mistake
from dragoman.config.model_spec import ModelSpec
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.files.discovery import read_description
from dragoman.files.gguf import Value, read_metadata
from dragoman.files.hub import PREFIX
from dragoman.formats import detect

FileState = Literal["here", "missing", "not downloaded", "unreadable"]


class Foreseen(msgspec.Struct, frozen=True):
    """What is known of a model before it is loaded; None where only its engine can tell."""

    format: str | None = None
    context: int | None = None
    file: FileState = "here"
    writes: bool = True


def foreseen(spec: ModelSpec) -> Foreseen:
    """Reads the beginning of the model's file, if it has one and it is there."""
    given = dict(spec.options) if spec.source is None else {**spec.options, "path": spec.source}
    try:
        options = msgspec.convert(given, engine_class(spec.engine).Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"models.{spec.name}: {error}") from error
    known = _of_folder(spec) if spec.file is None else _of_file(spec.file)
    # Engines of others may call something else by these names.
    form, context = getattr(options, "format", None), getattr(options, "context", None)
    return Foreseen(
        format=form if isinstance(form, str) else known.format,
        context=context if isinstance(context, int) else known.context,
        file=known.file,
        writes=known.writes,
    )


def wrong_files(specs: Sequence[ModelSpec]) -> list[Mistake]:
    """What leads to no file; what can still be downloaded is not missing."""
    missing = []
    for spec in specs:
        key = f"models.{spec.name}"
        try:
            if spec.file is not None:
                sources.locate(spec.file)
            elif _folder_state(spec) == "missing":
                missing.append(Mistake(f"{key}.source", f"there is no folder {spec.source}"))
        except ConfigError as error:
            missing.append(Mistake(f"{key}.source", str(error)))
        missing += [
            Mistake(f"{key}.adapters.{name}", f"there is no adapter at {path}")
            for name, path in adapter_files(spec).items()
            if not (path.is_dir() if spec.file is None else path.is_file())
        ]
    return missing


def unfit(specs: Sequence[ModelSpec]) -> list[Mistake]:
    """What their engines find wrong with files that are there."""
    return [
        Mistake(f"models.{spec.name}.{key}" if key else f"models.{spec.name}", words)
        for spec in specs
        for key, words in _mistakes(spec)
    ]


def _mistakes(spec: ModelSpec) -> Sequence[tuple[str, str]]:
    try:
        here = None if spec.file is None else sources.locate(spec.file)
    except ConfigError:
        # That it is missing is told already.
        return ()
    engine = engine_class(spec.engine)
    # What is not downloaded yet cannot be looked at; what goes with it can.
    given = dict(spec.options) if spec.source is None else {**spec.options, "path": str(here or spec.source)}
    return engine.mistakes(msgspec.convert(given, engine.Options))


def unreadable_files(specs: Sequence[ModelSpec]) -> list[Mistake]:
    """Files that are here and no models. A server starts all the same: whoever asks for such a model hears of it."""
    return [
        Mistake(f"models.{spec.name}.source", wrong)
        for spec in specs
        if spec.engine == "llama" and spec.file is not None and (wrong := _wrong_in(spec.file)) is not None
    ]


def _wrong_in(source: str) -> str | None:
    try:
        path = sources.locate(source)
    except ConfigError:
        return None  # it is told as one that is missing
    try:
        if path is not None:
            read_metadata(path)
    except ConfigError as error:
        return str(error)
    return None


def adapter_files(spec: ModelSpec) -> dict[str, Path]:
    """By the name of the model that each makes."""
    entries = {name: spec.options["adapters"][name] for name in spec.adapters}
    paths = {name: entry if isinstance(entry, str) else entry["path"] for name, entry in entries.items()}
    return {name: Path(path).expanduser() for name, path in paths.items()}


def _folder_state(spec: ModelSpec) -> FileState:
    """Of a model whose engine finds the files by itself."""
    if spec.source is None or Path(spec.source).expanduser().is_dir():
        return "here"
    # What the hub has is fetched by the engine, which knows where it is kept.
    return "here" if spec.source.startswith(PREFIX) else "missing"


def _of_folder(spec: ModelSpec) -> Foreseen:
    state = _folder_state(spec)
    folder = None if spec.source is None else Path(spec.source).expanduser()
    if folder is None or not folder.is_dir():
        return Foreseen(file=state)
    described = next((found for name in sources.DESCRIPTIONS if (found := _json(folder / name))), {})
    length = described.get("max_position_embeddings")
    return Foreseen(detect(_template(folder), folder.name), length if isinstance(length, int) else None, state)


def _template(folder: Path) -> str | None:
    try:
        return read_description(folder / "chat_template.jinja")
    except (OSError, ValueError):
        found = _json(folder / "tokenizer_config.json").get("chat_template")
        return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    """Nothing where it is not there, or is something else: the engine will say what is wrong with it."""
    try:
        found = json.loads(read_description(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_file(source: str) -> Foreseen:
    state, metadata = _looked_at(source)
    return Foreseen(_detected(metadata), _trained_context(metadata), state, _writes(metadata))


def _looked_at(source: str) -> tuple[FileState, dict[str, Value]]:
    try:
        path = sources.locate(source)
    except ConfigError:
        return "missing", {}
    if path is None:
        return "not downloaded", {}
    try:
        return "here", read_metadata(path)
    except ConfigError:
        return "unreadable", {}


def _detected(metadata: Mapping[str, Value]) -> str | None:
    """What a configuration does not name, the model's chat template decides."""
    if not metadata or not _writes(metadata):
        return None
    template = metadata.get("tokenizer.chat_template")
    return detect(None if template is None else str(template), str(metadata.get("general.name", "")))


def _writes(metadata: Mapping[str, Value]) -> bool:
    """Whether it writes text, as far as its file says; a model that makes vectors has no syntax to speak of."""
    return metadata.get(f"{metadata.get('general.architecture')}.attention.causal") is not False


def _trained_context(metadata: Mapping[str, Value]) -> int | None:
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return length if isinstance(length, int) else None

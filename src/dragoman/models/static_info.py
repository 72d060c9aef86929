"""Describes models before they are loaded, from their configuration and their files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.config.diagnostics import Diagnostic
from dragoman.config.model_spec import ModelSpec
from dragoman.core.errors import ConfigError
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.files.discovery import read_description
from dragoman.files.gguf import Value, read_metadata
from dragoman.files.hub import PREFIX
from dragoman.formats import detect_format

FileState = Literal["here", "missing", "not downloaded", "unreadable"]


class StaticInfo(msgspec.Struct, frozen=True):
    """Static facts about a model; None where only its loaded engine knows."""

    format: str | None = None
    context: int | None = None
    file: FileState = "here"
    writes: bool = True


def read_static_info(spec: ModelSpec) -> StaticInfo:
    """Read the configuration and the start of the model's file, if it exists."""
    try:
        options = msgspec.convert(_option_values(spec, spec.source), engine_class(spec.engine).Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"models.{spec.name}: {error}") from error
    known = _folder_info(spec) if spec.file is None else _file_info(spec.file)
    # Custom engines may use these option names for other things.
    form, context = getattr(options, "format", None), getattr(options, "context", None)
    return StaticInfo(
        format=form if isinstance(form, str) else known.format,
        context=context if isinstance(context, int) else known.context,
        file=known.file,
        writes=known.writes,
    )


def _option_values(spec: ModelSpec, path: str | None) -> dict[str, Any]:
    return dict(spec.options) if path is None else {**spec.options, "path": path}


def find_missing_files(specs: Sequence[ModelSpec]) -> list[Diagnostic]:
    """Report missing files and folders; a file that can be downloaded is not missing."""
    missing = []
    for spec in specs:
        key = f"models.{spec.name}"
        try:
            if spec.file is not None:
                sources.locate(spec.file)
            elif _folder_state(spec) == "missing":
                missing.append(Diagnostic(f"{key}.source", f"folder not found: {spec.source}"))
        except ConfigError as error:
            missing.append(Diagnostic(f"{key}.source", str(error)))
        missing += [
            Diagnostic(f"{key}.adapters.{name}", f"adapter not found: {path}")
            for name, path in adapter_files(spec).items()
            if not (path.is_dir() if spec.file is None else path.is_file())
        ]
    return missing


def find_engine_mistakes(specs: Sequence[ModelSpec]) -> list[Diagnostic]:
    """Report what the engines find wrong with existing files."""
    return [
        Diagnostic(f"models.{spec.name}.{key}" if key else f"models.{spec.name}", message)
        for spec in specs
        for key, message in _engine_mistakes(spec)
    ]


def _engine_mistakes(spec: ModelSpec) -> Sequence[tuple[str, str]]:
    try:
        local = None if spec.file is None else sources.locate(spec.file)
    except ConfigError:
        # `find_missing_files` reports it.
        return ()
    engine = engine_class(spec.engine)
    values = _option_values(spec, None if spec.source is None else str(local or spec.source))
    return engine.mistakes(msgspec.convert(values, engine.Options))


def find_unreadable_files(specs: Sequence[ModelSpec]) -> list[Diagnostic]:
    """Report existing files that are not models. The server starts anyway; requests for such a model fail."""
    return [
        Diagnostic(f"models.{spec.name}.source", error)
        for spec in specs
        if spec.engine == "llama" and spec.file is not None and (error := _read_error(spec.file)) is not None
    ]


def _read_error(source: str) -> str | None:
    try:
        path = sources.locate(source)
    except ConfigError:
        return None  # `find_missing_files` reports it
    try:
        if path is not None:
            read_metadata(path)
    except ConfigError as error:
        return str(error)
    return None


def adapter_files(spec: ModelSpec) -> dict[str, Path]:
    """Return the adapter paths by model name."""
    entries = {name: spec.options["adapters"][name] for name in spec.adapters}
    paths = {name: entry if isinstance(entry, str) else entry["path"] for name, entry in entries.items()}
    return {name: Path(path).expanduser() for name, path in paths.items()}


def _folder_state(spec: ModelSpec) -> FileState:
    """State of a model whose engine locates its files itself."""
    if spec.source is None or Path(spec.source).expanduser().is_dir():
        return "here"
    # The engine downloads models of the hub.
    return "here" if spec.source.startswith(PREFIX) else "missing"


def _folder_info(spec: ModelSpec) -> StaticInfo:
    state = _folder_state(spec)
    folder = None if spec.source is None else Path(spec.source).expanduser()
    if folder is None or not folder.is_dir():
        return StaticInfo(file=state)
    config = next((found for name in sources.DESCRIPTION_FILES if (found := _read_json(folder / name))), {})
    length = config.get("max_position_embeddings")
    return StaticInfo(
        detect_format(_read_template(folder), folder.name), length if isinstance(length, int) else None, state
    )


def _read_template(folder: Path) -> str | None:
    try:
        return read_description(folder / "chat_template.jinja")
    except (OSError, ValueError):
        found = _read_json(folder / "tokenizer_config.json").get("chat_template")
        return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """Return an empty dict for a missing or invalid file; the engine reports what is wrong with it."""
    try:
        found = json.loads(read_description(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _file_info(source: str) -> StaticInfo:
    state, metadata = _read_file(source)
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return StaticInfo(_detect_format(metadata), context if isinstance(context, int) else None, state, _writes(metadata))


def _read_file(source: str) -> tuple[FileState, dict[str, Value]]:
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


def _detect_format(metadata: Mapping[str, Value]) -> str | None:
    """Detect the format from the chat template."""
    if not metadata or not _writes(metadata):
        return None
    template = metadata.get("tokenizer.chat_template")
    return detect_format(None if template is None else str(template), str(metadata.get("general.name", "")))


def _writes(metadata: Mapping[str, Value]) -> bool:
    """Whether the model generates text; an embedding model does not."""
    return metadata.get(f"{metadata.get('general.architecture')}.attention.causal") is not False

"""Defines a model name that clients can request, and what is known about the model before it is loaded."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.config.model_spec import NO_DEFAULTS, ModelSpec
from dragoman.core.engine import ModelInfo, list_models
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.core.features import Feature
from dragoman.files import sources
from dragoman.files.discovery import DiscoveredModel, read_description
from dragoman.files.gguf import read_metadata
from dragoman.formats import detect_format
from dragoman.models.model_host import ModelHost

FileState = Literal["here", "missing", "not downloaded", "unreadable"]


class StaticInfo(msgspec.Struct, frozen=True):
    """What is known about a model before it is loaded; None where only its loaded engine knows."""

    format: str | None = None
    context: int | None = None
    file: FileState = "here"
    generates_text: bool = True


def read_static_info(spec: ModelSpec) -> StaticInfo:
    """Read the configuration and the start of the model's file, if it exists."""
    options = spec.build_options()
    known = _read_files(spec)
    # Custom engines may use these option names for other things.
    form, context = getattr(options, "format", None), getattr(options, "context", None)
    return msgspec.structs.replace(
        known,
        format=form if isinstance(form, str) else known.format,
        context=context if isinstance(context, int) else known.context,
    )


def _read_files(spec: ModelSpec) -> StaticInfo:
    try:
        path = spec.locate()
    except ConfigError:
        return StaticInfo(file="missing")
    if path is None:
        # An engine that loads directories also downloads them.
        return StaticInfo(file="here" if spec.file is None else "not downloaded")
    if spec.file is None:
        return _read_directory(path)
    try:
        return _read_gguf(path)
    except ConfigError:
        return StaticInfo(file="unreadable")


def _read_gguf(path: Path) -> StaticInfo:
    metadata = read_metadata(path)
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    # An embedding model does not generate text.
    generates_text = metadata.get(f"{architecture}.attention.causal") is not False
    template = metadata.get("tokenizer.chat_template")
    name = str(metadata.get("general.name", ""))
    return StaticInfo(
        format=detect_format(None if template is None else str(template), name) if generates_text else None,
        context=context if isinstance(context, int) else None,
        generates_text=generates_text,
    )


def _read_directory(folder: Path) -> StaticInfo:
    config = next((found for name in sources.DESCRIPTION_FILES if (found := _read_json(folder / name))), {})
    length = config.get("max_position_embeddings")
    template: object
    try:
        template = read_description(folder / "chat_template.jinja")
    except (OSError, ValueError):
        template = _read_json(folder / "tokenizer_config.json").get("chat_template")
    form = detect_format(template if isinstance(template, str) else None, folder.name)
    return StaticInfo(form, length if isinstance(length, int) else None)


def _read_json(path: Path) -> dict[str, Any]:
    """Return an empty dict for a missing or invalid file; the engine reports what is wrong with it."""
    try:
        found = json.loads(read_description(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class ServedModel:
    def __init__(
        self, name: str, host: ModelHost, spec: ModelSpec | None = None, found: DiscoveredModel | None = None
    ) -> None:
        self.name = name
        self.host = host
        self.spec = spec
        self.found = found
        self.label = name
        """The name in metrics: always a known name, never one that a caller made up."""
        self.sampling = NO_DEFAULTS if spec is None else spec.sampling
        self._static_info: StaticInfo | None = None
        self.listed: ModelInfo | None = None
        """What the caller's engine said of it last."""

    @property
    def _engine_models(self) -> "list[ModelInfo]":
        return list(list_models(self.host.engine)) if self.host.engine else []

    @property
    def info(self) -> ModelInfo:
        """The engine's description of the model, once it is loaded."""
        if self.listed is not None:
            return self.listed
        return ModelInfo(self.name) if self.host.engine is None else self.host.engine.model_info(self.name)

    def member(self, name: str) -> "ServedModel | None":
        """Return one of the models that this one stands for; any name is accepted until the engine lists them."""
        known = self._engine_models
        if not known:
            model = ServedModel(name, self.host, self.spec)
            model.label = self.name
            return model
        return next((ServedModel(info.name, self.host, self.spec) for info in known if info.name.lower() == name), None)

    async def all(self) -> "list[ServedModel]":
        """Return the models that this one stands for, usually only itself."""
        if self.spec is None or not self.spec.is_open:
            return [self]
        try:
            engine = await self.host.ready()
        except DragomanError:
            return [self]
        return [ServedModel(info.name, self.host, self.spec) for info in list_models(engine)]

    @property
    def is_embedding_model(self) -> bool:
        """Whether it generates no text, as far as its engine or `static_info` is known."""
        if self.host.is_known:
            return Feature.EMBEDDINGS in self.host.supports and Feature.CHAT not in self.host.supports
        return self._static_info is not None and not self._static_info.generates_text

    async def static_info(self) -> StaticInfo:
        """Return what is known before the load; reads the file once, in a thread."""
        if self._static_info is None:
            try:
                spec = self.spec
                self._static_info = StaticInfo() if spec is None else await asyncio.to_thread(read_static_info, spec)
            except ConfigError:
                # A request for the model reports the error.
                self._static_info = StaticInfo()
        return self._static_info

"""Defines a model name that clients can request."""

import asyncio

from dragoman.config.model_spec import NO_DEFAULTS, ModelSpec, SamplingDefaults
from dragoman.core.engine import ModelInfo
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.files.discovery import DiscoveredModel
from dragoman.models import static_info
from dragoman.models.model_host import ModelHost
from dragoman.models.static_info import StaticInfo


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
        self._static_info: StaticInfo | None = None

    @property
    def _engine_models(self) -> "list[ModelInfo]":
        return list(self.host.engine.models()) if self.host.engine else []

    @property
    def info(self) -> ModelInfo:
        """The engine's description of the model, once it is loaded."""
        return next((info for info in self._engine_models if info.name == self.name), ModelInfo(self.name))

    @property
    def sampling(self) -> SamplingDefaults:
        return NO_DEFAULTS if self.spec is None else self.spec.sampling

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
        return [ServedModel(info.name, self.host, self.spec) for info in engine.models()]

    async def foreseen(self) -> StaticInfo:
        """Return what is known before the load; reads the file once, in a thread."""
        if self._static_info is None:
            self._static_info = await asyncio.to_thread(_read_static_info, self.spec)
        return self._static_info


def _read_static_info(spec: ModelSpec | None) -> StaticInfo:
    try:
        return StaticInfo() if spec is None else static_info.read_static_info(spec)
    except ConfigError:
        # A request for the model reports the error.
        return StaticInfo()

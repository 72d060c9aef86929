"""A name that can be asked for, and what is known of what answers to it."""

import asyncio

from dragoman.config.model_spec import NO_DEFAULTS, ModelSpec, SamplingDefaults
from dragoman.core.engine import ModelInfo
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.files.discovery import Found
from dragoman.models.model_host import Host
from dragoman.models.static_info import Foreseen, foreseen


class Model:
    def __init__(self, name: str, host: Host, spec: ModelSpec | None = None, found: Found | None = None) -> None:
        self.name = name
        self.host = host
        self.spec = spec
        self.found = found
        self.label = name
        """What it is counted as: a name that there is, not one that a caller may have made up."""
        self._foreseen: Foreseen | None = None

    @property
    def info(self) -> ModelInfo:
        """What the engine says of this model, once it is there to say it."""
        known = self.host.engine.models() if self.host.engine else ()
        return next((info for info in known if info.name == self.name), ModelInfo(self.name))

    @property
    def sampling(self) -> SamplingDefaults:
        return NO_DEFAULTS if self.spec is None else self.spec.sampling

    def below(self, name: str) -> "Model | None":
        """One of those that this one stands for. As long as nobody knows which there are, it may be any."""
        known = self.host.engine.models() if self.host.engine else ()
        if not known:
            model = Model(name, self.host, self.spec)
            model.label = self.name
            return model
        return next((Model(info.name, self.host, self.spec) for info in known if info.name.lower() == name), None)

    async def all(self) -> "list[Model]":
        """Those that it stands for, which its engine knows; mostly itself alone."""
        if self.spec is None or not self.spec.is_open:
            return [self]
        try:
            engine = await self.host.ready()
        except DragomanError:
            return [self]
        return [Model(info.name, self.host, self.spec) for info in engine.models()]

    async def foreseen(self) -> Foreseen:
        """Its file is looked at once, and nobody's reply waits for the disk."""
        if self._foreseen is None:
            self._foreseen = await asyncio.to_thread(_foreseen_or_nothing, self.spec)
        return self._foreseen


def _foreseen_or_nothing(spec: ModelSpec | None) -> Foreseen:
    try:
        return Foreseen() if spec is None else foreseen(spec)
    except ConfigError:
        # Whoever asks the model for something hears of it; a list can do without.
        return Foreseen()

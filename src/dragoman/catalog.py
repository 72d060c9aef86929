"""Which engine answers to which name.

    name -> trimmed, lower case -> a model, or an alias of one (exact, then the first pattern that fits), or 404

Rules
1. A name is never a path and never reaches the file system.
2. An engine is loaded once, however many ask for it at the same time; those who ask meanwhile wait for it.
3. Several models may share one engine; they then share its slots and its queue.
4. Until a model is loaded, what is known of it is what its configuration and its file say.
"""

import asyncio
import fnmatch
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from dragoman import sources
from dragoman.admission import Admission
from dragoman.config import Limits, ModelSpec, Settings
from dragoman.engines import engine_class
from dragoman.engines.interface import Engine, ModelInfo
from dragoman.errors import ConfigError, DragomanError, ModelFailed, ModelLoading, ModelNotFound
from dragoman.formats import detect, named
from dragoman.gguf import Value, read_metadata
from dragoman.worker.parent import WorkerEngine, options_of

log = logging.getLogger("dragoman.catalog")

State = Literal["cold", "loading", "ready", "failed"]
FileState = Literal["here", "missing", "not downloaded", "unreadable"]
STOP_SECONDS = 10.0
LONGEST_NAME = 500


class Host:
    """An engine on its way from a wish to a running thing."""

    def __init__(self, make: Callable[[], Awaitable[Engine]], limits: Limits) -> None:
        self._make = make
        self._limits = limits
        self._load: asyncio.Task[Engine] | None = None
        self.engine: Engine | None = None
        self.supports: frozenset[str] = frozenset()
        self.failure: str | None = None
        self.admission = Admission(None, limits.queue, limits.queue_seconds)

    @property
    def state(self) -> State:
        if self.engine is not None:
            return "ready"
        if self._load is not None:
            return "loading"
        return "failed" if self.failure else "cold"

    def load(self) -> "asyncio.Task[Engine]":
        """Begin to load it, if nobody has."""
        if self._load is None:
            self._load = asyncio.create_task(self._start())
            # Whoever waits hears of a failure; where nobody waits, `failure` tells.
            self._load.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._load

    async def ready(self) -> Engine:
        if self.engine is not None:
            return self.engine
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                return await asyncio.shield(self.load())
        except TimeoutError:
            raise ModelLoading("the model is still being loaded; try again later", retry_after=5) from None

    async def _start(self) -> Engine:
        engine = None
        try:
            engine = await self._make()
            await engine.start()
            for info in engine.models():
                named(info.format)
        except (Exception, asyncio.CancelledError) as error:
            if engine is not None:
                await _stopped(engine)
            if isinstance(error, asyncio.CancelledError):
                raise
            self.failure = str(error) or type(error).__name__
            # The words are for the operator: they may name files. Who tells the caller tells the log.
            raise ModelFailed("the model could not be loaded; the server's log says why", retry_after=10) from error
        finally:
            self._load = None
        self.failure = None
        self.supports = engine.supports()
        self.admission = Admission(engine.slots, self._limits.queue, self._limits.queue_seconds)
        self.engine = engine
        return engine

    async def stop(self) -> None:
        if self._load is not None:
            self._load.cancel()
            await asyncio.wait([self._load])
        if self.engine is not None:
            await _stopped(self.engine)


async def _stopped(engine: Engine) -> None:
    """An engine that does not end, or fails to, must not keep the server from ending."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await engine.stop()
    except TimeoutError:
        log.error("an engine (%s) did not stop within %g s", type(engine).__name__, STOP_SECONDS)
    except Exception:
        log.exception("an engine (%s) failed to stop", type(engine).__name__)


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
    file, metadata = _looked_at(spec.source)
    # Engines of others may call something else by these names.
    form, context = getattr(options, "format", None), getattr(options, "context", None)
    return Foreseen(
        format=form if isinstance(form, str) else _detected(metadata),
        context=context if isinstance(context, int) else _trained_context(metadata),
        file=file,
        writes=_writes(metadata),
    )


def _looked_at(source: str | None) -> tuple[FileState, dict[str, Value]]:
    if source is None:
        return "here", {}
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


class Model:
    def __init__(self, name: str, host: Host, spec: ModelSpec | None = None) -> None:
        self.name = name
        self.host = host
        self._spec = spec
        self._foreseen: Foreseen | None = None

    @property
    def info(self) -> ModelInfo:
        """What the engine says of this model, once it is there to say it."""
        known = self.host.engine.models() if self.host.engine else ()
        return next((info for info in known if info.name == self.name), ModelInfo(self.name))

    def has(self, name: str) -> bool:
        return self._spec is not None and self._spec.has(name)

    def below(self, name: str) -> "Model | None":
        """One of those that this one stands for. As long as nobody knows which there are, it may be any."""
        known = self.host.engine.models() if self.host.engine else ()
        if not known:
            return Model(name, self.host)
        return next((Model(info.name, self.host) for info in known if info.name.lower() == name), None)

    async def all(self) -> "list[Model]":
        if self._spec is None or not self._spec.is_open:
            return [self]
        try:
            engine = await self.host.ready()
        except DragomanError:
            return [self]
        return [Model(info.name, self.host) for info in engine.models()]

    async def foreseen(self) -> Foreseen:
        """Its file is looked at once, and nobody's reply waits for the disk."""
        if self._foreseen is None:
            self._foreseen = await asyncio.to_thread(_foreseen_or_nothing, self._spec)
        return self._foreseen


def _foreseen_or_nothing(spec: ModelSpec | None) -> Foreseen:
    try:
        return Foreseen() if spec is None else foreseen(spec)
    except ConfigError:
        # Whoever asks the model for something hears of it; a list can do without.
        return Foreseen()


class Catalog:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = ()) -> None:
        self.models: dict[str, Model] = {}
        self._hosts: list[Host] = []
        for engine in engines:
            self._add([info.name for info in engine.models()], _as_is(engine), settings.limits)
        for spec in settings.models:
            self._add([spec.name], _from(spec, settings.limits), settings.limits, spec)
        self._aliases: dict[str, str] = {pattern.lower(): target for pattern, target in settings.aliases.items()}
        self.default = settings.default or next(iter(self.models), None)

    def _add(
        self,
        names: Sequence[str],
        make: Callable[[], Awaitable[Engine]],
        limits: Limits,
        spec: ModelSpec | None = None,
    ) -> None:
        if not names:
            raise ConfigError("an engine offers no models: `models()` must name at least one")
        host = Host(make, limits)
        self._hosts.append(host)
        for name in names:
            if name.lower() in self.models:
                raise ConfigError(f"two models are called {name!r}")
            self.models[name.lower()] = Model(name, host, spec)

    def resolve(self, name: str) -> Model:
        wanted = name.strip().lower() or (self.default or "").lower()
        found = self._called(wanted)
        if found is None and (target := self._alias(wanted)) is not None:
            found = self._called(target.lower())
        if found is not None:
            return found
        raise ModelNotFound(self._unknown(name), param="model")

    def _called(self, name: str) -> Model | None:
        if name in self.models or len(name) > LONGEST_NAME:
            return self.models.get(name)
        for model in self.models.values():
            if model.has(name):
                return model.below(name)
        return None

    async def listed(self) -> list[Model]:
        """All that can be asked for. What a model stands for is known when its engine is there."""
        return [found for model in self.models.values() for found in await model.all()]

    def _alias(self, wanted: str) -> str | None:
        if wanted in self._aliases:
            return self._aliases[wanted]
        return next((target for pattern, target in self._aliases.items() if fnmatch.fnmatchcase(wanted, pattern)), None)

    def _unknown(self, name: str) -> str:
        shown = name if len(name) <= 100 else name[:100] + "…"
        models = ", ".join(model.name for model in self.models.values()) or "none"
        aliases = ", ".join(self._aliases) or "none"
        words = f"model {shown!r} is not served here; models: {models} (aliases: {aliases})."
        return f"{words} Start with --alias 'NAME={self.default}' to map it." if self.default else words

    async def stop(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))


def _as_is(engine: Engine) -> Callable[[], Awaitable[Engine]]:
    async def make() -> Engine:
        return engine

    return make


def _from(spec: ModelSpec, limits: Limits) -> Callable[[], Awaitable[Engine]]:
    async def make() -> Engine:
        cls = engine_class(spec.engine)
        given = dict(spec.options)
        if spec.source is not None:
            path = sources.locate(spec.source) or await asyncio.to_thread(sources.fetch, spec.source)
            given["path"] = str(path)
        try:
            options = msgspec.convert(given, cls.Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"models.{spec.name}: {error}") from error
        if cls.needs_worker(options):
            return WorkerEngine(spec.engine, spec.name, options_of(options), limits.stall_seconds)
        return cls.configured(spec.name, options)

    return make

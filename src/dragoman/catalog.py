"""Which engine answers to which name.

    name -> trimmed, lower case -> a model, or an alias of one (exact, then the first pattern that fits), or 404

Rules
1. A name is never a path and never reaches the file system.
2. An engine is loaded once, however many ask for it at the same time; those who ask meanwhile wait for it.
3. Several models may share one engine; they then share its slots and its queue.
"""

import asyncio
import fnmatch
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from dragoman import sources
from dragoman.admission import Admission
from dragoman.config import Limits, ModelSpec, Settings
from dragoman.engines import engine_class
from dragoman.engines.interface import Engine, ModelInfo
from dragoman.errors import ConfigError, ModelFailed, ModelLoading, ModelNotFound
from dragoman.formats import named
from dragoman.worker.parent import WorkerEngine, options_of

log = logging.getLogger("dragoman.catalog")

State = Literal["cold", "loading", "ready", "failed"]
STOP_SECONDS = 10.0


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


class Model:
    def __init__(self, name: str, host: Host) -> None:
        self.name = name
        self.host = host

    @property
    def info(self) -> ModelInfo:
        """What the engine says of this model, once it is there to say it."""
        known = self.host.engine.models() if self.host.engine else ()
        return next((info for info in known if info.name == self.name), ModelInfo(self.name))


class Catalog:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = ()) -> None:
        self.models: dict[str, Model] = {}
        self._hosts: list[Host] = []
        for engine in engines:
            self._add([info.name for info in engine.models()], _as_is(engine), settings.limits)
        for spec in settings.models:
            self._add([spec.name], _from(spec, settings.limits), settings.limits)
        self._aliases: dict[str, str] = {pattern.lower(): target for pattern, target in settings.aliases.items()}
        self.default = settings.default or next(iter(self.models), None)

    def _add(self, names: Sequence[str], make: Callable[[], Awaitable[Engine]], limits: Limits) -> None:
        if not names:
            raise ConfigError("an engine offers no models: `models()` must name at least one")
        host = Host(make, limits)
        self._hosts.append(host)
        for name in names:
            if name.lower() in self.models:
                raise ConfigError(f"two models are called {name!r}")
            self.models[name.lower()] = Model(name, host)

    def resolve(self, name: str) -> Model:
        wanted = name.strip().lower() or (self.default or "").lower()
        if wanted in self.models:
            return self.models[wanted]
        if (target := self._alias(wanted)) is not None:
            return self.models[target.lower()]
        raise ModelNotFound(self._unknown(name), param="model")

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

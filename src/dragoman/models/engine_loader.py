"""Builds, loads, measures and unloads the engine of a model, and records why a load failed.

Rules
1. A model whose worker is being restarted keeps its memory.
2. After a failed load, requests are refused for a pause that grows with each failure. An operator's load request does
   not wait, and a new configuration resets the pause.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.quantities import format_size
from dragoman.config.settings import Limits
from dragoman.core.daemon_thread import run_in_daemon_thread
from dragoman.core.engine import Engine, call_engine, list_models, start_engine
from dragoman.core.errors import ConfigError, DragomanError, ModelFailed
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.formats import get_format
from dragoman.ipc.child_process import YOUNG_SECONDS, RestartBackoff
from dragoman.ipc.worker_engine import MAX_DEATHS, WorkerEngine
from dragoman.models.fingerprint import model_fingerprint
from dragoman.models.memory import expected_memory, remember_memory, session_memory
from dragoman.models.residency import Event, MemoryMeasured, ModelLost

log = logging.getLogger("dragoman.models")

OnEngineLost = Callable[[str], None]
"""Called with the reason when an engine will not come back by itself."""
BuildEngine = Callable[[OnEngineLost], Awaitable[Engine]]
EngineFactory = Callable[[ModelSpec, Limits, OnEngineLost], Awaitable[Engine]]

STOP_SECONDS = 10.0
EXPECTED_SECONDS = 5.0
"""Expected load time before the first load."""
FIRST_PAUSE = 5.0
MAX_PAUSE = 60.0
"""Pause between a failed load and the next one that a request or a probe may start."""
NOT_LOADED = "the model could not be loaded; see the server's log"


async def local_engine(spec: ModelSpec, limits: Limits, on_lost: OnEngineLost) -> Engine:
    """Build the engine in this process, or in a worker if it needs one."""
    cls = engine_class(spec.engine)
    path = None
    if spec.file is not None:
        path = spec.locate() or await run_in_daemon_thread(partial(sources.fetch, spec.file))
    options = spec.build_options(path)
    if not cls.needs_worker(options):
        return cls.configured(spec.name, options)
    plain = msgspec.to_builtins(options)
    return WorkerEngine(spec.engine, spec.name, plain, limits.stall_seconds, on_lost, limits.load_seconds)


class LoadFailures:
    """The last load failure of a model, and the pause before the next attempt."""

    def __init__(self) -> None:
        self.message: str | None = None
        self.refused_until = -math.inf
        """Until then, requests do not start another load."""
        self._loaded_at = math.inf
        """Time of the last load, if it was after the last failure."""
        self.reset_pause()

    def reset_pause(self) -> None:
        self._backoff = RestartBackoff(FIRST_PAUSE, MAX_PAUSE, first=FIRST_PAUSE)
        self._failed_at = -math.inf
        self.refused_until = -math.inf

    def note_loaded(self) -> None:
        self.message, self.refused_until, self._loaded_at = None, -math.inf, time.monotonic()

    def note_lost(self, message: str, load_seconds: float) -> None:
        now = time.monotonic()
        # A worker is given up after several early deaths, and loads the model as often in between.
        young = MAX_DEATHS * (YOUNG_SECONDS + load_seconds)
        self._backoff.note_failure(max(0.0, now - self._loaded_at), young)
        self.message, self._failed_at, self._loaded_at = message, now, math.inf

    def note_failed(self, message: str, load_seconds: float) -> None:
        self.note_lost(message, load_seconds)
        self.refused_until = self._failed_at + self._backoff.pause

    @property
    def is_pause_over(self) -> bool:
        return time.monotonic() - self._failed_at >= self._backoff.pause


class EngineLoader:
    """The engine of one model. Without a spec, its memory is unknown and nothing is remembered."""

    def __init__(self, key: str, build: BuildEngine, spec: ModelSpec | None, feed: Callable[[Event], None]) -> None:
        self.key = key
        self.spec = spec
        self.engine: Engine | None = None
        self.supports: frozenset[str] = frozenset()
        self.reads_fields: tuple[str, ...] = ()
        self.reads_headers: tuple[str, ...] = ()
        self.is_known = False
        """Whether it has been loaded before, so that `supports` is known."""
        self.fingerprint = ""
        """Identifies the loaded model in replies."""
        self.memory = 0
        self.failures = LoadFailures()
        self.load_seconds = EXPECTED_SECONDS
        self._build = build
        self._feed = feed
        """Reports what happens to a loaded engine."""
        self._loading: Engine | None = None
        self._load_started_at = 0.0

    @property
    def failure(self) -> str | None:
        return self.failures.message

    @property
    def pid(self) -> int | None:
        control = None if self.engine is None else self.engine.worker_control
        return None if control is None else control.pid

    def estimate_memory(self) -> int:
        """Return the memory that the model will need. Blocks: it may download files."""
        return 0 if self.spec is None else expected_memory(self.spec)

    def remember_memory(self, size: int) -> None:
        """Store a measurement for the next estimate. Blocks."""
        if self.spec is not None:
            remember_memory(self.spec, size)

    async def start(self) -> int:
        """Load the model and return the memory it takes."""
        self._load_started_at = time.monotonic()
        log.info("model %s: loading", self.key)
        try:
            engine = await self._start_engine()
        except Exception as error:
            self.fail(error)
            raise
        self.failures.note_loaded()
        self.engine, self.supports, self.is_known = engine, engine.supports(), True
        self.reads_fields, self.reads_headers = tuple(engine.reads_fields), tuple(engine.reads_headers)
        self.fingerprint = await asyncio.to_thread(model_fingerprint, self.spec, engine)
        self.memory = await asyncio.to_thread(session_memory, self.pid)
        if self.engine is None:
            # The engine was lost during the measurement.
            raise ModelFailed(NOT_LOADED)
        self.load_seconds = time.monotonic() - self._load_started_at
        log.info("model %s: ready after %.1f s, %s", self.key, self.load_seconds, format_size(self.memory))
        return self.memory

    async def _start_engine(self) -> Engine:
        try:
            self._loading = engine = await self._build(self.lose_engine)
            await start_engine(engine)
            for info in list_models(engine):
                get_format(info.format)
        except (Exception, asyncio.CancelledError):
            if self._loading is not None:
                await stop_engine(self._loading)
            raise
        finally:
            self._loading = None
        return engine

    async def measure(self) -> int:
        """Return the memory it takes now, and report growth."""
        now = await asyncio.to_thread(session_memory, self.pid)
        if now > self.memory:
            self.memory = now
            self._feed(MemoryMeasured(self.key, now))
        return now

    async def unload(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await stop_engine(engine)

    def lose_engine(self, reason: str) -> None:
        """Forget an engine that will not come back by itself."""
        self.failures.note_lost(reason, self.load_seconds)
        self.engine = None
        log.error("model %s: %s", self.key, reason)
        self._feed(ModelLost(self.key))

    def fail(self, error: Exception) -> None:
        """Record and log that the model could not be loaded."""
        message = str(error) or type(error).__name__
        if self.spec is not None and self.spec.location is not None and isinstance(error, ConfigError):
            message = f"{self.spec.location}: models.{self.spec.name}: {message}"
        self.failures.note_failed(message, self.load_seconds)
        is_expected = isinstance(error, ConfigError | DragomanError | OSError)
        log.error("model %s: not loaded: %s", self.key, message, exc_info=None if is_expected else error)

    def refusal(self) -> ModelFailed:
        """Build the error for a request to a model that cannot be loaded."""
        error = ModelFailed(NOT_LOADED, retry_after=max(1.0, self.failures.refused_until - time.monotonic()))
        # The reason may name files: it goes to the log, not to the client.
        error.__cause__ = ConfigError(self.failure or "it could not be loaded")
        return error


async def stop_engine(engine: Engine) -> None:
    """Stop an engine; a hanging or failing stop is logged and does not block the server."""
    stop: Callable[[], Awaitable[None] | None] = engine.stop
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await call_engine(stop)
    except TimeoutError:
        log.error("an engine (%s) did not stop within %g s", type(engine).__name__, STOP_SECONDS)
    except Exception:
        log.exception("an engine (%s) failed to stop", type(engine).__name__)

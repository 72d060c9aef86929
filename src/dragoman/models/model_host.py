"""Holds the engine of a model: loads and unloads it, and admits the requests that use it.

Rules
1. A request enters before it uses the engine and leaves afterwards. In between the engine stays loaded.
2. A model whose worker is being restarted is in the state "loading" and keeps its memory.
3. After a failed load, requests are refused for a pause that grows with each failure. An operator's load request does
   not wait, and a new configuration resets the pause.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from dragoman.config.quantities import format_size
from dragoman.config.settings import Limits
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, DragomanError, ModelFailed, ModelLoading, QueueFull
from dragoman.formats import get_format
from dragoman.ipc.restart_backoff import YOUNG_SECONDS, RestartBackoff
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_supervisor import MOST_DEATHS
from dragoman.models.admission import Admission
from dragoman.models.process_memory import session_memory
from dragoman.models.residency import ResidencyState

log = logging.getLogger("dragoman.models")

State = Literal["cold", "waiting", "loading", "ready", "unloading", "failed"]
STOP_SECONDS = 10.0
EXPECTED_SECONDS = 5.0
"""Expected load time before the first load."""
SPEED_WEIGHT = 0.2
"""Weight of the newest generation in the average speed."""
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
"""Pause between a failed load and the next one that a request or a probe may start."""
NOT_LOADED = "the model could not be loaded; see the server's log"

OnEngineLost = Callable[[str], None]
"""Called with the reason when an engine will not come back by itself."""
BuildEngine = Callable[[OnEngineLost], Awaitable[Engine]]


class LifecyclePort(Protocol):
    """Decides when a host loads and unloads."""

    def residency_of(self, host: "ModelHost") -> ResidencyState: ...

    def enter(self, host: "ModelHost") -> bool: ...

    def wait_for_entry(self, host: "ModelHost") -> "asyncio.Future[None]": ...

    def cancel_entry(self, host: "ModelHost", entry: "asyncio.Future[None]") -> None: ...

    def leave(self, host: "ModelHost") -> None: ...

    def request_load(self, host: "ModelHost") -> None: ...

    def report_lost(self, host: "ModelHost") -> None: ...

    def report_memory(self, host: "ModelHost") -> None: ...


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
        self._backoff = RestartBackoff(FIRST_PAUSE, LONGEST_PAUSE, first=FIRST_PAUSE)
        self._failed_at = -math.inf
        self.refused_until = -math.inf

    def note_loaded(self) -> None:
        self.message, self.refused_until, self._loaded_at = None, -math.inf, time.monotonic()

    def note_lost(self, message: str, load_seconds: float) -> None:
        now = time.monotonic()
        # A worker is given up after several early deaths, and loads the model as often in between.
        young = MOST_DEATHS * (YOUNG_SECONDS + load_seconds)
        self._backoff.note_failure(max(0.0, now - self._loaded_at), young)
        self.message, self._failed_at, self._loaded_at = message, now, math.inf

    def note_failed(self, message: str, load_seconds: float) -> None:
        self.note_lost(message, load_seconds)
        self.refused_until = self._failed_at + self._backoff.pause

    @property
    def is_pause_over(self) -> bool:
        return time.monotonic() - self._failed_at >= self._backoff.pause


class LoadableEngine:
    """The engine of a host while it is loaded, measured and unloaded."""

    def __init__(self, key: str, build: BuildEngine) -> None:
        self.key = key
        self.engine: Engine | None = None
        self.supports: frozenset[str] = frozenset()
        self.is_known = False
        """Whether it has been loaded before, so that `supports` is known."""
        self.memory = 0
        self.failures = LoadFailures()
        self.load_seconds = EXPECTED_SECONDS
        self._build = build
        self._loading: Engine | None = None
        self._load_started_at = 0.0

    @property
    def failure(self) -> str | None:
        return self.failures.message

    @property
    def progress(self) -> float | None:
        """The loaded fraction, from 0 to 1, if the engine reports it."""
        engine = self._loading or self._restarting
        return None if engine is None else engine.progress

    @property
    def is_restarting(self) -> bool:
        """Whether the worker of a loaded model is being restarted."""
        return self._restarting is not None

    @property
    def _restarting(self) -> WorkerEngine | None:
        return self.engine if isinstance(self.engine, WorkerEngine) and self.engine.is_restarting else None

    @property
    def elapsed_load_seconds(self) -> float:
        restarting = self._restarting
        return time.monotonic() - self._load_started_at if restarting is None else restarting.restart_seconds

    @property
    def pid(self) -> int | None:
        return self.engine.pid if isinstance(self.engine, WorkerEngine) else None

    async def load_engine(self, on_lost: OnEngineLost) -> Engine:
        self._load_started_at = time.monotonic()
        log.info("model %s: loading", self.key)
        try:
            self._loading = engine = await self._build(on_lost)
            await engine.start()
            for info in engine.models():
                get_format(info.format)
        except (Exception, asyncio.CancelledError):
            if self._loading is not None:
                await stop_engine(self._loading)
            raise
        finally:
            self._loading = None
        self.failures.note_loaded()
        self.engine = engine
        self.supports = engine.supports()
        self.is_known = True
        return engine

    async def measure_load(self) -> int:
        """Measure the memory of an engine that has just been loaded."""
        self.memory = await asyncio.to_thread(session_memory, self.pid)
        if self.engine is None:
            # The engine was lost during the measurement.
            raise ModelFailed(NOT_LOADED)
        self.load_seconds = time.monotonic() - self._load_started_at
        log.info("model %s: ready after %.1f s, %s", self.key, self.load_seconds, format_size(self.memory))
        return self.memory

    async def unload(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await stop_engine(engine)


class ModelHost(LoadableEngine):
    """A model's engine and the requests that use it.

    `estimate_memory` returns the memory it will need and runs in a thread; `remember_memory` gets what was measured.
    `config_location` is the file and the key that configure the model.
    """

    def __init__(
        self,
        key: str,
        build: BuildEngine,
        lifecycle: LifecyclePort,
        limits: Limits,
        slots: int | None = None,
        estimate_memory: Callable[[], int] = int,
        remember_memory: Callable[[int], None] = lambda size: None,
        config_location: str | None = None,
    ) -> None:
        super().__init__(key, build)
        self.estimate_memory = estimate_memory
        self.remember_memory = remember_memory
        self.config_location = config_location
        self.limits = limits
        self.tokens_per_second: float | None = None
        self.admission = Admission(slots, limits.queue, limits.queue_seconds)
        self._lifecycle = lifecycle
        self._waiting_for_restart = 0

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self.admission.set_limits(limits.queue, limits.queue_seconds)

    @property
    def state(self) -> State:
        residency = self._lifecycle.residency_of(self)
        if residency.state == "out":
            return "waiting" if residency.is_wanted else "failed" if self.failure else "cold"
        if residency.state == "in" and self.is_restarting:
            return "loading"
        states: dict[str, State] = {"loading": "loading", "in": "ready", "leaving": "unloading"}
        return states[residency.state]

    @property
    def loading_seconds(self) -> float | None:
        """Seconds since the current load or restart began."""
        return self.elapsed_load_seconds if self.state == "loading" else None

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model to be loaded."""
        return len(self._lifecycle.residency_of(self).waiting) + self._waiting_for_restart

    def try_enter(self) -> Engine | None:
        """Return the engine if it is ready. The caller must `leave`."""
        if self.engine is None or self.is_restarting:
            return None
        return self.engine if self._lifecycle.enter(self) else None

    async def enter(self) -> Engine:
        """Return the engine, loaded if necessary. The caller must `leave`."""
        engine = self.try_enter()
        if engine is not None:
            return engine
        if self.state == "failed" and self.failures.refused_until > time.monotonic():
            raise self.refusal()
        if not self.limits.load_seconds:
            self.load()
            raise self._still_loading()
        deadline = time.monotonic() + self.limits.load_seconds
        await self._wait_for_load(self.limits.load_seconds)
        if self._restarting is not None:
            await self._wait_for_restart(self._restarting, deadline - time.monotonic())
        if self.engine is None:
            # The engine was lost as soon as it was loaded.
            self.leave()
            raise ModelFailed(NOT_LOADED, retry_after=1)
        return self.engine

    async def _wait_for_load(self, seconds: float) -> None:
        if self.waiting >= self.limits.queue + (self.admission.slots or math.inf):
            raise QueueFull(f"the queue of this model is full ({self.limits.queue} requests wait); try again later")
        entry = self._lifecycle.wait_for_entry(self)
        try:
            async with asyncio.timeout(seconds):
                await entry
        except (asyncio.CancelledError, TimeoutError) as error:
            self._lifecycle.cancel_entry(self, entry)
            if isinstance(error, TimeoutError):
                raise self._still_loading() from None
            raise

    async def _wait_for_restart(self, engine: WorkerEngine, seconds: float) -> None:
        """Wait for the worker; a request that has entered leaves on failure."""
        self._waiting_for_restart += 1
        try:
            async with asyncio.timeout(seconds):
                await engine.wait_until_running()
        except BaseException as error:
            self.leave()
            if isinstance(error, TimeoutError):
                raise self._still_loading() from None
            raise
        finally:
            self._waiting_for_restart -= 1

    def _still_loading(self) -> ModelLoading:
        left = self.load_seconds - (self.loading_seconds or 0)
        return ModelLoading("the model is still being loaded; try again later", retry_after=max(1.0, left))

    def refusal(self) -> ModelFailed:
        """Build the error for a request to a model that cannot be loaded."""
        error = ModelFailed(NOT_LOADED, retry_after=max(1.0, self.failures.refused_until - time.monotonic()))
        # The reason may name files: it goes to the log, not to the client.
        error.__cause__ = ConfigError(self.failure or "it could not be loaded")
        return error

    def leave(self) -> None:
        self._lifecycle.leave(self)

    @asynccontextmanager
    async def use_engine(self) -> AsyncIterator[Engine]:
        engine = self.try_enter() or await self.enter()
        try:
            yield engine
        finally:
            self.leave()

    async def ready(self) -> Engine:
        """Return the engine, loaded if necessary, without holding it."""
        async with self.use_engine() as engine:
            return engine

    def load(self) -> None:
        """Start to load the model, unless it is loaded or loading."""
        self._lifecycle.request_load(self)

    def retry_load(self) -> None:
        """Start to load a failed model if its pause is over; for callers that poll."""
        if self.state == "failed" and self.failures.is_pause_over:
            self.load()

    def note_speed(self, tokens: int, seconds: float) -> None:
        if tokens > 1 and seconds > 0:
            speed, known = tokens / seconds, self.tokens_per_second
            self.tokens_per_second = speed if known is None else known + SPEED_WEIGHT * (speed - known)

    async def start(self) -> int:
        """Load the model and return the memory it takes."""
        try:
            engine = await self.load_engine(self._handle_engine_lost)
        except Exception as error:
            self.fail(error)
            raise
        self.admission.resize(engine.slots)
        return await self.measure_load()

    def fail(self, error: Exception) -> None:
        """Record and log that the model could not be loaded."""
        message = str(error) or type(error).__name__
        if self.config_location is not None and isinstance(error, ConfigError):
            key = self.config_location.rpartition(" ")[2]
            message = f"{self.config_location}: {message.removeprefix(f'{key}: ')}"
        self.failures.note_failed(message, self.load_seconds)
        is_expected = isinstance(error, ConfigError | DragomanError | OSError)
        log.error("model %s: not loaded: %s", self.key, message, exc_info=None if is_expected else error)

    async def measure(self) -> int:
        """Return the memory it takes now, and report growth to the lifecycle."""
        now = await asyncio.to_thread(session_memory, self.pid)
        if now > self.memory:
            self.memory = now
            self._lifecycle.report_memory(self)
        return now

    def _handle_engine_lost(self, reason: str) -> None:
        self.failures.note_lost(reason, self.load_seconds)
        self.engine = None
        log.error("model %s: %s", self.key, reason)
        self._lifecycle.report_lost(self)


async def stop_engine(engine: Engine) -> None:
    """Stop an engine; a hanging or failing stop is logged and does not block the server."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await engine.stop()
    except TimeoutError:
        log.error("an engine (%s) did not stop within %g s", type(engine).__name__, STOP_SECONDS)
    except Exception:
        log.exception("an engine (%s) failed to stop", type(engine).__name__)

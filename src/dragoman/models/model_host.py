"""Admits requests to a model, and waits until its engine is loaded.

Rules
1. A request enters before it uses the engine and leaves afterwards. In between the engine stays loaded.
2. A model whose worker is being restarted is in the state "loading".
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.core.engine import Engine, WorkerControl
from dragoman.core.errors import ModelFailed, ModelLoading, QueueFull
from dragoman.models.admission import Admission
from dragoman.models.engine_loader import NOT_LOADED, BuildEngine, EngineLoader
from dragoman.models.lifecycle import Lifecycle
from dragoman.models.residency import LoadRequested

State = Literal["cold", "waiting", "loading", "ready", "unloading", "failed"]
SPEED_WEIGHT = 0.2
"""Weight of the newest generation in the average speed."""
MIN_SPEED_SECONDS = 0.001
"""A reply that takes less arrived in one piece, which says nothing about the speed."""


class ModelHost(EngineLoader):
    """A model's engine and the requests that use it."""

    def __init__(
        self,
        key: str,
        build: BuildEngine,
        lifecycle: Lifecycle,
        limits: Limits,
        slots: int | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        super().__init__(key, build, spec, lifecycle.feed)
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
        current = self._lifecycle.residency_of(self)
        if current.state == "unloaded":
            return "waiting" if current.is_wanted else "failed" if self.failure else "cold"
        if current.state == "loaded":
            return "loading" if self.is_restarting else "ready"
        return "loading" if current.state == "loading" else "unloading"

    @property
    def loading_seconds(self) -> float | None:
        """Seconds since the current load or restart began."""
        if self.state != "loading":
            return None
        if self._restarting_worker is not None:
            return self._restarting_worker.restart_seconds
        return time.monotonic() - self._load_started_at

    @property
    def is_restarting(self) -> bool:
        """Whether the engine's worker is being restarted."""
        return self._restarting_worker is not None

    @property
    def _restarting_worker(self) -> WorkerControl | None:
        worker = None if self.engine is None else self.engine.worker_control
        return worker if worker is not None and worker.is_restarting else None

    @property
    def progress(self) -> float | None:
        """The loaded fraction, from 0 to 1, if the engine reports it."""
        engine = self._loading or (self.engine if self.is_restarting else None)
        return None if engine is None else engine.progress

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model to be loaded."""
        return len(self._lifecycle.residency_of(self).waiting) + self._waiting_for_restart

    def try_enter(self) -> Engine | None:
        """Return the engine if it is ready. The caller must `leave`."""
        if self.engine is None or self.is_restarting:
            return None
        return self.engine if self._lifecycle.residency.enter(self.key) else None

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
        if self.waiting >= self.limits.queue + (self.admission.slots or math.inf):
            raise QueueFull(f"the queue of this model is full ({self.limits.queue} requests wait); try again later")
        try:
            async with asyncio.timeout(self.limits.load_seconds):
                await self._lifecycle.wait_for_entry(self)
                if self._restarting_worker is not None:
                    await self._wait_for_restart(self._restarting_worker)
        except TimeoutError:
            raise self._still_loading() from None
        if self.engine is None:
            # The engine was lost as soon as it was loaded.
            self.leave()
            raise ModelFailed(NOT_LOADED, retry_after=1)
        return self.engine

    async def _wait_for_restart(self, worker: WorkerControl) -> None:
        """Wait for the worker; a request that has entered leaves on failure."""
        self._waiting_for_restart += 1
        try:
            await worker.wait_until_running()
        except BaseException:
            self.leave()
            raise
        finally:
            self._waiting_for_restart -= 1

    def _still_loading(self) -> ModelLoading:
        left = self.load_seconds - (self.loading_seconds or 0)
        return ModelLoading("the model is still being loaded; try again later", retry_after=max(1.0, left))

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
        self._feed(LoadRequested(self.key))

    def retry_load(self) -> None:
        """Start to load a failed model if its pause is over; for callers that poll."""
        if self.state == "failed" and self.failures.is_pause_over:
            self.load()

    def note_speed(self, tokens: int, seconds: float) -> None:
        if tokens > 1 and seconds >= MIN_SPEED_SECONDS:
            speed, known = tokens / seconds, self.tokens_per_second
            self.tokens_per_second = speed if known is None else known + SPEED_WEIGHT * (speed - known)

    async def start(self) -> int:
        size = await super().start()
        assert self.engine is not None
        self.admission.resize(self.engine.slots)
        return size

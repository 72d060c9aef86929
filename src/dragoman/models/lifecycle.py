"""Carries out the decisions of `residency`: loads and unloads hosts and admits waiting requests.

This module decides nothing. Each event goes to `Residency`, each effect that it returns is carried out, and the outcome
is the next event.
"""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any

from dragoman.config.quantities import format_size
from dragoman.core.daemon_thread import run_in_daemon_thread
from dragoman.core.errors import ConfigError, ModelFailed
from dragoman.models import residency
from dragoman.models.engine_loader import EngineLoader
from dragoman.models.residency import Residency, ResidencyState

log = logging.getLogger("dragoman.models")

UNLOADED = "the model was unloaded while it was being loaded; try again"


class Lifecycle:
    def __init__(self, budget: int | None, turn: float) -> None:
        self.residency = Residency(budget, turn)
        self._hosts: dict[str, EngineLoader] = {}
        self._name_counts: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[str, asyncio.Task[None]] = {}
        """The last load of each host."""
        self._is_stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf

    @property
    def budget(self) -> int | None:
        return self.residency.budget

    def add(self, host: EngineLoader, keep_alive: float, is_pinned: bool = False) -> None:
        """Add a host, or change the keep-alive time of a known one."""
        self._hosts[host.key] = host
        self.feed(residency.ModelAdded(host.key, keep_alive, is_pinned))

    def new_key(self, name: str) -> str:
        """Return an unused key: an older host of this name may still have requests."""
        self._name_counts[name] = number = self._name_counts.get(name, 0) + 1
        return name if number == 1 else f"{name} ({number})"

    def residency_of(self, host: EngineLoader) -> ResidencyState:
        return self.residency.models.get(host.key) or ResidencyState()

    async def wait_for_entry(self, host: EngineLoader) -> None:
        """Wait until the host is loaded and admits the request, which must `leave`."""
        entry: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_gone = host.key not in self._hosts
        if is_gone:
            # The host was removed while the request waited for a slot; the request is still served.
            self.add(host, 0)
        self.feed(residency.UseRequested(host.key, entry))
        if is_gone:
            self.feed(residency.ModelRemoved(host.key))
        try:
            await entry
        except asyncio.CancelledError:
            if entry.cancelled():
                self.feed(residency.UseCancelled(host.key, entry))
            elif entry.exception() is None:
                # It was admitted at the same moment.
                self.leave(host)
            raise

    def leave(self, host: EngineLoader) -> None:
        if not self.residency.leave(host.key, time.monotonic()):
            self.feed(residency.TimerFired())

    def request_unload(self, host: EngineLoader) -> None:
        """Unload the model as soon as no request uses it."""
        self.feed(residency.UnloadRequested(host.key))

    async def stop(self) -> None:
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(host.unload() for host in self._hosts.values()))

    def feed(self, event: residency.Event) -> None:
        """Apply an event, and carry out what follows from it. An event of a forgotten host is ignored."""
        if isinstance(event, residency.ModelEvent) and event.key not in self._hosts:
            return
        for effect in self.residency.feed(event, time.monotonic()):
            self._perform(effect)
        self._set_timer()

    def _perform(self, effect: residency.Effect) -> None:
        host = self._hosts[effect.key]
        if isinstance(effect, residency.EstimateMemory):
            self._spawn(self._estimate_memory(host))
        elif isinstance(effect, residency.LoadModel):
            if (load := self._spawn(self._load(host))) is not None:
                self._loads[host.key] = load
        elif isinstance(effect, residency.AbortLoad):
            log.info("model %s: loading is cancelled: an unload was requested", host.key)
            self._spawn(self._abort_load(host))
        elif isinstance(effect, residency.UnloadModel):
            log.info("model %s: unloading: %s", host.key, effect.reason)
            self._spawn(self._unload(host))
        elif isinstance(effect, residency.AdmitRequests):
            self._admit(host, effect)
        elif isinstance(effect, residency.RefuseRequests):
            self._refuse(host, effect)
        else:
            del self._hosts[effect.key]
            self._loads.pop(effect.key, None)

    def _admit(self, host: EngineLoader, effect: residency.AdmitRequests) -> None:
        for entry in effect.tickets:
            if entry.done():
                # It was cancelled in this turn of the event loop.
                asyncio.get_running_loop().call_soon(self.leave, host)
            else:
                entry.set_result(None)

    def _refuse(self, host: EngineLoader, effect: residency.RefuseRequests) -> None:
        if effect.need is not None:
            need, budget = format_size(effect.need), format_size(self.budget or 0)
            host.fail(
                ConfigError(
                    f"it needs {need}, but the limit for all models is {budget}: "
                    "raise memory, or lower its context or slots"
                )
            )
        for entry in effect.tickets:
            if not entry.done():
                error = ModelFailed(UNLOADED, retry_after=1) if effect.is_unload_requested else host.refusal()
                entry.set_exception(error)

    def _set_timer(self) -> None:
        """Wake up when the residency is due. A timer that fires early is harmless."""
        due = self.residency.due
        if due >= self._timer_due or self._is_stopping:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._fire_timer)

    def _fire_timer(self) -> None:
        self._timer, self._timer_due = None, math.inf
        self.feed(residency.TimerFired())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Start a task that reports its outcome as an event, unless the server is stopping."""
        if self._is_stopping:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _estimate_memory(self, host: EngineLoader) -> None:
        try:
            need = await run_in_daemon_thread(host.estimate_memory)
        except Exception as error:  # noqa: BLE001 (a custom engine may raise anything; it is logged)
            host.fail(error)
            self.feed(residency.LoadFailed(host.key))
        else:
            self.feed(residency.MemoryEstimated(host.key, need))

    async def _load(self, host: EngineLoader) -> None:
        try:
            size = await host.start()
        except Exception:  # noqa: BLE001 (the host has logged it and keeps it for waiting requests)
            self.feed(residency.LoadFailed(host.key))
            return
        self.feed(residency.ModelLoaded(host.key, size))
        await asyncio.to_thread(host.remember_memory, size)

    async def _abort_load(self, host: EngineLoader) -> None:
        """Cancel the load and kill its process."""
        load = self._loads[host.key]
        load.cancel()
        await asyncio.wait([load])
        # The load may have finished in the meantime.
        await host.unload()
        self.feed(residency.ModelUnloaded(host.key))

    async def _unload(self, host: EngineLoader) -> None:
        await host.measure()
        # Growth beyond the budget did not prevent this load and must not prevent the next one.
        size = host.memory if self.budget is None else min(host.memory, self.budget)
        await host.unload()
        self.feed(residency.ModelUnloaded(host.key))
        await asyncio.to_thread(host.remember_memory, size)

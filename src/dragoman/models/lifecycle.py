"""What `residency` decides, done: hosts are loaded and unloaded, and those who wait are told.

Nothing is decided here. Each event goes to `Residency`, each effect that comes back is carried out, and what becomes of
it is the next event.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any

from dragoman.config.quantities import shown_size
from dragoman.core.errors import ConfigError, ModelFailed
from dragoman.models import residency as told
from dragoman.models.background import aside
from dragoman.models.model_host import Host
from dragoman.models.residency import Residency, Seat

log = logging.getLogger("dragoman.models")

UNLOADED = "the model was unloaded while it was being loaded; try again"


class Lifecycle:
    def __init__(self, budget: int | None, turn: float) -> None:
        self._residency = Residency(budget, turn)
        self._hosts: dict[str, Host] = {}
        self._names: dict[str, int] = {}
        self._numbers = itertools.count()
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf
        self._is_stopping = False

    @property
    def budget(self) -> int | None:
        return self._residency.budget

    def add(self, host: Host, keep_alive: float, stays: bool = False) -> None:
        self._hosts[host.key] = host
        self._feed(told.Added(host.key, keep_alive, stays))

    def new_key(self, name: str) -> str:
        """One that was never used: an older host of this name may still have requests to finish."""
        self._names[name] = number = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name} ({number})"

    def keep(self, host: Host, keep_alive: float) -> None:
        self._feed(told.Added(host.key, keep_alive))

    def remove(self, host: Host, why: str = "it is configured no longer") -> None:
        self._feed(told.Removed(host.key, why))

    def bound(self, budget: int | None, turn: float) -> None:
        self._feed(told.Bounds(budget, turn))

    def seat(self, host: Host) -> Seat:
        return self._residency.seats.get(host.key) or Seat(0)

    def enter(self, host: Host) -> bool:
        return host.key in self._hosts and self._residency.enter(host.key)

    def ask(self, host: Host) -> "asyncio.Future[None]":
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._tickets[number] = ticket
        is_gone = host.key not in self._hosts
        if is_gone:
            # It was removed while somebody stood in the queue for one of its slots, who is served all the same.
            self.add(host, 0)
        self._feed(told.Asked(host.key, number))
        if is_gone:
            self.remove(host)
        return ticket

    def give_up(self, host: Host, ticket: "asyncio.Future[None]") -> None:
        """It may have been granted in the same moment: then it is given back."""
        if ticket.done() and not ticket.cancelled():
            if ticket.exception() is None:
                self.leave(host)
            return
        number = next((number for number, known in self._tickets.items() if known is ticket), None)
        if number is not None:
            del self._tickets[number]
            self._feed(told.GaveUp(host.key, number))
        ticket.cancel()

    def leave(self, host: Host) -> None:
        if not self._residency.leave(host.key, time.monotonic()):
            self._feed(told.Passed())

    def wish(self, host: Host) -> None:
        if host.key in self._hosts and self.seat(host).state != "in":
            self._feed(told.Wished(host.key))

    def dismiss(self, host: Host) -> None:
        if host.key in self._hosts:
            self._feed(told.Dismissed(host.key))

    def lost(self, host: Host) -> None:
        if self.seat(host).state == "in":
            self._feed(told.Lost(host.key))

    def measured(self, host: Host) -> None:
        if host.key in self._hosts:
            self._feed(told.Measured(host.key, host.memory))

    async def stop(self) -> None:
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(host.end() for host in self._hosts.values()))

    def _feed(self, event: told.Event) -> None:
        for effect in self._residency.feed(event, time.monotonic()):
            self._perform(effect)
        self._set_timer()

    def _perform(self, effect: told.Effect) -> None:
        host = self._hosts[effect.key]
        if isinstance(effect, told.Weigh):
            self._begin(self._weigh(host))
        elif isinstance(effect, told.Load):
            load = self._begin(self._load(host))
            if load is not None:
                self._loads[effect.key] = load
        elif isinstance(effect, told.Abort):
            log.info("model %s: loading is cancelled: an unload was requested", host.key)
            self._begin(self._abort(host))
        elif isinstance(effect, told.Unload):
            log.info("model %s: unloading: %s", host.key, effect.why)
            self._begin(self._unload(host))
        elif isinstance(effect, told.Admit):
            self._admit(host, effect)
        elif isinstance(effect, told.Refuse):
            self._refuse(host, effect)
        else:
            del self._hosts[effect.key]
            self._loads.pop(effect.key, None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """None while the server is stopping: no new work is begun."""
        if self._is_stopping:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _weigh(self, host: Host) -> None:
        try:
            need = await aside(host.expect)
        except Exception as error:  # noqa: BLE001 (an engine of the user's own is asked too; told to the log)
            host.fail(error)
            self._feed(told.Failed(host.key))
        else:
            self._feed(told.Weighed(host.key, need))

    async def _load(self, host: Host) -> None:
        try:
            size = await host.start()
        except Exception:  # noqa: BLE001 (the host has told the log, and keeps it for those who wait)
            self._feed(told.Failed(host.key))
            return
        self._feed(told.Loaded(host.key, size))
        await asyncio.to_thread(host.remember, size)

    async def _abort(self, host: Host) -> None:
        """Cancel the load and kill its process."""
        load = self._loads[host.key]
        load.cancel()
        await asyncio.wait([load])
        # The load may have finished in the same moment.
        await host.end()
        self._feed(told.Unloaded(host.key))

    async def _unload(self, host: Host) -> None:
        await host.measure()
        # What it grew to beyond the budget did not keep it from being loaded, and is not to do so the next time.
        size = host.memory if self.budget is None else min(host.memory, self.budget)
        await host.end()
        self._feed(told.Unloaded(host.key))
        await asyncio.to_thread(host.remember, size)

    def _admit(self, host: Host, effect: told.Admit) -> None:
        for number in effect.tickets:
            ticket = self._tickets.pop(number)
            if ticket.done():
                # It was cancelled just now, and has not been heard of yet.
                asyncio.get_running_loop().call_soon(self.leave, host)
            else:
                ticket.set_result(None)

    def _refuse(self, host: Host, effect: told.Refuse) -> None:
        if effect.need is not None:
            words = f"it needs {shown_size(effect.need)}, and all models together may take"
            way_out = "raise memory, or lower its context or slots"
            host.fail(ConfigError(f"{words} {shown_size(self.budget or 0)}: {way_out}"))
        for number in effect.tickets:
            ticket = self._tickets.pop(number)
            if not ticket.done():
                refusal = ModelFailed(UNLOADED, retry_after=1) if effect.is_dismissed else host.refusal()
                ticket.set_exception(refusal)

    def _set_timer(self) -> None:
        """One that comes too early does no harm: it is set anew when it has come."""
        due = self._residency.due
        if due >= self._timer_due or self._is_stopping:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._pass_time)

    def _pass_time(self) -> None:
        self._timer, self._timer_due = None, math.inf
        self._feed(told.Passed())

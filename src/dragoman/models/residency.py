"""Decides which models are in memory: a pure reducer from events to effects, without a clock or engines.

    unloaded -> queued -> loading -> loaded -> unloading -> unloaded

Rules
1. Models that are loading, loaded and unloading together stay within the memory budget, as far as their needs are
   known. The largest value that was estimated or measured counts. A model that alone needs more than the budget is
   refused. One that only grew beyond the budget while it was used is not refused; it counts as the whole budget.
2. A model in use is not unloaded.
3. Models queue for memory in the order of their first request. Only a model that needs no memory overtakes.
4. While a model is queued, the others keep their memory for a turn: `turn` seconds from their load. Then they admit no
   new requests, which wait for the next turn. An idle model makes room after `LINGER` seconds. The least recently used
   model goes first.
5. A model that was idle for its keep-alive time is unloaded.
6. After an unload request a model admits no requests. If it is still loading, the load is aborted and its waiting
   requests are refused.
7. A removed model serves the requests that it has, then it is forgotten.

With n models that compete for memory, a request waits for at most n turns, loads and longest requests.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

LINGER = 0.5
UNUSED_SECONDS = 30.0
"""A model loaded on request stays for at least this long before its first use."""
NOT_CONFIGURED = "it is no longer configured"

State = Literal["unloaded", "loading", "loaded", "unloading"]
Ticket = Any
"""Identifies a waiting request; any hashable value."""


class ModelEvent(msgspec.Struct, frozen=True):
    key: str


class ModelAdded(ModelEvent, frozen=True):
    """A new model, or new settings for a known one. A model that `is_pinned` is never unloaded to save memory."""

    keep_alive: float = math.inf
    is_pinned: bool = False


class ModelRemoved(ModelEvent, frozen=True):
    reason: str = NOT_CONFIGURED


class LimitsChanged(msgspec.Struct, frozen=True):
    budget: int | None
    turn: float


class UseRequested(ModelEvent, frozen=True):
    """A request with this ticket waits for the model."""

    ticket: Ticket


class UseCancelled(ModelEvent, frozen=True):
    ticket: Ticket


class LoadRequested(ModelEvent, frozen=True):
    """Load the model although no request waits for it."""


class UnloadRequested(ModelEvent, frozen=True):
    """Unload the model as soon as no request uses it."""


class MemoryEstimated(ModelEvent, frozen=True):
    need: int


class ModelLoaded(ModelEvent, frozen=True):
    """`need` is the measured memory, or 0 if it is unknown."""

    need: int


class MemoryMeasured(ModelEvent, frozen=True):
    """The model has grown."""

    need: int


class LoadFailed(ModelEvent, frozen=True):
    """The memory estimate or the load failed."""


class ModelLost(ModelEvent, frozen=True):
    """The engine of a loaded model has gone, and its memory is free. A load that fails is a `LoadFailed`."""


class ModelUnloaded(ModelEvent, frozen=True):
    pass


class TimerFired(msgspec.Struct, frozen=True):
    pass


Event = ModelEvent | LimitsChanged | TimerFired


class ModelEffect(msgspec.Struct, frozen=True):
    key: str


class EstimateMemory(ModelEffect, frozen=True):
    pass


class LoadModel(ModelEffect, frozen=True):
    pass


class UnloadModel(ModelEffect, frozen=True):
    reason: str


class AdmitRequests(ModelEffect, frozen=True):
    tickets: tuple[Ticket, ...]


class AbortLoad(ModelEffect, frozen=True):
    """Cancel a running load; `ModelUnloaded` reports its end."""


class RefuseRequests(ModelEffect, frozen=True):
    """`need` is larger than the budget; None: the load failed, or an unload was requested."""

    tickets: tuple[Ticket, ...]
    need: int | None = None
    is_unload_requested: bool = False


class ForgetModel(ModelEffect, frozen=True):
    """A removed model has gone."""


Effect = ModelEffect


class ResidencyState:
    """The state of one model."""

    def __init__(self) -> None:
        self.keep_alive = math.inf
        self.is_pinned = False
        self.need: int | None = None
        """Memory to load it, if known."""
        self.grown = 0
        """The most memory it took in use."""
        self.state: State = "unloaded"
        self.order = 0
        self.running = 0
        self.waiting: dict[Ticket, None] = {}
        self.since = self.idle_since = 0.0
        self.is_estimating = self.is_load_requested = self.is_unload_requested = False
        self.is_removed = self.is_closed = self.is_unused = False
        self.removal_reason = ""

    def take_waiting(self) -> tuple[Ticket, ...]:
        tickets = tuple(self.waiting)
        self.waiting.clear()
        return tickets

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting) or self.is_load_requested

    @property
    def admits(self) -> bool:
        return self.state == "loaded" and not self.is_closed and not self.is_unload_requested

    def loaded_memory(self, budget: float) -> float:
        """Memory that it takes when loaded, within the budget."""
        return max(self.need or 0, min(self.grown, budget))

    def current_memory(self, budget: float = math.inf) -> float:
        """Memory that it takes now."""
        return 0 if self.state == "unloaded" else self.loaded_memory(budget)

    @property
    def idle_until(self) -> float:
        keep = max(self.keep_alive, UNUSED_SECONDS) if self.is_unused else self.keep_alive
        return math.inf if self.is_pinned else self.idle_since + keep


class Residency:
    def __init__(self, budget: int | None = None, turn: float = 10.0) -> None:
        self.budget = budget
        self.turn = turn
        self.models: dict[str, ResidencyState] = {}
        self.due = math.inf
        """When it needs the next `TimerFired`."""
        self._last_order = 0

    def enter(self, key: str) -> bool:
        """Start to use a model that admits requests at once; otherwise return False."""
        model = self.models.get(key)
        if model is None or not model.admits or model.waiting:
            return False
        model.running += 1
        model.is_unused = False
        return True

    def leave(self, key: str, now: float) -> bool:
        """Finish using a model. If False is returned, a `TimerFired` must follow."""
        model = self.models[key]
        model.running -= 1
        model.idle_since = now
        if model.running:
            return True
        can_expire = model.keep_alive < math.inf and not model.is_pinned
        may_unload = model.is_removed or model.is_unload_requested or can_expire
        return self.budget is None and not may_unload

    def feed(self, event: Event, now: float) -> list[Effect]:
        return self._apply(event, now) + list(self._decide(now))

    def _apply(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, LimitsChanged):
            self.budget, self.turn = event.budget, event.turn
        elif isinstance(event, ModelAdded):
            model = self.models.setdefault(event.key, ResidencyState())
            model.keep_alive, model.is_pinned, model.is_removed = event.keep_alive, event.is_pinned, False
        elif isinstance(event, ModelEvent):
            return self._apply_to(self.models[event.key], event, now)
        return []

    def _apply_to(self, model: ResidencyState, event: ModelEvent, now: float) -> list[Effect]:
        if isinstance(event, UseRequested | LoadRequested):
            if not model.is_wanted:
                self._last_order += 1
                model.order = self._last_order
            if isinstance(event, UseRequested):
                model.waiting[event.ticket] = None
            elif model.state in ("unloaded", "unloading"):
                model.is_load_requested = True
        elif isinstance(event, UseCancelled):
            model.waiting.pop(event.ticket, None)
        elif isinstance(event, ModelRemoved):
            model.is_removed, model.removal_reason = True, event.reason
            model.is_load_requested = False
        elif isinstance(event, UnloadRequested):
            return self._apply_unload_request(event.key, model)
        elif isinstance(event, MemoryEstimated):
            model.need, model.is_estimating = event.need, False
        elif isinstance(event, MemoryMeasured):
            model.grown = max(model.grown, event.need)
        elif isinstance(event, ModelLoaded):
            return self._apply_loaded(model, event, now)
        elif isinstance(event, LoadFailed) or (isinstance(event, ModelLost) and model.state == "loaded"):
            return self._apply_loss(model, event)
        elif isinstance(event, ModelUnloaded):
            model.state, model.is_unload_requested = "unloaded", False
        return []

    def _apply_unload_request(self, key: str, model: ResidencyState) -> list[Effect]:
        model.is_load_requested = False
        if model.state != "loading":
            model.is_unload_requested = model.state == "loaded"
            return []
        model.state = "unloading"
        return [RefuseRequests(key, model.take_waiting(), is_unload_requested=True), AbortLoad(key)]

    def _apply_loaded(self, model: ResidencyState, event: ModelLoaded, now: float) -> list[Effect]:
        # An unknown need stays unknown: it is estimated when a budget requires it.
        model.need = max(model.need or 0, event.need) or model.need
        model.since = model.idle_since = now
        model.is_closed, model.is_unused, model.is_load_requested = False, not model.waiting, False
        if self.budget is not None and (model.need or 0) > self.budget and not model.is_pinned:
            model.state = "unloading"
            return [UnloadModel(event.key, "it needs more memory than the limit"), self._refuse(event.key, model)]
        model.state = "loaded"
        return []

    def _admit(self, key: str, model: ResidencyState) -> AdmitRequests:
        tickets = model.take_waiting()
        model.running += len(tickets)
        model.is_unused = False
        return AdmitRequests(key, tickets)

    def _apply_loss(self, model: ResidencyState, event: LoadFailed | ModelLost) -> list[Effect]:
        model.is_estimating = model.is_load_requested = model.is_unload_requested = False
        model.state = "unloaded"
        if isinstance(event, ModelLost) or not model.waiting:
            return []
        return [RefuseRequests(event.key, model.take_waiting())]

    def _refuse(self, key: str, model: ResidencyState) -> RefuseRequests:
        """Refuse the waiting requests: the model needs more than the budget."""
        model.is_load_requested = False
        return RefuseRequests(key, model.take_waiting(), model.need)

    def _decide(self, now: float) -> Iterator[Effect]:
        self.due = math.inf
        yield from self._unload_idle(now)
        yield from self._load_queued(now)
        for key, model in self.models.items():
            if model.waiting and model.admits:
                yield self._admit(key, model)

    def _unload_idle(self, now: float) -> Iterator[Effect]:
        for key, model in list(self.models.items()):
            if model.running or (model.waiting and not model.is_unload_requested):
                continue
            if model.state == "unloaded" and model.is_removed:
                del self.models[key]
                yield ForgetModel(key)
            elif model.state == "loaded" and model.is_removed:
                yield self._unload(key, model, model.removal_reason)
            elif model.state == "loaded" and model.is_unload_requested:
                yield self._unload(key, model, "an unload was requested")
            elif model.state == "loaded" and now >= model.idle_until:
                yield self._unload(key, model, f"it was not used for {model.keep_alive:g} s")
            elif model.state == "loaded":
                self.due = min(self.due, model.idle_until)

    def _load_queued(self, now: float) -> Iterator[Effect]:
        queue = sorted(
            ((key, model) for key, model in self.models.items() if model.state == "unloaded" and model.is_wanted),
            key=lambda entry: entry[1].order,
        )
        is_blocked = False
        for model in self.models.values():
            model.is_closed = False
        for key, model in queue:
            need, claim = 0 if self.budget is None else model.need, model.loaded_memory(self._limit)
            if need is None:
                if not model.is_estimating:
                    model.is_estimating = True
                    yield EstimateMemory(key)
            elif need > self._limit:
                yield self._refuse(key, model)
            elif claim == 0 or (not is_blocked and claim <= self._free_memory()):
                model.state = "loading"
                yield LoadModel(key)
            elif not is_blocked:
                is_blocked = True
                yield from self._make_room(
                    claim - self._free_memory(), now, f"memory is needed for {key}", closing=True
                )
        if not is_blocked and self._free_memory() < 0:
            yield from self._make_room(-self._free_memory(), now, "memory is short", closing=False)

    @property
    def _limit(self) -> float:
        return math.inf if self.budget is None else self.budget

    def _free_memory(self) -> float:
        return self._limit - sum(model.current_memory(self._limit) for model in self.models.values())

    def _make_room(self, shortage: float, now: float, reason: str, closing: bool) -> Iterator[Effect]:
        """Unload idle models and close busy ones until the shortage is covered."""
        shortage -= sum(
            model.current_memory(self._limit) for model in self.models.values() if model.state == "unloading"
        )
        for key, model in self._by_last_use():
            if shortage <= 0:
                return
            shortage -= model.current_memory(self._limit)
            until = model.since + self.turn
            if not model.running:
                until = min(until, model.idle_since + min(LINGER, self.turn / 4))
            if now < until:
                self.due = min(self.due, until)
            elif not model.running:
                yield self._unload(key, model, reason)
            elif closing:
                model.is_closed = True

    def _by_last_use(self) -> Iterable[tuple[str, ResidencyState]]:
        """Models that may be unloaded: idle ones first, then the least recently used."""
        loaded = [entry for entry in self.models.items() if entry[1].state == "loaded" and entry[1].current_memory()]
        return sorted(
            (entry for entry in loaded if not entry[1].is_pinned),
            key=lambda entry: (entry[1].running > 0, entry[1].since if entry[1].running else entry[1].idle_since),
        )

    def _unload(self, key: str, model: ResidencyState, reason: str) -> UnloadModel:
        model.state = "unloading"
        return UnloadModel(key, reason)

"""A simulated machine with its own clock, for tests of `Residency`."""

import heapq
import itertools
import math
from collections.abc import Mapping

import msgspec

from dragoman.models.residency import (
    AbortLoad,
    AdmitRequests,
    Effect,
    EstimateMemory,
    Event,
    ForgetModel,
    LoadFailed,
    LoadModel,
    MemoryEstimated,
    ModelAdded,
    ModelLoaded,
    ModelUnloaded,
    RefuseRequests,
    Residency,
    TimerFired,
    UnloadModel,
    UseRequested,
)


class RequestFinished(msgspec.Struct, frozen=True):
    """A request has finished; `Lifecycle` reports it with `leave`."""

    key: str


def leave(residency: Residency, key: str, now: float) -> list[Effect]:
    return [] if residency.leave(key, now) else residency.feed(TimerFired(), now)


class World:
    """A machine whose models load in `seconds`; checks every effect."""

    def __init__(
        self, needs: Mapping[str, int], budget: int | None, turn: float = 4.0, keep_alive: float = math.inf
    ) -> None:
        self.needs = needs
        self.budget = budget
        self.residency = Residency(budget, turn)
        self.now = 0.0
        self.seconds = 1.0
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.aborts: list[str] = []
        self.forgotten: list[str] = []
        self.admitted: dict[int, float] = {}
        self.refused: set[int] = set()
        self.broken: set[str] = set()
        self._memory: dict[str, int] = {}
        self._running = dict.fromkeys(needs, 0)
        self._lengths: dict[int, float] = {}
        self._tickets = itertools.count()
        self._plan: list[tuple[float, int, Event | RequestFinished]] = []
        self._order = itertools.count()
        for key in needs:
            self.feed(ModelAdded(key, keep_alive))

    def ask(self, key: str, length: float = 1.0) -> int:
        ticket = next(self._tickets)
        self._lengths[ticket] = length
        self.feed(UseRequested(key, ticket))
        return ticket

    def later(self, seconds: float, event: Event | RequestFinished) -> None:
        heapq.heappush(self._plan, (self.now + seconds, next(self._order), event))

    def feed(self, event: Event | RequestFinished) -> None:
        if isinstance(event, ModelUnloaded):
            del self._memory[event.key]
        if isinstance(event, RequestFinished):
            self._running[event.key] -= 1
            effects = leave(self.residency, event.key, self.now)
        else:
            effects = self.residency.feed(event, self.now)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, EstimateMemory):
            self.later(0.1, MemoryEstimated(effect.key, self.needs[effect.key]))
        elif isinstance(effect, LoadModel):
            assert effect.key not in self._memory
            self._memory[effect.key] = self.needs[effect.key]
            assert self.budget is None or sum(self._memory.values()) <= self.budget
            self.loads.append(effect.key)
            if effect.key in self.broken:
                del self._memory[effect.key]
                self.later(self.seconds, LoadFailed(effect.key))
            else:
                self.later(self.seconds, ModelLoaded(effect.key, self.needs[effect.key]))
        elif isinstance(effect, AbortLoad):
            self._plan = [
                entry
                for entry in self._plan
                if not isinstance(entry[2], ModelLoaded | LoadFailed) or entry[2].key != effect.key
            ]
            heapq.heapify(self._plan)
            self._memory.setdefault(effect.key, 0)
            self.aborts.append(effect.key)
            self.later(self.seconds / 2, ModelUnloaded(effect.key))
        elif isinstance(effect, UnloadModel):
            assert not self._running[effect.key]
            assert effect.key in self._memory
            self.unloads.append(effect.key)
            self.later(self.seconds / 2, ModelUnloaded(effect.key))
        elif isinstance(effect, AdmitRequests):
            assert effect.key in self._memory
            for ticket in effect.tickets:
                assert ticket not in self.admitted
                self.admitted[ticket] = self.now
                self._running[effect.key] += 1
                self.later(self._lengths[ticket], RequestFinished(effect.key))
        elif isinstance(effect, RefuseRequests):
            self.refused |= set(effect.tickets)
        elif isinstance(effect, ForgetModel):
            self.forgotten.append(effect.key)

    def run(self, until: float) -> None:
        """Let time pass."""
        while True:
            planned = self._plan[0][0] if self._plan else math.inf
            at = min(planned, max(self.now, self.residency.due))
            if at > until:
                self.now = until
                return
            self.now = at
            if planned <= at:
                self.feed(heapq.heappop(self._plan)[2])
            else:
                due = self.residency.due
                self.feed(TimerFired())
                assert self.residency.due > min(due, self.now), "the timer does not advance"

    @property
    def inside(self) -> set[str]:
        return {key for key, model in self.residency.models.items() if model.state == "loaded"}

"""A lease on a model for one request: from its name to a slot and an engine.

    find   finds the model by name, checks permission, quota and features, and returns its sampling defaults
    start  waits for a slot and for the engine
    close  releases everything; further calls do nothing

A front end uses the same interface to its parent (see `frontends`).
"""

import time
from typing import Protocol

import msgspec

from dragoman.config.model_spec import NO_DEFAULTS, SamplingDefaults
from dragoman.core.engine import Engine
from dragoman.core.errors import ModelNotFound, quote
from dragoman.core.request import Asked
from dragoman.models import Catalog, ModelHost, ServedModel
from dragoman.models.admission import Slots
from dragoman.pipeline.generate import ChoiceSlots, check_features
from dragoman.server.auth.quotas import Estimate, QuotaLease
from dragoman.server.auth.scopes import Caller


class LeaseRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a model lease needs to know about a request."""

    model: str
    asked: tuple[Asked, ...]
    estimate: Estimate | None
    """Of its tokens; None if the key has no quota, or if they are already reserved."""
    strict: bool


class LeaseInfo(msgspec.Struct, frozen=True, array_like=True):
    """The model of a lease. `label` is its name in metrics. `fallbacks` are the models that the caller may use instead.
    `sampling` is None if the configuration sets no defaults."""

    model: str
    label: str
    fallbacks: tuple[str, ...]
    sampling: SamplingDefaults | None
    ignored: tuple[str, ...]
    """Parameters that the engine cannot honour."""


class ModelLeaseProtocol(Protocol):
    label: str | None
    """The model's name in metrics. Set by `find`, even if `find` then fails."""
    fallbacks: tuple[str, ...]
    """Models that may answer instead, in order of preference. Set by `find`, like `label`."""
    queue_us: int
    """Time spent waiting for a slot."""

    async def find(self, wish: LeaseRequest) -> LeaseInfo: ...

    async def start(self) -> Engine: ...

    @property
    def turns(self) -> ChoiceSlots:
        """The slots for further choices, after `start`."""

    def note_speed(self, tokens: int, seconds: float) -> None: ...

    def close(self) -> None: ...


class ModelLease:
    """A lease on a model of this process."""

    def __init__(self, catalog: Catalog, caller: Caller, lease: QuotaLease | None) -> None:
        self.label: str | None = None
        self.fallbacks: tuple[str, ...] = ()
        self.queue_us = 0
        self._catalog = catalog
        self._caller = caller
        self._lease = lease
        self._host: ModelHost | None = None
        self._engine: Engine | None = None
        self._slots: Slots | None = None
        self._has_slot = False

    async def find(self, wish: LeaseRequest) -> LeaseInfo:
        model = await find_model(self._catalog, self._caller, wish.model)
        self.label = model.label
        self._caller.check_model(model.name)
        if self._lease is not None and wish.estimate is not None:
            self._lease.reserve(wish.estimate.total(model.sampling.max_tokens))
        # Set after the quota check: a fallback model does not help a caller whose tokens are used up.
        others = self._catalog.fallbacks(model)
        self.fallbacks = tuple(other.name for other in others if self._caller.may_use(other.name))
        self._host = host = model.host
        if not host.is_known or host.is_restarting:
            # The features of a model are known once it was loaded. Waiting for a restart of its process needs no slot.
            self._engine = await host.enter()
        self._slots = Slots(host.admission, self._caller.principal)
        ignored = check_features(model.name, wish.asked, host.supports, wish.strict)
        sampling = None if model.sampling is NO_DEFAULTS else model.sampling
        return LeaseInfo(model.name, model.label, self.fallbacks, sampling, ignored)

    def start_now(self) -> Engine | None:
        """The engine, if slot and engine are available immediately."""
        self._has_slot = self._has_slot or self.turns.try_acquire_first()
        if not self._has_slot or self._host is None:
            return None
        if self._engine is None:
            self._engine = self._host.try_enter()
        return self._engine

    async def start(self) -> Engine:
        engine = self.start_now()
        if engine is not None:
            return engine
        host, began = self._host, time.monotonic()
        assert host is not None
        if not self._has_slot:
            # A request that waits for a slot must not block the model from being swapped.
            self._release_engine()
            await self.turns.acquire_first()
            self._has_slot = True
            self.queue_us = int((time.monotonic() - began) * 1e6)
        if self._engine is None:
            self._engine = host.try_enter() or await host.enter()
        return self._engine

    @property
    def turns(self) -> Slots:
        assert self._slots is not None
        return self._slots

    def note_speed(self, tokens: int, seconds: float) -> None:
        if self._host is not None:
            self._host.note_speed(tokens, seconds)

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self._release_engine()

    def _release_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._host is not None:
            self._host.leave()


async def find_model(catalog: Catalog, caller: Caller, name: str) -> ServedModel:
    """Find a model by name, without checking whether the caller may use it."""
    try:
        return catalog.get_configured(name) or await catalog.find(name)
    except ModelNotFound:
        if caller.models is None:
            raise
        # The original message lists all models; this caller may only know its own.
        message = f"model {quote(name)} not found; this key allows: {caller.allowed}"
        raise ModelNotFound(message, param="model") from None

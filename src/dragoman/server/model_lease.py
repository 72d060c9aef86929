"""A lease on a model for one request: from its name to a slot and an engine.

    find   finds the model by name, checks permission, quota, budgets and features, and returns its sampling defaults
    start  waits for a slot and for the engine
    load   waits for the engine only
    close  releases everything; further calls do nothing

A `LocalModelLease` is on a model of this process. A front end leases the models of its parent (see `frontends`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence

import msgspec

from dragoman.config.model_spec import NO_DEFAULTS, SamplingDefaults
from dragoman.core.engine import Engine
from dragoman.core.errors import ModelNotFound, quote
from dragoman.core.request import Asked
from dragoman.core.types import Priority
from dragoman.models import Catalog, ModelHost, ServedModel
from dragoman.models.admission import Slots
from dragoman.pipeline.generate import ChoiceSlots, check_features, reads_field
from dragoman.server.auth.callers import Caller, Estimate, QuotaLease
from dragoman.storage.budgets import Owner
from dragoman.storage.ledger import Ledger


class LeaseRequest(msgspec.Struct, frozen=True, array_like=True):
    """What `find` needs to know about a request."""

    model: str
    asked: tuple[Asked, ...]
    estimate: Estimate | None
    """Of its tokens; None if it generates nothing, or if they are already reserved."""
    strict: bool
    extra: tuple[str, ...] = ()
    """Names of unknown fields that the engine gets, if it reads them."""
    priority: Priority = "interactive"


class LeaseInfo(msgspec.Struct, frozen=True, array_like=True):
    """The model of a lease. `label` is its name in metrics. `fallbacks` are the models that the caller may use instead.
    `sampling` is None if the configuration sets no defaults."""

    model: str
    label: str
    fallbacks: tuple[str, ...]
    sampling: SamplingDefaults | None
    ignored: tuple[str, ...]
    """Parameters that the engine cannot honour."""
    reads_fields: tuple[str, ...] = ()
    reads_headers: tuple[str, ...] = ()
    """What else the engine reads, as in `Engine`."""
    fingerprint: str = ""
    """As in `GenerationRequest`."""


class ModelLease(ABC):
    label: str | None = None
    """The model's name in metrics. Set by `find`, even if `find` then fails."""
    fallbacks: tuple[str, ...] = ()
    """Models that may answer instead, in order of preference. Set by `find`, like `label`."""
    queue_us = 0
    """Time spent waiting for a slot."""
    budget_warning: str | None = None
    """The exhausted budget of the caller, if it only warns. Set by `find`."""

    @abstractmethod
    async def find(self, request: LeaseRequest) -> LeaseInfo: ...

    @abstractmethod
    async def start(self) -> Engine: ...

    @abstractmethod
    async def load(self) -> None:
        """Wait until the model is loaded."""

    @property
    @abstractmethod
    def slots(self) -> ChoiceSlots:
        """The slots for further choices, after `start`."""

    @abstractmethod
    def note_speed(self, tokens: int, seconds: float) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class LocalModelLease(ModelLease):
    _host: ModelHost
    _slots: Slots
    _engine: Engine | None = None
    _has_slot = False
    _is_found = False

    def __init__(
        self,
        catalog: Catalog,
        caller: Caller,
        quota_lease: QuotaLease | None,
        ledger: Ledger | None = None,
        request_id: str = "",
        is_admitted: bool = False,
    ) -> None:
        """A request that `is_admitted` waits for its slot without limits."""
        self._catalog = catalog
        self._caller = caller
        self._quota_lease = quota_lease
        self._ledger = ledger
        self._request_id = request_id
        self._is_admitted = is_admitted

    async def resolve(self, name: str) -> ServedModel:
        """Find the model with this name, and check that the caller may use it."""
        try:
            # Most requests name a configured model.
            model = self._catalog.models.get(name.strip().lower()) or await self._catalog.find_requested(name)
        except ModelNotFound:
            if self._caller.models is None:
                raise
            # The original message lists all models; this caller may only know its own.
            message = f"model {quote(name)} not found; this key allows: {self._caller.allowed}"
            raise ModelNotFound(message, param="model") from None
        self.label = model.label
        self._caller.check_model(model.name)
        return model

    async def find(self, request: LeaseRequest) -> LeaseInfo:
        model = await self.resolve(request.model)
        if self._quota_lease is not None and request.estimate is not None:
            self._quota_lease.reserve(request.estimate.total(model.sampling.max_tokens))
        fallbacks: list[ServedModel] = []
        if model.spec is not None and model.spec.fallback is not None:
            fallbacks = [other for other in self._catalog.fallbacks(model) if self._caller.may_use(other.name)]
        if self._ledger is not None and request.estimate is not None:
            owner = self._caller.owner
            reserving = self._open_entry(self._ledger, owner, request.estimate, [model, *fallbacks])
            if reserving is not None:
                await reserving
            self.budget_warning = self._ledger.find_warning(owner)
        # Set after the checks of quota and budgets: a fallback does not help a caller whose tokens are used up.
        self.fallbacks = tuple(other.name for other in fallbacks)
        self._host = host = model.host
        self._slots = Slots(host.admission, self._caller.principal, request.priority, self._is_admitted)
        self._is_found = True
        if not host.is_known or host.is_restarting:
            # The features of a model are known once it was loaded. Waiting for a restart of its process needs no slot.
            self._engine = await host.enter()
        fields = host.reads_fields
        read = [name for name in request.extra if reads_field(fields, name)]
        ignored = check_features(model.name, request.asked, host.supports, request.strict, read)
        sampling = None if model.sampling is NO_DEFAULTS else model.sampling
        notes = ignored, fields, host.reads_headers, host.fingerprint
        return LeaseInfo(model.name, model.label, self.fallbacks, sampling, *notes)

    def _open_entry(
        self, ledger: Ledger, owner: Owner, estimate: Estimate, models: Sequence[ServedModel]
    ) -> Awaitable[None] | None:
        """Open the entry of the request in the ledger. Attempts with a fallback model belong to the same entry."""
        completion = estimate.completion(models[0].sampling.max_tokens)
        labels = [model.label for model in models]
        return ledger.open(self._request_id, owner, labels, estimate.prompt, completion)

    @property
    def supports(self) -> frozenset[str]:
        """The features of the engine, after `find`."""
        return self._host.supports

    def start_now(self) -> Engine | None:
        """The engine, if slot and engine are available immediately."""
        self._has_slot = self._has_slot or self._slots.try_acquire_first()
        if not self._has_slot:
            return None
        if self._engine is None:
            self._engine = self._host.try_enter()
        return self._engine

    async def start(self) -> Engine:
        engine = self.start_now()
        if engine is not None:
            return engine
        if not self._has_slot:
            # A request that waits for a slot must not block the model from being swapped.
            self._release_engine()
            began = time.monotonic()
            await self._slots.acquire_first()
            self._has_slot = True
            self.queue_us = int((time.monotonic() - began) * 1e6)
        return await self.start_without_slot()

    async def load(self) -> None:
        await self.start_without_slot()

    async def start_without_slot(self) -> Engine:
        """Wait for the engine only, for a call that takes no time of the model."""
        if self._engine is None:
            self._engine = await self._host.enter()
        return self._engine

    @property
    def slots(self) -> Slots:
        return self._slots

    def note_speed(self, tokens: int, seconds: float) -> None:
        if self._is_found:
            self._host.note_speed(tokens, seconds)

    def close(self) -> None:
        if self._is_found:
            self._slots.close()
            self._release_engine()

    def _release_engine(self) -> None:
        if self._engine is not None:
            self._engine = None
            self._host.leave()

"""One request's hold on a model: from a name to a slot and an engine, and back.

    find   the model by its name, what the configuration says of it, whether it can do what is asked
    start  a slot and the engine, as soon as both are there
    close  everything is given back; to close twice is to close once

A front end asks its parent for the same (see `fronts`).
"""

import time
from typing import Protocol

import msgspec

from dragoman.config.model_spec import NO_DEFAULTS, SamplingDefaults
from dragoman.core.engine import Engine
from dragoman.core.errors import ModelNotFound, quote
from dragoman.core.request import Asked
from dragoman.models import Catalog, Host, Model
from dragoman.models.admission import Slots
from dragoman.pipeline.generate import Turns, check
from dragoman.server.auth.quotas import Lease
from dragoman.server.auth.scopes import Caller
from dragoman.server.auth.token_estimate import Estimate


class Wish(msgspec.Struct, frozen=True, array_like=True):
    """What has to be known of a request to let it in."""

    model: str
    asked: tuple[Asked, ...]
    estimate: Estimate | None
    """Of its tokens; None: nobody limits them, or they have been reserved."""
    strict: bool


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The model that a wish came to; `sampling` None: the configuration says nothing of it. `label` is its name in
    figures, which callers cannot make up; `fallbacks` are those that the caller may ask instead."""

    model: str
    label: str
    fallbacks: tuple[str, ...]
    sampling: SamplingDefaults | None
    ignored: tuple[str, ...]
    """Parameters that it cannot honour."""


class Engaging(Protocol):
    label: str | None
    """The name of the model in figures, once it is found, even if then something is wrong."""
    fallbacks: tuple[str, ...]
    """Those that may answer for it, the nearest first, likewise."""
    queue_us: int
    """For how long it waited for its slot."""

    async def find(self, wish: Wish) -> Found: ...

    async def start(self) -> Engine: ...

    @property
    def turns(self) -> Turns:
        """The slots of further choices, once it has started."""

    def note_speed(self, tokens: int, seconds: float) -> None: ...

    def close(self) -> None: ...


class Engagement:
    """Where the models are in this process."""

    def __init__(self, catalog: Catalog, caller: Caller, lease: Lease | None) -> None:
        self.label: str | None = None
        self.fallbacks: tuple[str, ...] = ()
        self.queue_us = 0
        self._catalog = catalog
        self._caller = caller
        self._lease = lease
        self._host: Host | None = None
        self._engine: Engine | None = None
        self._slots: Slots | None = None
        self._has_slot = False

    async def find(self, wish: Wish) -> Found:
        model = await named(self._catalog, self._caller, wish.model)
        self.label = model.label
        self._caller.check_model(model.name)
        if self._lease is not None and wish.estimate is not None:
            self._lease.reserve(wish.estimate.total(model.sampling.max_tokens))
        # Only now: who has used up its tokens is not helped by another model.
        others = self._catalog.fallbacks(model)
        self.fallbacks = tuple(other.name for other in others if self._caller.may_ask(other.name))
        self._host = host = model.host
        if not host.is_known or host.is_returning:
            # What a model supports is known from when it was first loaded. Who waits for its process to be started
            # again needs no slot for that.
            self._engine = await host.enter()
        self._slots = Slots(host.admission, self._caller.principal)
        ignored = check(model.name, wish.asked, host.supports, wish.strict)
        sampling = None if model.sampling is NO_DEFAULTS else model.sampling
        return Found(model.name, model.label, self.fallbacks, sampling, ignored)

    def start_now(self) -> Engine | None:
        """What `start` gives, where nothing has to be waited for."""
        self._has_slot = self._has_slot or self.turns.take_first()
        if not self._has_slot or self._host is None:
            return None
        if self._engine is None:
            self._engine = self._host.enter_now()
        return self._engine

    async def start(self) -> Engine:
        engine = self.start_now()
        if engine is not None:
            return engine
        host, begun = self._host, time.monotonic()
        assert host is not None
        if not self._has_slot:
            # Who waits for a slot does not keep the model from being swapped; who has one does.
            self._let_go()
            await self.turns.first()
            self._has_slot = True
            self.queue_us = int((time.monotonic() - begun) * 1e6)
        if self._engine is None:
            self._engine = host.enter_now() or await host.enter()
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
        self._let_go()

    def _let_go(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._host is not None:
            self._host.leave()


async def named(catalog: Catalog, caller: Caller, name: str) -> Model:
    """The model of this name; whether the caller may ask it is another question."""
    try:
        return catalog.at_hand(name) or await catalog.find(name)
    except ModelNotFound:
        if caller.models is None:
            raise
        # Its words would name what is none of this caller's business.
        words = f"model {quote(name)} is not served here; this key is for: {caller.allowed}"
        raise ModelNotFound(words, param="model") from None

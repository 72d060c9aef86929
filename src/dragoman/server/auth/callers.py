"""Callers and what they may use: routes by scope, models by name or pattern, requests and tokens by quota.

Rules of quotas
1. In any sixty seconds, at most the limit of requests enters, and at most the limit of tokens is reserved.
2. Tokens are reserved by an estimate before a request runs, and settled when it ends: by the true count, or by the
   received text if the engine reports no count. A surplus is returned; a shortfall counts from then on. If the result
   is unknown, the reservation counts as used. Estimates are rather too high than too low.
3. An estimate above the limit reserves the whole limit. Such a request runs when the window is empty.
4. Every operation is a single synchronous step, so no race on the event loop can exceed a limit.
5. Time is monotonic.
"""

import fnmatch
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, get_args

import msgspec

from dragoman.config.sections import RESERVED_ROUTES, KeyLimits
from dragoman.core.edits import Compact
from dragoman.core.errors import PermissionDenied, RateLimited, TokensLimited
from dragoman.core.reply import RateLimitState
from dragoman.core.request import GenerationRequest, Image, ToolResult
from dragoman.core.types import Priority, RouteScope
from dragoman.server.telemetry.metrics import MINUTE, MinuteWindow
from dragoman.storage.budgets import OwnedBudget, Owner, OwnerColumn

SCOPE_BY_PREFIX: tuple[tuple[str, RouteScope], ...] = (
    ("/v1/chat/", "chat"),
    ("/v1/completions", "completions"),
    ("/v1/messages", "messages"),
    ("/v1/responses", "responses"),
    ("/v1/conversations", "responses"),
    ("/v1/embeddings", "embeddings"),
    ("/v1/rerank", "rerank"),
    ("/v1/files", "files"),
    ("/v1/batches", "batches"),
    ("/v1/models", "models"),
    ("/v1/organization/", "stats"),
    ("/tokenize", "tokens"),
    ("/detokenize", "tokens"),
    ("/metrics", "stats"),
    ("/stats", "stats"),
    ("/admin/", "admin"),
)
"""A route without an entry is open to every valid key."""

ALL_SCOPES: frozenset[RouteScope] = frozenset(get_args(RouteScope))
DEFAULT_SCOPES = ALL_SCOPES - RESERVED_ROUTES
ANONYMOUS = "anonymous"
"""The principal of a request without a valid key."""
BYTES_PER_TOKEN = 3
IMAGE_TOKENS = 1000
REPLY_TOKENS = 1024
"""For a reply without a limit."""
Clock = Callable[[], float]


class RateWindow(MinuteWindow):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def left(self, now: float) -> int:
        return max(0, self.limit - self.taken(now))

    def wait(self, amount: int, now: float) -> float:
        """Seconds until this amount is available."""
        missing = self.taken(now) + amount - self.limit
        if missing <= 0:
            return 0.0
        for second in self._seconds:
            missing -= second.taken
            if missing <= 0:
                wait = second.expires - now
                while now + wait < second.expires:
                    # A rounding error must not end the wait too early.
                    wait = math.nextafter(wait, math.inf)
                return wait
        return float(MINUTE)

    def rate(self, what: str, now: float) -> RateLimitState:
        left = self.left(now)
        reset = self._seconds[-1].expires - now if self._seconds else 0.0
        return RateLimitState(what, self.limit, left, max(0.0, reset))


class Quota:
    def __init__(self, limits: KeyLimits, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.running = 0
        self.requests: RateWindow | None = None
        self.tokens: RateWindow | None = None
        self.change(limits)

    def change(self, limits: KeyLimits) -> None:
        """Apply new limits. What was taken stays taken."""
        self.limits = limits
        self.requests = _with_limit(self.requests, limits.requests_per_minute)
        self.tokens = _with_limit(self.tokens, limits.tokens_per_minute)

    def restore(self, requests: int, tokens: int, age: float) -> None:
        """Add what was used this many seconds ago, before this server started. Call it with the latest use first."""
        taken_at = self.clock() - age
        for window, amount in ((self.requests, requests), (self.tokens, tokens)):
            if window is not None:
                window.restore(amount, taken_at)

    @property
    def is_idle(self) -> bool:
        """Whether it is the same as a new quota."""
        now = self.clock()
        windows = [window for window in (self.requests, self.tokens) if window is not None]
        return not self.running and all(window.left(now) == window.limit for window in windows)


def _with_limit(window: RateWindow | None, limit: int | None) -> RateWindow | None:
    if limit is None:
        return None
    if window is None:
        return RateWindow(limit)
    window.limit = limit
    return window


class QuotaUsage(Protocol):
    """What one request uses of a quota, in this process or in the parent."""

    def settle(self, tokens: int) -> None: ...

    def rates(self) -> list[RateLimitState]: ...


class QuotaLease:
    """What one request uses of a quota. `limited` counts refusals by kind of limit."""

    def __init__(self, quota: Quota, limited: Counter[str]) -> None:
        self._quota = quota
        self._limited = limited
        self._is_entered = False
        self._reserved = 0
        self._reserved_at = 0.0

    def enter(self) -> None:
        quota, now = self._quota, self._quota.clock()
        most = quota.limits.concurrency
        if most is not None and quota.running >= most:
            message = f"this key may have {most} requests at a time; wait until one has ended"
            raise self._count_refusal(RateLimited(message, retry_after=1))
        window = quota.requests
        if window is not None:
            if wait := window.wait(1, now):
                raise self._count_refusal(RateLimited(_message("requests", window.limit, "", wait), retry_after=wait))
            window.take(1, now)
        quota.running += 1
        self._is_entered = True

    def reserve(self, estimate: int) -> None:
        window, now = self._quota.tokens, self._quota.clock()
        if window is None:
            return
        needed = min(max(1, estimate), window.limit)
        if wait := window.wait(needed, now):
            need = f", and this request may need {needed}"
            raise self._count_refusal(TokensLimited(_message("tokens", window.limit, need, wait), retry_after=wait))
        window.take(needed, now)
        self._reserved, self._reserved_at = needed, now

    def _count_refusal(self, error: RateLimited) -> RateLimited:
        self._limited[error.type] += 1
        return error

    def settle(self, tokens: int) -> None:
        """Settle the quota when the request has ended, with the tokens that it used."""
        if not self._is_entered:
            return
        self._is_entered = False
        self._quota.running -= 1
        window = self._quota.tokens
        if window is None:
            return
        shortfall = tokens - self._reserved
        if shortfall > 0:
            window.take(shortfall, self._quota.clock())
        elif shortfall < 0:
            window.release(-shortfall, self._reserved_at)

    def abandon(self) -> None:
        """Settle the quota when the request has ended with an unknown number of tokens."""
        self.settle(self._reserved)

    def rates(self) -> list[RateLimitState]:
        now, quota = self._quota.clock(), self._quota
        kinds = (("requests", quota.requests), ("tokens", quota.tokens))
        return [window.rate(what, now) for what, window in kinds if window is not None]


def _message(what: str, limit: int, need: str, wait: float) -> str:
    return f"rate limit reached: this key may have {limit} {what} per minute{need}; try again in {math.ceil(wait)} s"


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a request may use. `reply` is the request's limit for each of its `choices`, if it has one."""

    prompt: int
    choices: int
    reply: int | None

    def total(self, default: int | None) -> int:
        """`default` is the model's limit for a reply."""
        return self.prompt + self.completion(default)

    def completion(self, default: int | None) -> int:
        reply = default if self.reply is None else self.reply
        return (REPLY_TOKENS if reply is None else reply) * self.choices


def estimate_tokens(request: GenerationRequest, weight: int) -> Estimate:
    """`weight` is the size of the body and of the stored items that it refers to."""
    choices = max(request.choices, request.best_of) * max(1, len(request.prompts))
    prompt = estimate_prompt_tokens(request, weight)
    if any(
        isinstance(edit, Compact) and edit.threshold is not None and prompt > edit.threshold for edit in request.edits
    ):
        # The conversation is read for its summary, and its rest again for the reply.
        prompt += prompt
    return Estimate(prompt, choices, request.max_tokens)


def estimate_prompt_tokens(request: GenerationRequest, weight: int) -> int:
    count = size = 0
    for message in request.messages:
        for part in message.parts:
            if type(part) is Image or type(part) is ToolResult:
                for image in message.images:
                    count += 1
                    size += 0 if image.data is None else len(image.data) * 4 // 3
                break
    return estimate_text_tokens(max(0, weight - size)) + IMAGE_TOKENS * count


def estimate_text_tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


@lru_cache(maxsize=256)
def scope_for_path(path: str) -> RouteScope | None:
    """The scope that a path requires; None if it requires none."""
    return next((scope for prefix, scope in SCOPE_BY_PREFIX if path.startswith(prefix)), None)


def allowed_scopes(configured: Iterable[RouteScope]) -> frozenset[RouteScope]:
    """The configured scopes, or the default ones. Every caller may list its models."""
    return frozenset(configured) | {"models"} if configured else DEFAULT_SCOPES


@dataclass(slots=True, eq=False)
class Caller:
    """The sender of a request.

    A model must match a pattern of `models` and of `configured_models`; None matches every model.
    """

    principal: str
    routes: frozenset[RouteScope] = ALL_SCOPES
    models: tuple[str, ...] | None = None
    quota: Quota | None = None
    configured_models: tuple[str, ...] | None = None
    needs_admin_token: bool = False
    """Whether `/admin` requires the admin token, because the server requires no keys."""
    key: str = ""
    """The id of a stored key, the principal of a key of the configuration, or `jwt`; empty without a key."""
    budgets: tuple[OwnedBudget, ...] = ()
    """Those of the key itself, besides those of the configuration."""
    priority: Priority = "interactive"
    """Of all its requests."""

    @property
    def owner(self) -> Owner:
        """The owner of the tokens that this caller uses."""
        return Owner(self.key, self.principal, self.budgets)

    def __post_init__(self) -> None:
        self.models = None if self.models is None else tuple(map(str.lower, self.models))
        if self.configured_models is not None:
            self.configured_models = tuple(map(str.lower, self.configured_models))

    def keep_quota(self, before: "Caller | None") -> None:
        """Keep the quota of this caller's earlier configuration, with the new limits: running requests refer to it."""
        if self.quota is not None and before is not None and before.quota is not None:
            before.quota.change(self.quota.limits)
            self.quota = before.quota

    def check_route(self, scope: RouteScope | None) -> None:
        if scope is None or scope in self.routes:
            return
        allowed = ", ".join(sorted(self.routes)) or "none"
        if self.principal == ANONYMOUS:
            raise PermissionDenied(f"{scope} routes need a key; without one this server allows: {allowed}")
        raise PermissionDenied(f"this key may not use {scope} routes; it allows: {allowed}")

    def may_use(self, model: str) -> bool:
        if self.models is None and self.configured_models is None:
            return True
        return _matches(model.lower(), self.models) and _matches(model.lower(), self.configured_models)

    @property
    def allowed(self) -> str:
        """The allowed models, for messages."""
        models = ", ".join(self.models or ()) or "none"
        if not self.models or self.configured_models is None:
            return models
        return f"{models} (of {', '.join(self.configured_models)})"

    def check_model(self, model: str) -> None:
        if not self.may_use(model):
            raise PermissionDenied(f"this key may not use model '{model}'; it allows: {self.allowed}", param="model")


class SavedCaller(msgspec.Struct, frozen=True):
    """A caller as the storage keeps it with a job, until `Authenticator.restore`."""

    principal: str
    key: str
    routes: tuple[RouteScope, ...]
    models: tuple[str, ...] | None
    configured_models: tuple[str, ...] | None

    @classmethod
    def of(cls, caller: Caller) -> "SavedCaller":
        return cls(caller.principal, caller.key, tuple(caller.routes), caller.models, caller.configured_models)


def own_budgets(limits: KeyLimits, column: OwnerColumn, value: str) -> tuple[OwnedBudget, ...]:
    """The budgets among the limits of a key."""
    return tuple(OwnedBudget.of(limit, column, value) for limit in limits.budgets)


def _matches(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


UNRESTRICTED = Caller(ANONYMOUS, needs_admin_token=True)
"""Every caller, if the server requires no keys."""

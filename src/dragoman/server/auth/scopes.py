"""Callers and what they may use: routes by scope, models by name or pattern."""

import fnmatch
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import get_args

from dragoman.config.sections import RESERVED_ROUTES, RouteScope
from dragoman.core.errors import PermissionDenied
from dragoman.server.auth.quotas import Quota

PATHS: tuple[tuple[str, RouteScope], ...] = (
    ("/v1/chat/", "chat"),
    ("/v1/completions", "completions"),
    ("/v1/messages", "messages"),
    ("/v1/responses", "responses"),
    ("/v1/embeddings", "embeddings"),
    ("/v1/rerank", "rerank"),
    ("/v1/models", "models"),
    ("/tokenize", "tokens"),
    ("/detokenize", "tokens"),
    ("/metrics", "stats"),
    ("/stats", "stats"),
    ("/admin/", "admin"),
)
"""The scope of each path prefix."""

ALL_SCOPES: frozenset[RouteScope] = frozenset(get_args(RouteScope))
DEFAULT_SCOPES = ALL_SCOPES - RESERVED_ROUTES
ANONYMOUS = "anonymous"
"""The principal of a request without a valid key."""


@lru_cache(maxsize=256)
def scope_for_path(path: str) -> RouteScope | None:
    """The scope that a path requires; None if it requires none."""
    return next((scope for prefix, scope in PATHS if path.startswith(prefix)), None)


def allowed_scopes(configured: Iterable[RouteScope]) -> frozenset[RouteScope]:
    """The configured scopes, or the default ones. Every caller may list its models."""
    return frozenset(configured) | {"models"} if configured else DEFAULT_SCOPES


class Caller:
    """The sender of a request. A model must match `models` and `within`; None matches every model."""

    __slots__ = ("models", "principal", "quota", "routes", "within")

    def __init__(
        self,
        principal: str,
        routes: frozenset[RouteScope] = ALL_SCOPES,
        models: Sequence[str] | None = None,
        quota: Quota | None = None,
        within: Sequence[str] | None = None,
    ) -> None:
        self.principal = principal
        self.routes = routes
        self.models = None if models is None else tuple(pattern.lower() for pattern in models)
        self.within = None if within is None else tuple(pattern.lower() for pattern in within)
        self.quota = quota

    def check_route(self, scope: RouteScope | None) -> None:
        if scope is None or scope in self.routes:
            return
        allowed = ", ".join(sorted(self.routes)) or "none"
        if self.principal == ANONYMOUS:
            raise PermissionDenied(f"{scope} routes need a key; without one this server allows: {allowed}")
        raise PermissionDenied(f"this key may not use {scope} routes; it allows: {allowed}")

    def may_use(self, model: str) -> bool:
        return all(patterns is None or _matches(model.lower(), patterns) for patterns in (self.models, self.within))

    @property
    def allowed(self) -> str:
        """The allowed models, for messages."""
        models = ", ".join(self.models or ()) or "none"
        return f"{models} (of {', '.join(self.within)})" if self.models and self.within is not None else models

    def check_model(self, model: str) -> None:
        if not self.may_use(model):
            raise PermissionDenied(f"this key may not use model '{model}'; it allows: {self.allowed}", param="model")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


UNRESTRICTED = Caller(ANONYMOUS)
"""Every caller, if the server requires no keys."""

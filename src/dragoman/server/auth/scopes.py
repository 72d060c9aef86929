"""What a caller may ask for: routes by name, models by name or pattern."""

import fnmatch
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import get_args

from dragoman.config.sections import RESERVED, RouteScope
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
"""The scope of every route whose path begins like this."""

ALL: frozenset[RouteScope] = frozenset(get_args(RouteScope))
USUAL = ALL - RESERVED
NO_KEY = "anonymous"
"""The principal of who has none, or none that is valid here."""


@lru_cache(maxsize=256)
def scope_of(path: str) -> RouteScope | None:
    """None: nothing that needs one."""
    return next((scope for prefix, scope in PATHS if path.startswith(prefix)), None)


def routes_of(named: Iterable[RouteScope]) -> frozenset[RouteScope]:
    """Those that are named, or the usual ones; every caller may see which models there are for it."""
    return frozenset(named) | {"models"} if named else USUAL


class Caller:
    """Who is asking. `models` None: every model may be asked. `within`: which must fit one of these too."""

    __slots__ = ("models", "principal", "quota", "routes", "within")

    def __init__(
        self,
        principal: str,
        routes: frozenset[RouteScope] = ALL,
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
        if self.principal == NO_KEY:
            raise PermissionDenied(f"{scope} needs a key that is for it; without one there is: {allowed}")
        raise PermissionDenied(f"this key is not for {scope}; it is for: {allowed}")

    def may_ask(self, model: str) -> bool:
        return all(patterns is None or _fits(model.lower(), patterns) for patterns in (self.models, self.within))

    @property
    def allowed(self) -> str:
        """The models that may be asked, in words."""
        models = ", ".join(self.models or ()) or "none"
        return f"{models} (of {', '.join(self.within)})" if self.models and self.within is not None else models

    def check_model(self, model: str) -> None:
        if not self.may_ask(model):
            raise PermissionDenied(f"this key is not for model '{model}'; it is for: {self.allowed}", param="model")


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


ANYBODY = Caller(NO_KEY)
"""Who asks where no key is needed."""

"""Authenticates callers by JSON Web Tokens.

    claims := sub: principal or name, exp [, nbf] [, aud] [, iss] [, models: names and patterns*] [, routes: scopes*]

Rules
1. The configuration determines the algorithm, the key and its type. The token's header is ignored.
2. `exp` and `sub` are required. `aud` and `iss` are required if the configuration sets them.
3. `models` and `routes` restrict what the configuration allows: a model must match one pattern of each. An empty list
   allows nothing; a missing claim restricts nothing.
4. Limits apply per subject, across all its tokens.
5. The principal is `jwt:` and the subject, so it never equals the principal of a stored key.
"""

import logging
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from dragoman.config.sections import Jwt, KeyLimits
from dragoman.core.errors import ConfigError, Unauthorized
from dragoman.core.types import Priority, RouteScope
from dragoman.server.auth.callers import Caller, Quota, allowed_scopes, own_budgets
from dragoman.storage.budgets import Owner
from dragoman.storage.keys import digest, parse_principal

log = logging.getLogger("dragoman.auth")

CACHE_SIZE = 1024
MAX_TOKEN_BYTES = 8192
MIN_SECRET_BYTES = 32
JWT_KEY = "jwt"
"""The key of all callers with a token."""


class JwtClaims(msgspec.Struct, frozen=True):
    sub: str
    exp: float
    models: tuple[str, ...] | None = None
    routes: tuple[RouteScope, ...] | None = None


class JwtVerifier:
    def __init__(self, settings: Jwt, limits: KeyLimits) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError("keys.jwt needs PyJWT; install it with: pip install 'dragoman[jwt]'") from error
        self._jwt = jwt
        self._settings = settings
        self._limits = settings.limits.over(limits)
        self.priority: Priority = self._limits.priority or "interactive"
        self._key = _read_key(settings)
        self._cache: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        """Expiry and caller of recent tokens by digest: checking a signature is slow."""
        self._quotas: OrderedDict[str, Quota] = OrderedDict()

    def inherit_quotas(self, before: "JwtVerifier") -> None:
        """Continue an older configuration: subjects keep what they have used of their quota."""
        if not self._limits.has_rates:
            return
        for principal, quota in before._quotas.items():
            quota.change(self._limits)
            self._quotas[principal] = quota

    def authenticate(self, token: bytes) -> Caller:
        if len(token) > MAX_TOKEN_BYTES:
            raise Unauthorized(f"the token is longer than {MAX_TOKEN_BYTES} bytes")
        hashed = digest(token)
        expires, caller = self._cache.get(hashed, (0.0, None))
        if caller is not None and time.time() < expires:
            return caller
        claims = self._verify(token)
        caller = self._make_caller(claims)
        self._cache[hashed] = claims.exp + self._settings.leeway_seconds, caller
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return caller

    def _verify(self, token: bytes) -> JwtClaims:
        settings = self._settings
        required = ["exp", "sub", *(["aud"] if settings.audience else []), *(["iss"] if settings.issuer else [])]
        try:
            claims: dict[str, Any] = self._jwt.decode(
                token,
                self._key,
                algorithms=[settings.algorithm],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_seconds,
                options={"require": required},
            )
            return msgspec.convert(claims, JwtClaims, strict=False)
        except self._jwt.ExpiredSignatureError as error:
            raise Unauthorized("the token has expired") from error
        except (self._jwt.PyJWTError, msgspec.ValidationError, ValueError, TypeError) as error:
            # Only the operator learns the reason.
            log.info("invalid token: %s", error or type(error).__name__)
            raise Unauthorized("invalid token") from error

    def _make_caller(self, claims: JwtClaims) -> Caller:
        try:
            parse_principal(claims.sub)
        except ConfigError as error:
            raise Unauthorized("the token's subject is not a valid name") from error
        principal = f"jwt:{claims.sub}"
        allowed = allowed_scopes(self._settings.routes)
        if claims.routes is not None:
            allowed &= allowed_scopes(claims.routes) if claims.routes else frozenset()
        configured = self._settings.models or None
        models, configured_models = (configured, None) if claims.models is None else (claims.models, configured)
        owner = self.owner(principal)
        quota = self.quota(principal)
        rights = allowed, models, quota, configured_models
        return Caller(principal, *rights, key=owner.key, budgets=owner.budgets, priority=self.priority)

    def owner(self, principal: str) -> Owner:
        """The owner of the tokens of a subject."""
        return Owner(JWT_KEY, principal, own_budgets(self._limits, "principal", principal))

    def quota(self, principal: str) -> Quota | None:
        """The quota of a subject; None if the limits have no rates."""
        if not self._limits.has_rates:
            return None
        quota = self._quotas.pop(principal, None) or Quota(self._limits)
        self._quotas[principal] = quota
        if len(self._quotas) > CACHE_SIZE:
            # An idle quota is the same as a new one.
            self._forget({name for name, known in self._quotas.items() if known.is_idle and known is not quota})
        return quota

    def _forget(self, principals: set[str]) -> None:
        """Drop quotas, and the cached callers that refer to them."""
        for principal in principals:
            del self._quotas[principal]
        for hashed in [hashed for hashed, (_, caller) in self._cache.items() if caller.principal in principals]:
            del self._cache[hashed]


def _read_key(settings: Jwt) -> bytes:
    try:
        key = Path(settings.key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{settings.key_file} cannot be read: {error.strerror}") from error
    is_pem = b"-----BEGIN" in key
    if settings.algorithm == "HS256" and is_pem:
        raise ConfigError("HS256 needs a secret of 32 bytes or more, not a PEM key")
    if settings.algorithm == "HS256" and len(key) < MIN_SECRET_BYTES:
        raise ConfigError(f"a secret for HS256 has at least {MIN_SECRET_BYTES} bytes, not {len(key)}")
    if settings.algorithm == "RS256" and (not is_pem or b"PRIVATE KEY" in key):
        raise ConfigError("RS256 needs a public key in PEM format")
    return key

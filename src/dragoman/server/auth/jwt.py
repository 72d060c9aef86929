"""Signed tokens as keys: what somebody else says of a caller, if it was signed with the key that is known here.

    claims := sub: principal or name, exp [, nbf] [, aud] [, iss] [, models: names and patterns*] [, routes: scopes*]

Rules
1. The algorithm and the key are the configuration's, whatever the head of a token says; so is what kind of key it is.
2. A token without an end, or without a subject, is none. An audience and an issuer that are configured must be there.
3. What a token says of models and routes only narrows what the configuration allows: a model fits one pattern of
   each. An empty list allows nothing; whoever says nothing narrows nothing.
4. The limits are those of the subject, whichever token it comes with.
5. The principal is `jwt:` and the subject. So a token never shares a principal with a stored key: the issuer of tokens
   and the operator may use the same name for different people.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dragoman.config.sections import Jwt, KeyLimits, RouteScope
from dragoman.core.errors import ConfigError, Unauthorized
from dragoman.server.auth.quotas import Quota
from dragoman.server.auth.scopes import Caller, routes_of
from dragoman.storage.keys import checked_principal, digest

log = logging.getLogger("dragoman.auth")

REMEMBERED = 1024
LONGEST_TOKEN = 8192
LEAST_SECRET = 32
KEY_FILE = "keys.jwt.key_file"


class Claims(msgspec.Struct, frozen=True):
    sub: str
    exp: float
    models: tuple[str, ...] | None = None
    routes: tuple[RouteScope, ...] | None = None


class Signed:
    def __init__(self, settings: Jwt, limits: KeyLimits) -> None:
        try:
            import jwt
        except ImportError as error:
            raise ConfigError("keys.jwt needs PyJWT; install it with: pip install 'dragoman[jwt]'") from error
        self._jwt = jwt
        self._settings = settings
        self._limits = settings.limits.over(limits)
        self._key = _read_key(settings)
        self._known: OrderedDict[bytes, tuple[float, Caller]] = OrderedDict()
        """By digest, those checked lately, each until it ends: a signature takes longer than all the rest."""
        self._quotas: OrderedDict[str, Quota] = OrderedDict()

    def follow(self, before: "Signed") -> None:
        """What the subjects have used is remembered under a new configuration."""
        if self._limits == KeyLimits():
            return
        for principal, quota in before._quotas.items():
            quota.change(self._limits)
            self._quotas[principal] = quota

    def caller(self, token: bytes) -> Caller:
        if len(token) > LONGEST_TOKEN:
            raise Unauthorized("the token is too long")
        hashed = digest(token)
        ends, caller = self._known.get(hashed, (0.0, None))
        if caller is not None and time.time() < ends:
            return caller
        claims = self._checked(token)
        made = self._caller(claims)
        self._known[hashed] = claims.exp + self._settings.leeway_seconds, made
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return made

    def _checked(self, token: bytes) -> Claims:
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
            return msgspec.convert(claims, Claims, strict=False)
        except self._jwt.ExpiredSignatureError as error:
            raise Unauthorized("the token has expired") from error
        except (self._jwt.PyJWTError, msgspec.ValidationError, ValueError, TypeError) as error:
            # Whoever made the token up learns nothing; the operator may want to know.
            log.info("a token was refused: %s", error or type(error).__name__)
            raise Unauthorized("the token is not valid here") from error

    def _caller(self, claims: Claims) -> Caller:
        try:
            checked_principal(claims.sub)
        except ConfigError as error:
            raise Unauthorized("the token's subject is not a name that is known here") from error
        principal = f"jwt:{claims.sub}"
        allowed = routes_of(self._settings.routes)
        if claims.routes is not None:
            allowed &= routes_of(claims.routes) if claims.routes else frozenset()
        models: Sequence[str] | None = self._settings.models or None
        if claims.models is None:
            return Caller(principal, allowed, models, self._quota(principal))
        return Caller(principal, allowed, claims.models, self._quota(principal), within=models)

    def _quota(self, principal: str) -> Quota | None:
        if self._limits == KeyLimits():
            return None
        quota = self._quotas.pop(principal, None) or Quota(self._limits)
        self._quotas[principal] = quota
        if len(self._quotas) > REMEMBERED:
            # Whoever has used nothing lately is not missed.
            self._forget({name for name, known in self._quotas.items() if known.is_idle and known is not quota})
        return quota

    def _forget(self, principals: set[str]) -> None:
        """Their tokens too, which would go on to count by what nobody else counts by."""
        for principal in principals:
            del self._quotas[principal]
        for hashed in [hashed for hashed, (_, caller) in self._known.items() if caller.principal in principals]:
            del self._known[hashed]


def _read_key(settings: Jwt) -> bytes:
    try:
        key = Path(settings.key_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{KEY_FILE}: {settings.key_file} cannot be read: {error.strerror}") from error
    is_pem = b"-----BEGIN" in key
    if settings.algorithm == "HS256" and is_pem:
        raise ConfigError("keys.jwt.key_file: a PEM key is not a secret; with HS256 it is any text of 32 bytes or more")
    if settings.algorithm == "HS256" and len(key) < LEAST_SECRET:
        raise ConfigError(f"keys.jwt.key_file: a secret for HS256 has at least {LEAST_SECRET} bytes, not {len(key)}")
    if settings.algorithm == "RS256" and (not is_pem or b"PRIVATE KEY" in key):
        raise ConfigError("keys.jwt.key_file: RS256 needs the public key as PEM, and that one only")
    return key

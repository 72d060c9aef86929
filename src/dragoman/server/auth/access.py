"""Authenticates requests: maps a key or token to a caller.

    static   `api_keys` of the configuration: unrestricted, principal `key:DIGEST`
    store    `dragoman keys`: restricted as created, principal `user:NAME` or `agent:NAME/USER`, valid until revoked
    jwt      a token with a valid signature (see `jwt`), principal `jwt:SUBJECT`

Rules
1. While no key of any kind exists, no key is required. Once one has existed, every request needs one, unless the
   configuration allows anonymous callers.
2. Keys are compared by digest in constant time. The number of comparisons depends only on the form of the key that was
   sent and on whether it is valid.
3. The store is checked once a second, and immediately for an unknown key. So a new key works immediately, also the
   first one, and a revoked key works for at most one more second. While the store cannot be read, the known keys stay
   valid.
4. A principal depends on its key only, so it is the same in every process and after a restart. The three kinds of
   principals never coincide.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from dragoman.config.sections import KeyLimits
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, StorageUnavailable, Unauthorized
from dragoman.core.types import RouteScope
from dragoman.core.urls import MIN_SECRET_LENGTH, redact_secrets, secret_forms
from dragoman.server.auth.callers import (
    ALL_SCOPES,
    ANONYMOUS,
    DEFAULT_SCOPES,
    UNRESTRICTED,
    Caller,
    Quota,
    SavedCaller,
    allowed_scopes,
    own_budgets,
)
from dragoman.server.auth.jwt import JWT_KEY, JwtVerifier
from dragoman.storage.budgets import Owner
from dragoman.storage.keys import KEY_PATTERN, ApiKey, KeyReader, digest, store_path
from dragoman.storage.ledger_sql import RecentUse

log = logging.getLogger("dragoman.auth")

CHECK_SECONDS = 1.0
_STORED_KEY = re.compile(r"(dgm_[0-9a-f]{12})_[0-9a-f]+")
_NO_KEY = ApiKey("", "", bytes(32), 0.0)
_TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*")


class Authenticator:
    def __init__(self, settings: Settings) -> None:
        keys = settings.keys
        self._static = {
            digest(key.encode()): _limited(principal_of(key), ALL_SCOPES, keys.limits, key=principal_of(key))
            for key in settings.api_keys
        }
        self._jwt = None if keys.jwt is None else JwtVerifier(keys.jwt, keys.limits)
        self._stored = _StoredKeys(store_path(keys), keys.limits)
        self._anonymous = _limited(ANONYMOUS, DEFAULT_SCOPES, keys.limits, key="") if keys.anonymous else None
        keys_to_hide = (key for key in settings.api_keys if len(key) >= MIN_SECRET_LENGTH)
        self._secrets = [form for key in keys_to_hide for form in secret_forms(key)]

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Caller:
        if not (self._stored.is_used(_sent_keys(headers)) or self._static or self._jwt):
            return self._anonymous or UNRESTRICTED
        try:
            return self._find_caller(_read_key(headers))
        except Unauthorized:
            if self._anonymous is None:
                raise
            return self._anonymous

    def _find_caller(self, key: bytes) -> Caller:
        if self._jwt is not None and key.count(b".") == 2:
            return self._jwt.authenticate(key)
        hashed, found = digest(key), None
        for known, caller in self._static.items():
            if hmac.compare_digest(hashed, known):
                found = caller
        stored = self._stored.find(key, hashed)
        found = found or stored
        if found is None:
            raise Unauthorized("invalid API key")
        return found

    def restore(self, saved: SavedCaller) -> Caller:
        """The caller of a job, without a quota. Raises Unauthorized if its key is no longer valid."""
        if saved.key == JWT_KEY:
            if self._jwt is None:
                raise Unauthorized("this server does not accept tokens any more")
            rights = (frozenset(saved.routes), saved.models, None, saved.configured_models)
            owner = self._jwt.owner(saved.principal)
            return Caller(saved.principal, *rights, key=owner.key, budgets=owner.budgets, priority=self._jwt.priority)
        if not saved.key:
            return replace(self.authenticate({}), principal=saved.principal, quota=None)
        # The key may be new, and known only to the front end that authenticated it.
        self.refresh()
        caller = next((caller for caller in self.callers() if caller.key == saved.key), None)
        if caller is None:
            raise Unauthorized("the key that created this job is no longer valid")
        return replace(caller, quota=None)

    def redact(self, text: str) -> str:
        """Hide API keys and tokens in a client's text, for the log."""
        text = _TOKEN.sub("eyJ***", _STORED_KEY.sub(r"\1_***", text))
        return redact_secrets(text, self._secrets)

    def inherit_quotas(self, before: "Authenticator") -> None:
        """Continue an older configuration: callers that remain keep what they have used of their quota."""
        for hashed, caller in self._static.items():
            caller.keep_quota(before._static.get(hashed))
        if self._anonymous is not None:
            self._anonymous.keep_quota(before._anonymous)
        if self._jwt is not None and before._jwt is not None:
            self._jwt.inherit_quotas(before._jwt)
        self._stored.inherit_quotas(before._stored)

    def refresh(self) -> None:
        """Read the store of keys now, if it has changed."""
        self._stored.refresh()

    def callers(self) -> list[Caller]:
        """The callers with keys of the configuration and of the store, and anonymous ones if they are allowed."""
        anonymous = [] if self._anonymous is None else [self._anonymous]
        return [*self._static.values(), *self._stored.callers(), *anonymous]

    def owners(self, seen: Iterable[tuple[str, str]]) -> list[Owner]:
        """Return the owners of all keys, and those with the given keys and principals, with their budgets."""
        callers = {caller.key: caller for caller in self.callers()}
        owners = [caller.owner for caller in callers.values()]
        for key, principal in seen:
            if key == JWT_KEY and self._jwt is not None:
                owners.append(self._jwt.owner(principal))
            else:
                owners.append(Owner(key, principal, callers[key].budgets if key in callers else ()))
        return owners

    def restore_rates(self, recent: Iterable[RecentUse], now: float) -> None:
        """Count what keys used before this server started. `recent` begins with the latest; `now` is a Unix time."""
        quotas = {caller.key: caller.quota for caller in self.callers()}
        for use in recent:
            quota = quotas.get(use.key)
            if use.key == JWT_KEY and self._jwt is not None:
                quota = self._jwt.quota(use.principal)
            if quota is not None:
                quota.restore(use.requests, use.tokens, now - use.at)

    def close(self) -> None:
        self._stored.close()


@lru_cache(maxsize=1024)
def principal_of(key: str) -> str:
    """The principal of a static key: its name in logs, and the owner of its responses.

    The operator chose the key, so it may be weak, and other people read logs. A plain digest would let them test
    billions of guesses. Scrypt makes each guess cost about 8 MiB and 20 ms, and it runs once for each key.
    """
    return f"key:{hashlib.scrypt(key.encode(), salt=b'dragoman static key', n=2**13, r=8, p=1, dklen=6).hex()}"


def _limited(principal: str, scopes: frozenset[RouteScope], limits: KeyLimits, key: str) -> Caller:
    """A caller with the limits of a key."""
    budgets, priority = own_budgets(limits, "key", key), limits.priority or "interactive"
    return Caller(principal, scopes, None, _make_quota(limits), key=key, budgets=budgets, priority=priority)


def _make_quota(limits: KeyLimits) -> Quota | None:
    return Quota(limits) if limits.has_rates else None


class _StoredKeys:
    def __init__(self, path: Path, limits: KeyLimits) -> None:
        self._path = path
        self._limits = limits
        self._reader = KeyReader(path)
        self._known: dict[bytes, tuple[ApiKey, Caller]] = {}
        self._checked_at = -CHECK_SECONDS
        self._unreadable: StorageUnavailable | None = None
        self._was_used = False
        try:
            self._read()
        except StorageUnavailable as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.__cause__}") from error

    def inherit_quotas(self, before: "_StoredKeys") -> None:
        if self._path != before._path:
            return
        self._was_used = self._was_used or before._was_used
        for key_id, (_, caller) in self._known.items():
            caller.keep_quota(before._known.get(key_id, (None, None))[1])

    def callers(self) -> list[Caller]:
        now = time.time()
        return [caller for key, caller in self._known.values() if key.is_valid(now)]

    def is_used(self, sent: Iterable[bytes] = ()) -> bool:
        """Whether the store has ever contained a key. The keys that were `sent` may be its first ones."""
        is_due = time.monotonic() - self._checked_at >= CHECK_SECONDS
        if is_due or (not self._was_used and any(map(KEY_PATTERN.fullmatch, sent))):
            self.refresh()
        return self._was_used

    def find(self, sent: bytes, hashed: bytes) -> Caller | None:
        form = KEY_PATTERN.fullmatch(sent)
        key_id, now = form[1] if form else b"", time.time()
        key, caller, is_same = self._compare(key_id, hashed, now)
        if form and not is_same:
            # The key or its secret may be new. The check is as cheap as a refusal: the store is read only if it has
            # changed.
            self.refresh()
            key, caller, is_same = self._compare(key_id, hashed, now)
            if not is_same and self._unreadable is not None:
                raise self._unreadable
        return caller if is_same and key is not None and key.is_valid(now) else None

    def _compare(self, key_id: bytes, hashed: bytes, now: float) -> tuple[ApiKey | None, Caller | None, bool]:
        key, caller = self._known.get(key_id, (None, None))
        return key, caller, (key or _NO_KEY).has_digest(hashed, now)

    def refresh(self) -> None:
        before = self._unreadable
        try:
            self._read()
        except StorageUnavailable as error:
            self._unreadable = error
            if before is None:
                log.error("cannot read the key store; known keys stay valid: %s", error.__cause__)

    def _read(self) -> None:
        self._checked_at = time.monotonic()
        if (keys := self._reader.read_changes()) is not None:
            self._known = {key.id.encode(): (key, self._caller(key)) for key in keys}
            self._was_used = self._was_used or bool(keys)
        self._unreadable = None

    def _caller(self, key: ApiKey) -> Caller:
        """Make the caller of a key. It keeps its quota when other keys change."""
        limits = key.limits.over(self._limits)
        caller = replace(_limited(key.principal, allowed_scopes(key.routes), limits, key.id), models=key.models or None)
        caller.keep_quota(self._known.get(key.id.encode(), (None, None))[1])
        return caller

    def close(self) -> None:
        self._reader.close()


def _sent_keys(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The keys in the two headers; empty without a key."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer, headers.get(b"x-api-key", b"").strip()


def _read_key(headers: Mapping[bytes, bytes]) -> bytes:
    bearer, header = _sent_keys(headers)
    if bearer and header and not hmac.compare_digest(digest(bearer), digest(header)):
        raise Unauthorized("the Authorization and x-api-key headers carry different keys")
    if not (bearer or header):
        raise Unauthorized("an API key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return bearer or header

"""Who is asking: a key becomes a caller, with what it may do.

    static   `api_keys` of the configuration: may do everything, as `key:DIGEST`
    store    `dragoman keys`: may do what it was made for, as `user:NAME` or `agent:NAME/USER`, until it is revoked
    jwt      a token with a valid signature (see `jwt`), as `jwt:SUBJECT`

Rules
1. Where there is no key of any kind, nobody needs one. Once there was one, everybody does, unless the configuration
   says that callers may be anonymous.
2. Keys are compared by digest and in constant time, and as many of them whatever was sent.
3. The store is looked at once a second, and at once for a key that is not known: a new key works as soon as it is
   made, a revoked one for a second at the most. While it cannot be read, the keys that were read go on working.
4. A principal depends on the key alone, not on the other keys or on their order, and is the same in every process and
   after a restart. The three kinds of principals never coincide.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from dragoman.config.sections import KeyLimits
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, StorageUnavailable, Unauthorized
from dragoman.core.urls import MIN_SECRET_LENGTH, redact_secrets
from dragoman.server.auth.jwt import Signed
from dragoman.server.auth.quotas import Quota
from dragoman.server.auth.scopes import ANYBODY, NO_KEY, USUAL, Caller, routes_of
from dragoman.storage.keys import FORM, Key, KeyReader, digest, store_path

log = logging.getLogger("dragoman.auth")

LOOK_SECONDS = 1.0
_STORED_KEY = re.compile(r"(dgm_[0-9a-f]{12})_[0-9a-f]+")
_TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*")
NOBODY = bytes(32)


class Access:
    """Everybody who is let in."""

    def __init__(self, settings: Settings) -> None:
        keys = settings.keys
        self._static = {
            digest(key.encode()): Caller(principal_of(key), quota=quota_for(keys.limits)) for key in settings.api_keys
        }
        self._signed = None if keys.jwt is None else Signed(keys.jwt, keys.limits)
        self._stored = _Stored(store_path(keys), keys.limits)
        self._anonymous = Caller(NO_KEY, USUAL, quota=quota_for(keys.limits)) if keys.anonymous else None
        self._secrets = [key for key in settings.api_keys if len(key) >= MIN_SECRET_LENGTH]

    @property
    def needs_keys(self) -> bool:
        return self._stored.look() or bool(self._static or self._signed)

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        if not self.needs_keys:
            return self._anonymous or ANYBODY
        try:
            return self._known(_given(headers))
        except Unauthorized:
            if self._anonymous is None:
                raise
            return self._anonymous

    def _known(self, given: bytes) -> Caller:
        if self._signed is not None and given.count(b".") == 2:
            return self._signed.caller(given)
        hashed, found = digest(given), None
        for known, caller in self._static.items():
            if hmac.compare_digest(hashed, known):
                found = caller
        stored = self._stored.find(given, hashed)
        found = found or stored
        if found is None:
            raise Unauthorized("the API key is not valid here")
        return found

    def redact(self, text: str) -> str:
        """A caller's text for the log, with API keys and signed tokens hidden."""
        text = _TOKEN.sub("eyJ***", _STORED_KEY.sub(r"\1_***", text))
        return redact_secrets(text, self._secrets)

    def follow(self, before: "Access") -> None:
        """Take over from an older configuration: whoever is still let in has used what it has used."""
        for hashed, caller in self._static.items():
            if hashed in before._static:
                caller.quota = kept(caller.quota, before._static[hashed].quota)
        if self._anonymous is not None and before._anonymous is not None:
            self._anonymous.quota = kept(self._anonymous.quota, before._anonymous.quota)
        if self._signed is not None and before._signed is not None:
            self._signed.follow(before._signed)
        self._stored.follow(before._stored)
        before.close()

    def close(self) -> None:
        self._stored.close()


@lru_cache(maxsize=1024)
def principal_of(key: str) -> str:
    """The principal of a static key: its name in logs, and the owner of its responses.

    The operator chose the key, so it may be weak, and logs are read by others. A plain digest would let them test
    guesses by the billion. Scrypt makes each guess cost about 8 MiB and 20 ms, and it runs once for each key.
    """
    return f"key:{hashlib.scrypt(key.encode(), salt=b'dragoman static key', n=2**13, r=8, p=1, dklen=6).hex()}"


def quota_for(limits: KeyLimits) -> Quota | None:
    return None if limits == KeyLimits() else Quota(limits)


def kept(fresh: Quota | None, used: Quota | None) -> Quota | None:
    """What was used goes on being counted, by the new limits: requests that are under way hold on to it."""
    if fresh is None or used is None:
        return fresh
    used.change(fresh.limits)
    return used


class _Stored:
    """The keys of the store as they were read last."""

    def __init__(self, path: Path, limits: KeyLimits) -> None:
        self._path = path
        self._limits = limits
        self._reader = KeyReader(path)
        self._known: dict[bytes, tuple[Key, Caller]] = {}
        self._looked = -LOOK_SECONDS
        self._unreadable: StorageUnavailable | None = None
        self._is_used = False
        try:
            self._read()
        except StorageUnavailable as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.__cause__}") from error

    def follow(self, before: "_Stored") -> None:
        if self._path != before._path:
            return
        self._is_used = self._is_used or before._is_used
        for key_id, (_, caller) in self._known.items():
            if key_id in before._known:
                caller.quota = kept(caller.quota, before._known[key_id][1].quota)

    def look(self) -> bool:
        """Whether there has ever been a key here."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        return self._is_used

    def find(self, given: bytes, hashed: bytes) -> Caller | None:
        form = FORM.fullmatch(given)
        key_id = form[1] if form else b""
        if form and key_id not in self._known:
            # To look costs about as much as to refuse; only what has changed is read.
            self._look()
        key, caller = self._known.get(key_id, (None, None))
        is_same = hmac.compare_digest(hashed, NOBODY if key is None else key.digest)
        if key is None and form and self._unreadable is not None:
            raise self._unreadable
        return caller if is_same and key is not None and key.is_valid(time.time()) else None

    def _look(self) -> None:
        before = self._unreadable
        try:
            self._read()
        except StorageUnavailable as error:
            self._unreadable = error
            if before is None:
                log.error("the keys cannot be read, those known go on working: %s", error.__cause__)

    def _read(self) -> None:
        self._looked = time.monotonic()
        if self._reader.has_changed():
            keys = self._reader.keys()
            self._known = {key.id.encode(): (key, self._caller(key)) for key in keys}
            self._is_used = self._is_used or bool(keys)
        self._unreadable = None

    def _caller(self, key: Key) -> Caller:
        """What it has used of its limits is remembered when other keys change."""
        limits = key.limits.over(self._limits)
        _, before = self._known.get(key.id.encode(), (None, None))
        quota = quota_for(limits) if before is None or before.quota is None else before.quota
        if quota is not None:
            quota.change(limits)
        return Caller(key.principal, routes_of(key.routes), key.models or None, quota)

    def close(self) -> None:
        self._reader.close()


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    header = headers.get(b"x-api-key", b"").strip()
    if bearer and header and not hmac.compare_digest(digest(bearer), digest(header)):
        raise Unauthorized("the Authorization and x-api-key headers carry different keys")
    if not (bearer or header):
        raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    return bearer or header

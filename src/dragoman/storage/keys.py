"""Keys in a file of SQLite's, made by `dragoman keys` and read by the server.

    key := "dgm_" id "_" secret        id: 12 hexadecimal digits, to name it by; secret: 48 more

Rules
1. The key itself is shown once and kept nowhere: what is kept is its digest. A plain SHA-256 is enough, because nobody
   guesses 192 random bits.
2. What `create` and `revoke` have done survives a crash of anything.
3. A key that was revoked stays in the file: a store that has ever had a key never lets anybody in without one.
4. Whoever only reads neither makes the file nor changes it.
"""

import hashlib
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dragoman.config.sections import KeyLimits, Keys, RouteScope
from dragoman.core.errors import ConfigError, StorageUnavailable
from dragoman.files.sources import home

FORM = re.compile(rb"dgm_([0-9a-f]{12})_[0-9a-f]{48}")
PRINCIPAL = re.compile(r"(user:[A-Za-z0-9._@+-]{1,64}|agent:[A-Za-z0-9._+-]{1,64}/[A-Za-z0-9._@+-]{1,64})")
SCHEMA = 1
TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, principal TEXT NOT NULL, digest BLOB NOT NULL, created REAL NOT NULL,
    expires REAL, revoked REAL, models TEXT NOT NULL, routes TEXT NOT NULL, limits TEXT NOT NULL
)
"""
WRITE_SECONDS = 10.0
READ_SECONDS = 0.05
"""The server reads between two requests: it does not wait for a writer, it looks again later."""
FIRST_READ_SECONDS = 10.0
"""At its start the server waits for a writer: without the keys it cannot serve."""


class Key(msgspec.Struct, frozen=True):
    """Times are those of the clock on the wall. Models are names and patterns; no models or routes: all that are."""

    id: str
    principal: str
    digest: bytes
    created: float
    expires: float | None = None
    revoked: float | None = None
    models: tuple[str, ...] = ()
    routes: tuple[RouteScope, ...] = ()
    limits: KeyLimits = KeyLimits()

    def is_valid(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)

    def state(self, now: float) -> str:
        return "valid" if self.is_valid(now) else "expired" if self.revoked is None else "revoked"


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def store_path(settings: Keys) -> Path:
    return Path(settings.store).expanduser() if settings.store else home() / "keys.db"


def checked_principal(name: str) -> str:
    """`NAME` is short for `user:NAME`."""
    principal = name if ":" in name else f"user:{name}"
    if not PRINCIPAL.fullmatch(principal):
        raise ConfigError(f"{name!r}: expected NAME, user:NAME or agent:NAME/USER, of letters, digits and . _ + - @")
    return principal


class KeyStore:
    def __init__(self, path: Path) -> None:
        self.path = path

    def create(
        self,
        principal: str,
        *,
        models: Sequence[str] = (),
        routes: Sequence[RouteScope] = (),
        limits: KeyLimits | None = None,
        expires: float | None = None,
    ) -> tuple[str, Key]:
        """The key, which nobody can ask for again, and what is kept of it."""
        name, limits = secrets.token_hex(6), limits or KeyLimits()
        secret = f"dgm_{name}_{secrets.token_hex(24)}"
        key = Key(
            id=name,
            principal=checked_principal(principal),
            digest=digest(secret.encode()),
            created=time.time(),
            expires=expires,
            models=tuple(models),
            routes=tuple(routes),
            limits=limits,
        )
        lists = (msgspec.json.encode(part).decode() for part in (key.models, key.routes, key.limits))
        row = (key.id, key.principal, key.digest, key.created, key.expires, None, *lists)
        with self._writing() as connection:
            connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return secret, key

    def revoke(self, key_id: str) -> bool:
        """Whether there was such a key that was not revoked yet."""
        with self._writing() as connection:
            change = "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL"
            return connection.execute(change, (time.time(), key_id)).rowcount > 0

    def all(self) -> list[Key]:
        """The oldest first; none where there is no file yet."""
        try:
            with KeyReader(self.path) as reader:
                return reader.keys() if reader.has_changed() else []
        except StorageUnavailable as error:
            raise ConfigError(f"the keys in {self.path} cannot be read: {error.__cause__}") from error

    @contextmanager
    def _writing(self) -> Generator[sqlite3.Connection, None, None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Made by hand first: nobody else may read it, from the first moment on.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = sqlite3.connect(self.path, timeout=WRITE_SECONDS)
            try:
                connection.execute("PRAGMA synchronous = EXTRA")
                _check_schema(connection)
                connection.execute(TABLE)
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
                with connection:
                    yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the keys in {self.path} cannot be written: {error}") from error


class KeyReader:
    """Looks into a store again and again, and reads it only where it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._seen: tuple[int, int, int] | None = None
        self._has_read = False

    def __enter__(self) -> "KeyReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        # Another connection counts changes from another beginning.
        self._seen = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def has_changed(self) -> bool:
        """Whether there is something to read that was not there at the last `keys`."""
        return (mark := self._mark()) is not None and mark != self._seen

    def keys(self) -> list[Key]:
        mark = self._mark()
        try:
            assert self._connection is not None
            _check_schema(self._connection)
            rows = self._connection.execute("SELECT * FROM keys ORDER BY created, id").fetchall()
            keys = [_key(row) for row in rows]
        except (sqlite3.Error, msgspec.MsgspecError, ConfigError) as error:
            self.close()
            raise StorageUnavailable("the keys cannot be read now; try again later") from error
        self._seen = mark
        if not self._has_read:
            self._has_read = True
            self._connection.execute(f"PRAGMA busy_timeout = {READ_SECONDS * 1000:.0f}")
        return keys

    def _mark(self) -> tuple[int, int, int] | None:
        """Another one for every change; None where there is no file, or an empty one that is just being made."""
        try:
            stat = self._path.stat()
            if not stat.st_size:
                return None
            file = stat.st_dev, stat.st_ino
            if self._connection is None or self._seen is None or self._seen[:2] != file:
                self.close()
                address = f"{self._path.absolute().as_uri()}?mode=ro"
                timeout = READ_SECONDS if self._has_read else FIRST_READ_SECONDS
                self._connection = sqlite3.connect(address, uri=True, timeout=timeout, check_same_thread=False)
            (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except FileNotFoundError:
            return None
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise StorageUnavailable("the keys cannot be read now; try again later") from error
        return *file, version


def _check_schema(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA):
        raise ConfigError("it was made by a newer version of Dragoman")


def _key(row: tuple[str, str, bytes, float, float | None, float | None, str, str, str]) -> Key:
    key_id, principal, hashed, created, expires, revoked, models, routes, limits = row
    return Key(
        id=key_id,
        principal=principal,
        digest=hashed,
        created=created,
        expires=expires,
        revoked=revoked,
        models=msgspec.json.decode(models, type=tuple[str, ...]),
        routes=msgspec.json.decode(routes, type=tuple[RouteScope, ...]),
        limits=msgspec.json.decode(limits, type=KeyLimits),
    )

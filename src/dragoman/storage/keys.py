"""Stores API keys in SQLite; `dragoman keys` writes them and the server reads them.

    key := "dgm_" id "_" secret        id: 12 hexadecimal digits; secret: 48 hexadecimal digits

Rules
1. Only the SHA-256 digest of a key is stored; the key is shown once. A plain hash suffices for 192 random bits.
2. Effects of `create` and `revoke` survive a crash.
3. A revoked key stays in the file: a store that ever had a key never allows access without one.
4. A reader neither creates nor changes the file.
5. `rotate` gives a key a new secret. The old one is valid for some time more. All else of the key stays as it is.
6. The keys are not in the database of the storage: a server reads them without waiting, and `dragoman keys` writes them
   while a server has locked its database.
"""

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dragoman.config.sections import KeyLimits, Keys
from dragoman.core.errors import ConfigError, StorageUnavailable
from dragoman.core.types import RouteScope
from dragoman.files.sources import home_directory

KEY_ID = re.compile(r"[0-9a-f]{12}")
KEY_PATTERN = re.compile(rb"dgm_([0-9a-f]{12})_[0-9a-f]{48}")
PRINCIPAL = re.compile(r"(user:[A-Za-z0-9._@+-]{1,64}|agent:[A-Za-z0-9._+-]{1,64}/[A-Za-z0-9._@+-]{1,64})")
SCHEMA = 2
TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, principal TEXT NOT NULL, digest BLOB NOT NULL, created REAL NOT NULL,
    expires REAL, revoked REAL, models TEXT NOT NULL, routes TEXT NOT NULL, limits TEXT NOT NULL,
    previous BLOB, previous_until REAL
)
"""
INSERT = """
INSERT INTO keys VALUES (
    :id, :principal, :digest, :created, :expires, :revoked, :models, :routes, :limits, :previous, :previous_until
)
"""
ADDED = ("previous BLOB", "previous_until REAL")
"""The columns that version 1 does not have."""
JSON_COLUMNS = ("models", "routes", "limits")
WRITE_SECONDS = 10.0
READ_SECONDS = 0.05
"""The server does not wait for a writer; it reads again later."""
FIRST_READ_SECONDS = 10.0
"""At its start the server waits for a writer: without the keys it cannot serve."""


class ApiKey(msgspec.Struct, frozen=True):
    """Times are Unix times. `models` are names and patterns; empty `models` or `routes` mean all."""

    id: str
    principal: str
    digest: bytes
    created: float
    expires: float | None = None
    revoked: float | None = None
    models: tuple[str, ...] = ()
    routes: tuple[RouteScope, ...] = ()
    limits: KeyLimits = KeyLimits()
    previous: bytes | None = None
    """The digest of the secret before the last rotation, valid before `previous_until`."""
    previous_until: float | None = None

    def has_digest(self, hashed: bytes, now: float) -> bool:
        """Whether the digest is that of a valid secret. The number of comparisons is constant."""
        is_kept = self.previous_until is not None and now < self.previous_until
        is_previous = hmac.compare_digest(hashed, self.previous or bytes(32))
        return hmac.compare_digest(hashed, self.digest) or (is_previous and is_kept)

    def is_valid(self, now: float) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)

    def state(self, now: float) -> str:
        return "valid" if self.is_valid(now) else "expired" if self.revoked is None else "revoked"


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def store_path(settings: Keys) -> Path:
    return Path(settings.store).expanduser() if settings.store else home_directory() / "keys.db"


def parse_principal(name: str) -> str:
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
    ) -> tuple[str, ApiKey]:
        """Create a key; return it, for the only time, with its stored record."""
        key_id, limits = secrets.token_hex(6), limits or KeyLimits()
        secret = _new_secret(key_id)
        key = ApiKey(
            id=key_id,
            principal=parse_principal(principal),
            digest=digest(secret.encode()),
            created=time.time(),
            expires=expires,
            models=tuple(models),
            routes=tuple(routes),
            limits=limits,
        )
        row = msgspec.structs.asdict(key)
        row |= {name: msgspec.json.encode(row[name]).decode() for name in JSON_COLUMNS}
        with self._transaction() as connection:
            connection.execute(INSERT, row)
        return secret, key

    def rotate(self, key_id: str, until: float) -> str:
        """Give a valid key a new secret and return it. The present one is valid until this time."""
        secret = _new_secret(key_id)
        statement = "UPDATE keys SET previous = digest, previous_until = ?, digest = ? WHERE id = ? AND revoked IS NULL"
        with self._transaction() as connection:
            if not connection.execute(statement, (until, digest(secret.encode()), key_id)).rowcount:
                raise ConfigError(f"key {key_id} was revoked meanwhile")
        return secret

    def revoke(self, key_id: str) -> bool:
        """Revoke a key; return False if it is unknown or revoked already."""
        with self._transaction() as connection:
            statement = "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL"
            return connection.execute(statement, (time.time(), key_id)).rowcount > 0

    def all(self) -> list[ApiKey]:
        """Return all keys, oldest first; an empty list if there is no file."""
        try:
            with closing(KeyReader(self.path)) as reader:
                return reader.read_changes() or []
        except StorageUnavailable as error:
            raise ConfigError(f"the keys in {self.path} cannot be read: {error.__cause__}") from error

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Created here, so that its mode is private from the start.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = sqlite3.connect(self.path, timeout=WRITE_SECONDS)
            try:
                connection.execute("PRAGMA synchronous = EXTRA")
                _check_schema(connection)
                with connection:
                    _upgrade(connection)
                    yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the keys in {self.path} cannot be written: {error}") from error


class KeyReader:
    """Polls a store and reads it only when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._last_version: tuple[int, int, int] | None = None
        self._has_read = False

    def close(self) -> None:
        # The data version is only valid for one connection.
        self._last_version = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read_changes(self) -> list[ApiKey] | None:
        """Return all keys if the store has changed since the last call, otherwise None."""
        version = self._version()
        if version is None or version == self._last_version:
            return None
        try:
            assert self._connection is not None
            _check_schema(self._connection)
            found = self._connection.execute("SELECT * FROM keys ORDER BY created, id")
            names = [column[0] for column in found.description]
            keys = [_decode_row(dict(zip(names, row, strict=True))) for row in found.fetchall()]
        except (sqlite3.Error, msgspec.MsgspecError, ConfigError) as error:
            self.close()
            raise StorageUnavailable("the keys cannot be read now; try again later") from error
        self._last_version = version
        if not self._has_read:
            self._has_read = True
            self._connection.execute(f"PRAGMA busy_timeout = {READ_SECONDS * 1000:.0f}")
        return keys

    def _version(self) -> tuple[int, int, int] | None:
        """Return a value that differs after every change; None if the file is missing or still empty."""
        try:
            stat = self._path.stat()
            if not stat.st_size:
                return None
            file = stat.st_dev, stat.st_ino
            if self._connection is None or self._last_version is None or self._last_version[:2] != file:
                self.close()
                address = f"{self._path.absolute().as_uri()}?mode=ro"
                timeout = READ_SECONDS if self._has_read else FIRST_READ_SECONDS
                self._connection = sqlite3.connect(address, uri=True, timeout=timeout, check_same_thread=False)
            (data_version,) = self._connection.execute("PRAGMA data_version").fetchone()
        except FileNotFoundError:
            return None
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise StorageUnavailable("the keys cannot be read now; try again later") from error
        return *file, data_version


def _check_schema(connection: sqlite3.Connection) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA:
        raise ConfigError("it was created by a newer version of Dragoman")


def _upgrade(connection: sqlite3.Connection) -> None:
    """Create the table, or add the columns that an older version does not have."""
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(TABLE)
    if version == 1:
        for column in ADDED:
            connection.execute(f"ALTER TABLE keys ADD COLUMN {column}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _decode_row(row: dict[str, Any]) -> ApiKey:
    """Return the key of a row. Its columns are fields of the key; some are JSON."""
    row |= {name: msgspec.json.decode(row[name]) for name in JSON_COLUMNS}
    return msgspec.convert(row, ApiKey)


def _new_secret(key_id: str) -> str:
    return f"dgm_{key_id}_{secrets.token_hex(24)}"

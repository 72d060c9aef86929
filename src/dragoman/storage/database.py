"""Runs reads and writes on the database: SQLite in a file or in memory, or Postgres.

    address := "memory" | PATH of an SQLite file | "postgresql://" [USER [":" PASSWORD] "@"] HOST [":" PORT] "/" NAME

Rules
1. `write` returns after the commit: what it wrote survives kill -9 and a power cut.
2. Writes that are ready together share one transaction. If one of them fails, all are rolled back and each runs alone,
   so that a failure reaches only its own caller. A change may therefore run several times, and must have no side
   effects. The same happens after a deadlock: servers that share a Postgres database lock rows in different orders.
   A change with a side effect runs alone, after the writes before it have been committed or have failed.
3. One thread writes, on one connection: SQLite before 3.51.3 can damage a file that several connections write.
4. A full disk, a locked file or a lost connection raises `StorageUnavailable`. The next call tries again.
5. An SQLite file belongs to one server, which holds a lock on it. Several servers can share a Postgres database.
"""

import asyncio
import fcntl
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from dragoman.config.sections import MEMORY, POSTGRES
from dragoman.core.errors import ConfigError, StorageUnavailable
from dragoman.core.ids import new_id
from dragoman.core.urls import remove_credentials
from dragoman.storage.servers import register_server, remove_server, renew_heartbeat
from dragoman.storage.tables import migrate

log = logging.getLogger("dragoman.storage")

READERS = 4
MAX_GROUP = 256
"""Writes that share one transaction."""
BUSY_MILLISECONDS = 2000
CONNECT_SECONDS = 5
STATEMENT_MILLISECONDS = 30_000
IDLE_MILLISECONDS = 10_000
"""How long a transaction may rest. Others wait for its locks, and a server may be suspended within one: this must be
shorter than the time after which the others count as dead, because their heartbeats wait too."""
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 15_000}
"""How soon a connection ends whose server does not answer any more. The system alone would wait for many minutes."""
RETRY_SECONDS = 5.0
OUTAGE_SECONDS = 10.0
"""An outage is over when no use has failed for this long: on a full disk, small writes succeed between the others."""
CONFLICTS = frozenset({"40001", "40P01"})
"""Postgres' codes for a transaction that would have succeeded without those of other servers at the same time."""
CONFLICT_TRIES = 5
NOT_WRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)

T = TypeVar("T")
Query = Callable[[Connection], T]


class _Write(NamedTuple):
    change: Query[Any]
    future: Future[Any]
    is_alone: bool = False

    def is_wanted(self) -> bool:
        """Whether its caller still waits. From then on it cannot be cancelled."""
        return self.future.set_running_or_notify_cancel()


class StorageInUse(ConfigError):
    """Another server has locked the file."""


class StorageNotWritable(ConfigError):
    """The file cannot be created or written."""


class Database:
    """Connects at the first use, or with `open`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.server = new_id("srv-")
        """The id of this server in the database, new with every start."""
        self._lock: int | None = None
        self._writer: Engine | None = None
        self._reader: Engine | None = None
        self._readers = ThreadPoolExecutor(READERS, "dragoman-storage-read")
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()
        """Held while the state of the connections and of the thread changes."""
        self._is_closed = False
        self.is_failing = False
        """Whether the last use failed."""
        self._is_outage = False
        """Whether the log says last that the storage is not available."""
        self._failed = 0.0
        """When the last use failed that did, by the monotonic clock."""

    @property
    def is_shared(self) -> bool:
        """Whether several servers may use it."""
        return self.address.startswith(POSTGRES)

    @property
    def is_open(self) -> bool:
        """Whether the database has been used. Periodic jobs skip a database in memory until then."""
        return self._writer is not None

    def open(self) -> None:
        """Connect and upgrade the schema. Raises a ConfigError if that is impossible. Further calls do nothing."""
        with self._changing:
            if self._writer is not None:
                return
            try:
                self._connect()
            except (SQLAlchemyError, OSError, ConfigError) as error:
                self._disconnect()
                raise _kind_of(error)(f"the storage {self._shown} cannot be opened: {_reason(error)}") from error

    async def read(self, query: Query[T]) -> T:
        if self.address == MEMORY:
            return await self.write(query)
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, query)

    async def renew_heartbeat(self) -> None:
        """Tell the other servers that this one is alive."""
        await self.write(lambda connection: renew_heartbeat(connection, self.server))

    async def write(self, change: Query[T], *, is_alone: bool = False) -> T:
        """Run the change and return its result after the commit."""
        return await asyncio.wrap_future(self.submit(change, is_alone=is_alone))

    def submit(self, change: Query[T], *, is_alone: bool = False) -> "Future[T]":
        """Queue the change. A caller that does not wait for the future must look at its error in a callback."""
        future: Future[T] = Future()
        with self._changing:
            if self._is_closed:
                future.set_exception(StorageUnavailable("the storage is closed", retry_after=RETRY_SECONDS))
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_writes, name="dragoman-storage", daemon=True)
                self._thread.start()
            self._writes.put(_Write(change, future, is_alone))
        return future

    def close(self) -> None:
        """Commit what is queued, and disconnect. Further calls do nothing."""
        with self._changing:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._writes.put(_Write(lambda connection: remove_server(connection, self.server), Future()))
            self._writes.put(None)
            thread.join()
        self._readers.shutdown()
        self._disconnect()

    @property
    def _shown(self) -> str:
        """The address without a password."""
        return remove_credentials(self.address) if self.is_shared else self.address

    def _connect(self) -> None:
        if self.address == MEMORY:
            self._writer = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
            _configure_sqlite(self._writer, "PRAGMA foreign_keys = ON")
        elif self.is_shared:
            self._writer = self._reader = self._postgres_engine()
        else:
            path = Path(self.address)
            self._create_file(path)
            url = URL.create("sqlite", database=str(path.absolute()))
            timeout = f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}"
            self._writer = create_engine(url, pool_size=1, max_overflow=0)
            durable = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA foreign_keys = ON")
            _configure_sqlite(self._writer, timeout, *durable, begin="BEGIN IMMEDIATE")
            self._reader = create_engine(url, pool_size=READERS, max_overflow=0)
            _configure_sqlite(self._reader, timeout, "PRAGMA query_only = ON")
        with self._writer.begin() as connection:
            migrate(connection)
            register_server(connection, self.server, is_alone=not self.is_shared)

    def _postgres_engine(self) -> Engine:
        try:
            url = make_url(self.address).set(drivername="postgresql+psycopg")
            limits = (("statement", STATEMENT_MILLISECONDS), ("idle_in_transaction_session", IDLE_MILLISECONDS))
            options = " ".join(f"-c {name}_timeout={most}" for name, most in limits)
            arguments = {"connect_timeout": CONNECT_SECONDS, "options": options, **KEEPALIVE}
            return create_engine(url, pool_size=READERS + 1, pool_pre_ping=True, connect_args=arguments)
        except (ArgumentError, ValueError) as error:
            raise ConfigError(f"expected {POSTGRES}USER:PASSWORD@HOST:PORT/NAME") from error
        except ModuleNotFoundError as error:
            raise ConfigError("it needs psycopg: pip install 'dragoman[postgres]'") from error

    def _create_file(self, path: Path) -> None:
        """Create the file with a private mode, and lock it for this server."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        # Not a lock on the file itself: on some systems that would be one of SQLite's.
        self._lock = os.open(path.with_name(f"{path.name}-lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageInUse(
                "another server uses it; give each server its own (--storage), or share a Postgres database"
            ) from error

    def _disconnect(self) -> None:
        for engine in {self._writer, self._reader} - {None}:
            assert engine is not None
            engine.dispose()
        self._writer = self._reader = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self, query: Query[T]) -> T:
        try:
            self.open()
            assert self._reader is not None
            with self._reader.begin() as connection:
                return query(connection)
        except (DBAPIError, OSError, ConfigError) as error:
            raise self._unavailable(error) from error

    def _run_writes(self) -> None:
        """Commit what is queued, in groups, until the database is closed."""
        is_open = True
        while is_open:
            group = [self._writes.get()]
            while len(group) < MAX_GROUP and not self._writes.empty():
                group.append(self._writes.get())
            is_open = None not in group
            writes = [write for write in group if write is not None and write.is_wanted()]
            for is_alone, together in groupby(writes, lambda write: write.is_alone):
                self._commit_group(list(together), is_alone)

    def _commit_group(self, writes: list[_Write], is_alone: bool) -> None:
        if is_alone or not self._commit(writes):
            for write in writes:
                self._commit_alone(write)

    def _commit_alone(self, write: _Write) -> None:
        for left in reversed(range(CONFLICT_TRIES)):
            if self._commit([write], is_last_try=not left):
                return

    def _commit(self, writes: list[_Write], is_last_try: bool = False) -> bool:
        """Run the changes in one transaction. Return False, without an effect, if they should run alone."""
        try:
            self.open()
            assert self._writer is not None
            with self._writer.begin() as connection:
                results = [write.change(connection) for write in writes]
        except Exception as error:  # noqa: BLE001 (each caller gets it)
            is_own = len(writes) > 1 and not _concerns_database(error)
            if not is_last_try and (is_own or _is_conflict(error)):
                return False
            failure = self._unavailable(error) if _concerns_database(error) else error
            for write in writes:
                write.future.set_exception(failure)
            return True
        self.is_failing = False
        if self._is_outage and time.monotonic() - self._failed >= OUTAGE_SECONDS:
            self._is_outage = False
            log.warning("the storage %s works again", self._shown)
        for write, result in zip(writes, results, strict=True):
            write.future.set_result(result)
        return True

    def _unavailable(self, error: Exception) -> StorageUnavailable:
        self.is_failing, self._failed = True, time.monotonic()
        if not self._is_outage:
            self._is_outage = True
            log.error("the storage %s is not available: %s", self._shown, _reason(error))
        failure = StorageUnavailable("the storage is not available; try again later", retry_after=RETRY_SECONDS)
        failure.__cause__ = error
        return failure


def _configure_sqlite(engine: Engine, *pragmas: str, begin: str = "BEGIN") -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: object) -> None:
        # Otherwise the module `sqlite3` begins transactions itself, too late for a write lock.
        connection.isolation_level = None
        for pragma in pragmas:
            connection.execute(pragma).close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _concerns_database(error: Exception) -> bool:
    """Whether no change can succeed now, in contrast to an error of one change."""
    return isinstance(error, DBAPIError | OSError | ConfigError) and not isinstance(error, IntegrityError | DataError)


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in CONFLICTS


def _kind_of(error: Exception) -> type[ConfigError]:
    """The class of the error that is raised if the storage cannot be opened for this reason."""
    if isinstance(error, StorageInUse):
        return StorageInUse
    cause = error.orig if isinstance(error, DBAPIError) else error
    # Extended codes have the code of their group in the lowest byte.
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    return StorageNotWritable if isinstance(cause, OSError) or code in NOT_WRITABLE else ConfigError


def _reason(error: Exception) -> str:
    """Return the first line of the message of the database or the system."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return text.strip().partition("\n")[0]

"""Stores the files of callers: their rows in the database, their contents in the blob store.

Rules
1. A file belongs to a principal. Other principals cannot see it. It is there until it is deleted or expires.
2. A blob is removed together with the last file that has it. If the blob of a new file was removed before its row was
   written, the file is refused and the caller has to upload it again.
3. Adding a file and removing its blob exclude each other. In SQLite both run in the thread that writes; in Postgres
   both lock the digest.
4. `remove_expired` and `sweep` are periodic jobs. `sweep` removes blobs that a crash left without a row.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, select

from dragoman.core.errors import StorageUnavailable, TooLarge
from dragoman.core.ids import new_id
from dragoman.protocols.files import BINARY, FileEntry, Order
from dragoman.storage.blobs import RETRY_SECONDS, Blob, BlobStore
from dragoman.storage.database import Database
from dragoman.storage.pages import select_page
from dragoman.storage.space import SpaceLimit
from dragoman.storage.tables import files

PREFIX = "file-"
ID = re.compile(rf"{PREFIX}[0-9a-f]+")
"""Postgres refuses NUL characters in text."""
EXPIRY_SECONDS, SWEEP_SECONDS = 60.0, 3600.0
"""The pauses between two runs of the jobs."""
GROUP = 200
"""Rows of one statement that removes expired files."""


class StoredFile(FileEntry, frozen=True, kw_only=True):
    principal: str
    digest: str
    owner: str
    """The principal whose space the file needs."""


class FilePage(NamedTuple):
    files: Sequence[StoredFile]
    has_more: bool


class NewFile(msgspec.Struct, frozen=True):
    """A file to add."""

    principal: str
    name: str
    purpose: str
    blob: Blob
    expires: float | None = None
    """A time; None means the default."""
    media_type: str = BINARY
    owner: str | None = None
    """None means the principal."""


class Files(Protocol):
    """The interface of the file store that front ends have too."""

    async def add(self, new: NewFile) -> StoredFile: ...

    async def find(self, principal: str, file_id: str) -> StoredFile | None: ...


class FileStore:
    def __init__(
        self, database: Database, blobs: BlobStore, keep_seconds: float, space: SpaceLimit | None = None
    ) -> None:
        """`keep_seconds` is how long a file is kept if its caller does not say."""
        self.space = space
        self._database = database
        self._blobs = blobs
        self._keep_seconds = keep_seconds

    async def add(self, new: NewFile) -> StoredFile:
        """Add a file with a content that has just been written."""
        file = self.draft(new)
        try:
            await self.take_space(file)
            await self._database.write(lambda connection: self.insert(connection, file))
        except (StorageUnavailable, TooLarge):
            await self.remove_unused_contents([file.digest])
            raise
        return file

    async def take_space(self, file: StoredFile) -> None:
        """Raises TooLarge if the owner has no room for the file."""
        if self.space is not None:
            await self.space.take(file.owner, file.size)

    def draft(self, new: NewFile) -> StoredFile:
        """A file that is not stored yet."""
        now = time.time()
        return StoredFile(
            id=new_id(PREFIX),
            principal=new.principal,
            created=now,
            expires=now + self._keep_seconds if new.expires is None else new.expires,
            name=new.name,
            purpose=new.purpose,
            media_type=new.media_type,
            size=new.blob.size,
            digest=new.blob.digest,
            owner=new.principal if new.owner is None else new.owner,
        )

    def insert(self, connection: Connection, file: StoredFile) -> None:
        """Store the file as a part of a transaction. Its content has just been written."""
        _lock(connection, file.digest)
        connection.execute(insert(files).values(msgspec.structs.asdict(file) | {"name": file.name.encode()}))
        if not self._blobs.has(file.digest):
            # The last other file with this content was deleted meanwhile.
            raise StorageUnavailable("the file was not stored; send it again", retry_after=RETRY_SECONDS)

    async def find(self, principal: str, file_id: str) -> StoredFile | None:
        if not ID.fullmatch(file_id):
            return None
        query = select(files).where(files.c.id == file_id, _is_visible(principal))
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else _file(row)

    async def list(
        self,
        principal: str,
        purpose: str | None = None,
        limit: int = 100,
        after: StoredFile | None = None,
        order: Order = "desc",
    ) -> FilePage:
        """Files in the order of their creation, beginning after `after`."""
        query = select(files).where(_is_visible(principal))
        if purpose is not None:
            query = query.where(files.c.purpose == purpose)
        query = select_page(query, files, limit, after, order)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return FilePage([_file(row) for row in rows[:limit]], len(rows) > limit)

    async def delete(self, principal: str, file_id: str) -> bool:
        """Return whether the file existed."""
        if not ID.fullmatch(file_id):
            return False
        query = delete(files).where(files.c.id == file_id, _is_visible(principal)).returning(files.c.digest)
        digests = await self._database.write(lambda connection: connection.execute(query).scalars().all())
        await self.remove_unused_contents(digests)
        return bool(digests)

    async def remove_expired(self) -> None:
        if not self._database.is_open:
            return
        expired = select(files.c.id).where(files.c.expires <= time.time()).limit(GROUP)
        query = delete(files).where(files.c.id.in_(expired)).returning(files.c.digest)
        while digests := await self._database.write(lambda connection: connection.execute(query).scalars().all()):
            await self.remove_unused_contents(digests)

    async def sweep(self) -> None:
        """Remove old contents that belong to no file."""
        if not self._database.is_open:
            return
        query = select(files.c.digest).distinct()
        used = await self._database.read(lambda connection: set(connection.execute(query).scalars()))
        await asyncio.to_thread(self._blobs.sweep, used)

    async def remove_unused_contents(self, digests: Sequence[str]) -> None:
        """Remove the blobs that no file has any more. `sweep` retries those that fail."""
        removals = (self._database.write(self._removal(digest), is_alone=True) for digest in set(digests))
        for result in await asyncio.gather(*removals, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, StorageUnavailable):
                raise result

    def _removal(self, digest: str) -> Callable[[Connection], None]:
        def change(connection: Connection) -> None:
            # It runs alone, because it has a side effect: it must not rely on a deletion that is rolled back later.
            if _try_lock(connection, digest) and not _is_used(connection, digest):
                # Not an error of the database: `sweep` tries again.
                with suppress(OSError):
                    self._blobs.delete(digest)

        return change


def _is_visible(principal: str) -> ColumnElement[bool]:
    return and_(files.c.principal == principal, files.c.expires > time.time())


def _is_used(connection: Connection, digest: str) -> bool:
    return connection.execute(select(files.c.id).where(files.c.digest == digest).limit(1)).one_or_none() is not None


def _lock(connection: Connection, digest: str) -> None:
    """Keep other servers from removing this content until the end of the transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock_shared(_lock_key(digest))))


def _try_lock(connection: Connection, digest: str) -> bool:
    """Keep other servers from adding files with this content until the end of the transaction; False if one does."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.execute(select(func.pg_try_advisory_xact_lock(_lock_key(digest)))).scalar_one())


def _lock_key(digest: str) -> int:
    return int.from_bytes(bytes.fromhex(digest[:16]), signed=True)


def _file(row: Row[Any]) -> StoredFile:
    return StoredFile(**row._asdict() | {"name": row.name.decode()})

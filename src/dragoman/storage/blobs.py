"""Stores blobs: the contents of files, each named by its SHA-256 digest.

    DIRECTORY/ab/abcdef...      a blob
    DIRECTORY/new/...           blobs that are being written

Rules
1. A blob is written to a temporary file, synced, and renamed. After a crash it exists completely or not at all.
2. Equal contents are one blob. The database knows which blobs are in use.
3. `sweep` removes what a crash left: temporary files, and unused blobs, once they are old enough that no running upload
   can need them.
4. A directory belongs to one database: a second database would treat its blobs as unused. Servers that share a database
   share the directory. The directory of a database in memory is temporary; `close` removes it.
"""

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import msgspec

from dragoman.config.sections import MEMORY, POSTGRES, Storage
from dragoman.core.errors import StorageUnavailable
from dragoman.core.ids import new_id
from dragoman.files.sources import home_directory

NEW = "new"
DIGEST = re.compile("[0-9a-f]{64}")
TEMPORARY_NAME = re.compile("[0-9a-f]{24}")
ORPHAN_SECONDS = 3600.0
RETRY_SECONDS = 5.0


class Blob(msgspec.Struct, frozen=True):
    digest: str
    size: int


class BlobWriter:
    """Writes one blob. Leaving the context without `commit` removes it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._temporary = directory / NEW / new_id("")
        self._hash = hashlib.sha256()
        self._size = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            # `mode` applies only to the last directory of a path.
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._temporary.parent.mkdir(exist_ok=True, mode=0o700)
            self._file = os.fdopen(os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
        except OSError as error:
            raise _unavailable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # The rest of the buffer may not fit on the disk; the file is removed anyway.
            with suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise _unavailable(error) from error
        self._hash.update(data)
        self._size += len(data)

    def commit(self) -> Blob:
        assert self._file is not None
        blob = Blob(self._hash.hexdigest(), self._size)
        target = blob_path(self._directory, blob.digest)
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            target.parent.mkdir(exist_ok=True, mode=0o700)
            self._temporary.replace(target)
            for directory in (target.parent, self._directory):
                _sync_directory(directory)
        except OSError as error:
            raise _unavailable(error) from error
        self._file = None
        return blob


class BlobStore:
    """The methods block: call them in a thread."""

    def __init__(self, directory: Path, *, is_temporary: bool = False) -> None:
        self.directory = directory
        self._is_temporary = is_temporary

    def writer(self) -> BlobWriter:
        return BlobWriter(self.directory)

    def add(self, content: bytes) -> Blob:
        with self.writer() as writer:
            writer.write(content)
            return writer.commit()

    def path(self, digest: str) -> Path:
        return blob_path(self.directory, digest)

    def has(self, digest: str) -> bool:
        try:
            self.path(digest).stat()
        except OSError:
            return False
        return True

    def open(self, digest: str) -> BinaryIO:
        try:
            return self.path(digest).open("rb", buffering=0)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"the file cannot be read now ({reason}); try again later"
            raise StorageUnavailable(message, retry_after=RETRY_SECONDS) from error

    def delete(self, digest: str) -> None:
        """Remove an unused blob. An upload of the same content at this moment must check that its blob still exists
        after the database knows it."""
        self.path(digest).unlink(missing_ok=True)

    def sweep(self, used: Container[str], now: float | None = None) -> int:
        """Remove what a crash left; return the number of files."""
        before = (time.time() if now is None else now) - ORPHAN_SECONDS
        removed = 0
        for path in self._files():
            with suppress(FileNotFoundError):
                if path.name not in used and path.stat().st_mtime < before:
                    path.unlink()
                    removed += 1
        return removed

    def close(self) -> None:
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _files(self) -> Iterator[Path]:
        """Files with names of this class: the operator may have chosen a directory that has other files too."""
        for path in self.directory.glob("*/*"):
            folder, name = path.parent.name, path.name
            if TEMPORARY_NAME.fullmatch(name) if folder == NEW else DIGEST.fullmatch(name) and name.startswith(folder):
                yield path


def open_blobs(settings: Storage) -> BlobStore:
    is_temporary = settings.blobs is None and settings.address == MEMORY
    return BlobStore(blob_directory(settings), is_temporary=is_temporary)


def blob_directory(settings: Storage) -> Path:
    """Return the directory of the settings; by default beside the database, for Postgres in the home directory."""
    if settings.blobs is not None:
        return Path(settings.blobs)
    if settings.address == MEMORY:
        return Path(tempfile.gettempdir()) / new_id("dragoman-blobs-")
    if settings.address.startswith(POSTGRES):
        name = urlsplit(settings.address).path.strip("/").replace("/", "_")
        return home_directory() / f"{name}-blobs"
    path = Path(settings.address)
    return path.with_name(f"{path.name}-blobs")


def blob_path(directory: Path, digest: str) -> Path:
    return directory / digest[:2] / digest


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unavailable(error: OSError) -> StorageUnavailable:
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "the path of the server's blobs is not a directory"
    return StorageUnavailable(f"the file cannot be stored now ({reason}); try again later", retry_after=RETRY_SECONDS)

import hashlib
import os
import time
from pathlib import Path

import pytest

from dragoman.config.sections import Storage
from dragoman.core.errors import StorageUnavailable
from dragoman.storage.blobs import ORPHAN_SECONDS, BlobStore, open_blobs


def test_equal_contents_are_stored_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    first, second = store.add(b"hello"), store.add(b"hello")
    assert first == second
    assert first.digest == hashlib.sha256(b"hello").hexdigest()
    assert store.path(first.digest).read_bytes() == b"hello"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [store.path(first.digest)]
    assert store.path(first.digest).stat().st_mode & 0o777 == 0o600


def test_abandoned_content_leaves_nothing(tmp_path: Path) -> None:
    with BlobStore(tmp_path).writer() as writer:
        writer.write(b"half")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_sweep_removes_old_leftovers_only(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    used, unused, fresh = (store.add(content).digest for content in (b"used", b"unused", b"fresh"))
    leftover = tmp_path / "new" / ("0" * 24)
    others = [tmp_path / "new" / "mail", tmp_path / "ab" / "letter"]
    (tmp_path / "ab").mkdir(exist_ok=True)
    for path in (leftover, *others):
        path.write_bytes(b"half")
    old = time.time() - ORPHAN_SECONDS - 1
    for path in (store.path(used), store.path(unused), leftover, *others):
        os.utime(path, (old, old))
    assert store.sweep({used}) == 2
    assert [store.path(digest).exists() for digest in (used, unused, fresh)] == [True, False, True]
    assert not leftover.exists()
    assert all(path.exists() for path in others)


def test_contents_of_a_database_in_memory_are_temporary() -> None:
    first, second = open_blobs(Storage()), open_blobs(Storage())
    assert first.directory != second.directory
    path = first.path(first.add(b"hello").digest)
    assert path.exists()
    first.close()
    assert not first.directory.exists()
    second.close()


def test_content_that_does_not_fit_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"a file where the directory should be")
    with pytest.raises(
        StorageUnavailable, match=r"cannot be stored now .the path of the server's blobs is not a directory"
    ):
        BlobStore(tmp_path / "blobs").add(b"hello")

"""Stored keys: secrets are not stored, and keys survive a crash."""

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from dragoman.config.sections import KeyLimits
from dragoman.core.errors import ConfigError, StorageUnavailable
from dragoman.storage.keys import KEY_PATTERN, KeyReader, KeyStore, digest


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "home" / "keys.db")


def test_created_key_is_stored(store: KeyStore) -> None:
    limits = KeyLimits(concurrency=1, tokens_per_minute=100)
    expires = time.time() + 60
    secret, key = store.create("anna", models=["smol*"], routes=["chat"], limits=limits, expires=expires)
    form = KEY_PATTERN.fullmatch(secret.encode())
    assert form
    assert form[1].decode() == key.id
    [kept] = store.all()
    assert kept == key
    assert (kept.principal, kept.models, kept.routes) == ("user:anna", ("smol*",), ("chat",))
    assert (kept.limits, kept.expires, kept.digest) == (limits, expires, digest(secret.encode()))


def test_secret_is_not_stored(store: KeyStore) -> None:
    secret, _ = store.create("anna")
    for file in store.path.parent.iterdir():
        assert secret.rpartition("_")[2].encode() not in file.read_bytes()


def test_file_is_private(store: KeyStore) -> None:
    store.create("anna")
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_revoked_key_stays_in_the_store(store: KeyStore) -> None:
    _, key = store.create("anna")
    assert store.revoke(key.id)
    assert not store.revoke(key.id)
    assert not store.revoke("unknown")
    [kept] = store.all()
    assert kept.state(time.time()) == "revoked"


def test_key_expires(store: KeyStore) -> None:
    _, key = store.create("anna", expires=1000.0)
    assert (key.state(999.9), key.state(1000.0)) == ("valid", "expired")


@pytest.mark.parametrize("name", ["anna", "user:anna", "agent:coder/anna", "user:anna@example.org"])
def test_valid_principals(store: KeyStore, name: str) -> None:
    assert store.create(name)[1].principal == (name if ":" in name else f"user:{name}")


@pytest.mark.parametrize(
    "name", ["", "user:", "agent:coder", "agent:/anna", "agent:a/b/c", "root:x", "a b", "x" * 65, "\n"]
)
def test_invalid_principals(store: KeyStore, name: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME"):
        store.create(name)


def test_reading_creates_no_file(store: KeyStore) -> None:
    assert store.all() == []
    assert not store.path.parent.exists()


def test_reader_detects_every_change(store: KeyStore) -> None:
    with closing(KeyReader(store.path)) as reader:
        assert reader.read_changes() is None
        _, first = store.create("anna")
        assert reader.read_changes() == [first]
        assert reader.read_changes() is None
        _, second = store.create("berta")
        assert reader.read_changes() == [first, second]
        store.revoke(first.id)
        assert [key.revoked is not None for key in reader.read_changes() or ()] == [True, False]
        store.path.unlink()
        assert reader.read_changes() is None
        _, last = store.create("carla")
        assert reader.read_changes() == [last]


def test_invalid_database_file(store: KeyStore) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(b"this is no database, and it is long enough to be seen as something else " * 20)
    with pytest.raises(ConfigError, match="cannot be read"):
        store.all()
    with pytest.raises(ConfigError, match="cannot be written"):
        store.create("anna")
    with closing(KeyReader(store.path)) as reader, pytest.raises(StorageUnavailable):
        reader.read_changes()
    assert store.path.read_bytes().startswith(b"this is no database")


def test_file_of_a_newer_version(store: KeyStore) -> None:
    store.create("anna")
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="newer version"):
        store.all()
    with pytest.raises(ConfigError, match="newer version"):
        store.create("berta")


def test_file_of_the_first_version_is_read_and_upgraded(store: KeyStore) -> None:
    secret, key = store.create("anna", routes=["chat"])
    with sqlite3.connect(store.path) as connection:
        for column in ("previous", "previous_until"):
            connection.execute(f"ALTER TABLE keys DROP COLUMN {column}")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    assert store.all() == [key]
    store.create("berta")
    store.rotate(key.id, 1000.0)
    [rotated, _] = store.all()
    assert (rotated.previous, rotated.previous_until) == (digest(secret.encode()), 1000.0)
    assert (rotated.id, rotated.routes, rotated.created) == (key.id, key.routes, key.created)


def test_rotated_key_has_two_secrets_until_the_old_one_expires(store: KeyStore) -> None:
    old, key = store.create("anna")
    new = store.rotate(key.id, 1000.0)
    assert KEY_PATTERN.fullmatch(new.encode())
    [kept] = store.all()
    hashed = {name: digest(secret.encode()) for name, secret in (("old", old), ("new", new), ("other", new[:-1]))}
    found = {name: (kept.has_digest(value, 999.0), kept.has_digest(value, 1000.0)) for name, value in hashed.items()}
    assert found == {"old": (True, False), "new": (True, True), "other": (False, False)}
    assert not kept.has_digest(bytes(32), 0.0)
    newest = store.rotate(key.id, 2000.0)
    [kept] = store.all()
    assert not kept.has_digest(hashed["old"], 0.0)
    assert kept.has_digest(digest(newest.encode()), 1500.0)
    store.revoke(key.id)
    with pytest.raises(ConfigError, match="revoked"):
        store.rotate(key.id, 2000.0)


WRITER = """
import sys
from pathlib import Path
from dragoman.storage.keys import KeyStore
store = KeyStore(Path(sys.argv[1]))
while True:
    print(store.create("anna")[1].id, flush=True)
"""


def test_shown_keys_survive_kill_9(store: KeyStore) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(store.path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    shown = [writer.stdout.readline().strip() for _ in range(10)]
    os.kill(writer.pid, signal.SIGKILL)
    shown += writer.stdout.read().split()
    writer.wait()
    writer.stdout.close()
    assert {name for name in shown if len(name) == 12} <= {key.id for key in store.all()}


def test_the_first_read_waits_for_a_writer(store: KeyStore) -> None:
    store.create("anna")
    writer = sqlite3.connect(store.path, check_same_thread=False)
    writer.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.5, writer.rollback)
    timer.start()
    with closing(KeyReader(store.path)) as reader:
        assert len(reader.read_changes() or ()) == 1
        timer.join()
        writer.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(StorageUnavailable):
            reader.read_changes()
        assert time.monotonic() - began < 5
    writer.close()

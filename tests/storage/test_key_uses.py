from pathlib import Path

import pytest

from dragoman.storage.key_uses import KeyUses, read_uses, uses_path


def test_latest_use_of_each_key_is_written(tmp_path: Path) -> None:
    store = tmp_path / "keys.db"
    one, two = KeyUses(), KeyUses()
    one.write(store)
    assert read_uses(store) == {}
    assert not list(tmp_path.iterdir())
    one.note("a", 1.0)
    one.note("a", 2.0)
    one.note("b", 3.0)
    one.write(store)
    two.note("a", 1.5)
    two.note("c", 4.0)
    two.write(store)
    assert read_uses(store) == {"a": 2.0, "b": 3.0, "c": 4.0}
    assert list(tmp_path.iterdir()) == [uses_path(store)]
    assert uses_path(store).stat().st_mode & 0o777 == 0o600


def test_uses_are_kept_until_they_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = tmp_path / "home" / "keys.db"
    uses = KeyUses()
    uses.note("a", 1.0)
    uses.write(store)
    uses.write(store)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "cannot write the times of the last use of keys"
    ]
    store.parent.mkdir()
    uses.write(store)
    assert read_uses(store) == {"a": 1.0}


def test_damaged_file_counts_as_empty(tmp_path: Path) -> None:
    store = tmp_path / "keys.db"
    for text in ("{", "[]", '{"a": "b"}', "\0"):
        uses_path(store).write_text(text)
        assert read_uses(store) == {}

"""What a machine has, and what a container leaves of it."""

import os
from pathlib import Path

import pytest

from dragoman.engines.llama import machine


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "50000 100000"}, 0.5),
        ("12:cpu:/x\n", {}, None),
        ("0::/gone\n", {"cpu.max": "nonsense"}, None),
        (None, {"cpu.max": "100000 100000"}, 1),
    ],
)
def test_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], cpus: float | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    groups = tmp_path / "groups"
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "GROUPS", groups)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "own")
    assert machine.quota() == (64 if cpus is None else cpus)


def test_a_quota_of_less_than_one_cpu_leaves_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUP", tmp_path / "none")
    assert machine.cpus() == machine.threads() == 1

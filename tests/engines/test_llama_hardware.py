"""CPUs and memory of a machine, and the limits of a container."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.engines.llama import hardware

TOTAL_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
Containers = Callable[[str | None, dict[str, str]], None]


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Containers:
    """Write the control group of the process and the files of all groups."""

    def write(own: str | None, files: dict[str, str]) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        for name, text in files.items():
            (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / name).write_text(text)
        if own is not None:
            (tmp_path / "own").write_text(own)
        monkeypatch.setattr(hardware, "CGROUP_ROOT", tmp_path / "groups")
        monkeypatch.setattr(hardware, "OWN_CGROUP", tmp_path / "own")

    return write


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "50000 100000"}, 0.5),
        ("12:cpu:/x\n", {}, 64),
        ("0::/gone\n", {"cpu.max": "nonsense"}, 64),
        (None, {"cpu.max": "100000 100000"}, 1),
    ],
)
def test_cpu_quota_of_a_container(containers: Containers, own: str | None, files: dict[str, str], cpus: float) -> None:
    containers(own, files)
    assert hardware.cpu_quota() == cpus


def test_quota_below_one_cpu_leaves_one(containers: Containers) -> None:
    containers(None, {"cpu.max": "50000 100000"})
    assert hardware.cpus() == hardware.threads() == 1


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "5000\n"}, 5000),
        ("0::/system.slice/d.service\n", {"system.slice/d.service/memory.max": "7000\n"}, 7000),
        ("0::/a/b\n", {"memory.max": "9000", "a/memory.max": "6000", "a/b/memory.max": "max"}, 6000),
        ("0::/a\n", {"memory.max": "max", "other/memory.max": "1"}, TOTAL_MEMORY),
        ("0::/gone\n", {"memory.max": "nonsense"}, TOTAL_MEMORY),
    ],
)
def test_memory_limit_of_a_container_or_a_service(
    containers: Containers, own: str, files: dict[str, str], limit: int
) -> None:
    containers(own, files)
    assert hardware.memory() == limit

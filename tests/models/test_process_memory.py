"""Memory of single processes and of sessions."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dragoman.models import memory
from dragoman.models.memory import resident_memory, session_memory

MEBI = 2**20
FAMILY = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 << 20)
shared.write(b"x" * (64 << 20))
parent, child = os.pipe(), os.pipe()
for _ in range(int(sys.argv[1])):
    if not os.fork():
        shared.seek(0)
        shared.read()
        own = b"y" * (32 << 20)
        os.write(child[1], b"!")
        os.read(parent[0], 1)
        os._exit(0)
    os.read(child[0], 1)
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def family(children: int) -> Iterator[int]:
    """Start a process with 64 MiB and children that share it and have 32 MiB of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY, str(children)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            yield process.pid
        finally:
            os.killpg(process.pid, 9)


@pytest.fixture(autouse=True)
def fresh() -> None:
    memory._read_sessions.cache_clear()


def test_resident_memory() -> None:
    assert 5 * MEBI < resident_memory(os.getpid()) < 2**34
    assert resident_memory(None) == resident_memory(2**30) == 0


def test_single_process_counts_its_resident_memory() -> None:
    with family(0) as pid:
        assert session_memory(pid) == resident_memory(pid) > 64 * MEBI
    assert session_memory(None) == session_memory(2**30) == 0


def test_shared_pages_of_a_session_count_once() -> None:
    with family(3) as pid:
        assert (64 + 3 * 32) * MEBI < session_memory(pid) < (64 + 3 * 32 + 40) * MEBI


def test_without_pss_each_process_counts_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PSS", re.compile("nothing like it"))
    with family(2) as pid:
        assert session_memory(pid) > (3 * 64 + 2 * 32) * MEBI

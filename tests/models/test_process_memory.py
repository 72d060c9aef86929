"""What processes take, alone and together."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dragoman.models import process_memory
from dragoman.models.process_memory import resident, taken

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
    """A process with 64 MiB, and children that share it and have 32 MiB each of their own."""
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
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "LOOK_SECONDS", 0.0)


def test_a_process_is_measured() -> None:
    assert 5 * MEBI < resident(os.getpid()) < 2**34
    assert resident(None) == resident(2**30) == 0


def test_one_that_is_alone_counts_what_it_has() -> None:
    with family(0) as pid:
        assert taken(pid) == resident(pid) > 64 * MEBI
    assert taken(None) == taken(2**30) == 0


def test_what_it_has_started_counts_and_what_they_share_counts_once() -> None:
    with family(3) as pid:
        assert (64 + 3 * 32) * MEBI < taken(pid) < (64 + 3 * 32 + 40) * MEBI


def test_where_shares_are_not_told_each_counts_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "SHARE", re.compile("nothing like it"))
    with family(2) as pid:
        assert taken(pid) > (3 * 64 + 2 * 32) * MEBI

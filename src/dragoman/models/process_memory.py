"""Measures the memory of processes.

A worker leads its own session, to which the processes of its engine belong. Pages that they share are counted once
(Pss). A worker without other processes counts with its resident memory, which the system reports faster.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

LOOK_SECONDS = 0.25
"""The table of sessions is reused for this long, because many models are measured at once."""
PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def resident_memory(pid: int | None) -> int:
    """Return the resident bytes of a process; 0 if unknown."""
    try:
        if pid is None:
            return 0
        if sys.platform.startswith("linux"):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return sum(size for _, size in _list_processes(f"-p{pid}"))
    except (OSError, ValueError, IndexError):
        return 0


def session_memory(leader: int | None) -> int:
    """Return the bytes of a worker and of all processes in its session; 0 if unknown."""
    if leader is None:
        return 0
    if not sys.platform.startswith("linux"):
        return sum(size for group, size in _list_processes("-ax") if group == leader)
    others = _sessions.of(leader) - {leader}
    return sum(_proportional_size(pid) for pid in (leader, *others)) if others else resident_memory(leader)


def _proportional_size(pid: int) -> int:
    try:
        found = PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resident_memory(pid)


class _Sessions:
    """A cached table of the processes in each session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._members: dict[int, set[int]] = {}

    def of(self, leader: int) -> set[int]:
        with self._lock:
            if time.monotonic() - self._read_at > LOOK_SECONDS:
                self._members = _read_sessions()
                self._read_at = time.monotonic()
            return self._members.get(leader, set())


_sessions = _Sessions()


def _read_sessions() -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            found.setdefault(os.getsid(pid), set()).add(pid)
        except OSError:
            # The process has ended.
            continue
    return found


def _list_processes(selector: str) -> list[tuple[int, int]]:
    """Return the group and the bytes of processes on systems without /proc."""
    output = subprocess.run(["ps", selector, "-o", "pgid=,rss="], capture_output=True, text=True, check=False)  # noqa: S603, S607
    rows = (line.split() for line in output.stdout.splitlines())
    return [(int(row[0]), int(row[1]) * 1024) for row in rows if len(row) == 2]

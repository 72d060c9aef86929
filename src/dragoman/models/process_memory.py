"""How much memory processes have now, as the system tells.

A worker leads a session of its own, and what its engine starts belongs to it. A page that n of them share
counts as an nth for each, and so once for all. A worker that has started nobody has nobody to share with: all that it
has in memory counts, which the system tells at once, however much it is.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

LOOK_SECONDS = 0.25
"""Who belongs to whom is looked at again only after so long: figures of many models are asked for at once."""
SHARE = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def resident(pid: int | None) -> int:
    """Bytes that a process has in memory now; 0 where nobody can tell."""
    try:
        if pid is None:
            return 0
        if sys.platform.startswith("linux"):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return sum(size for _, size in _listed(f"-p{pid}"))
    except (OSError, ValueError, IndexError):
        return 0


def taken(leader: int | None) -> int:
    """Bytes that a worker and all that it has started have in memory now; 0 where nobody can tell."""
    if leader is None:
        return 0
    if not sys.platform.startswith("linux"):
        return sum(size for group, size in _listed("-ax") if group == leader)
    others = _sessions.of(leader) - {leader}
    return sum(_share(pid) for pid in (leader, *others)) if others else resident(leader)


def _share(pid: int) -> int:
    """Of what it shares with others only its part, where the system tells."""
    try:
        found = SHARE.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resident(pid)


class _Sessions:
    """Which processes belong to which session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked = 0.0
        self._found: dict[int, set[int]] = {}

    def of(self, leader: int) -> set[int]:
        with self._lock:
            if time.monotonic() - self._looked > LOOK_SECONDS:
                self._found = _look()
                self._looked = time.monotonic()
            return self._found.get(leader, set())


_sessions = _Sessions()


def _look() -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            found.setdefault(os.getsid(pid), set()).add(pid)
        except OSError:
            # It has ended meanwhile.
            continue
    return found


def _listed(which: str) -> list[tuple[int, int]]:
    """The group and the bytes of processes, where there is no /proc."""
    told = subprocess.run(["ps", which, "-o", "pgid=,rss="], capture_output=True, text=True, check=False)  # noqa: S603, S607
    rows = (line.split() for line in told.stdout.splitlines())
    return [(int(row[0]), int(row[1]) * 1024) for row in rows if len(row) == 2]

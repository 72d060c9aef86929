"""Measures the memory of models, and estimates how much one needs: the last measurement, or else the size of its file.

Measurements are stored in `home()/memory.json`, keyed by engine, options, file path, size and date.

A worker leads its own session, to which the processes of its engine belong. Pages that they share are counted once
(Pss). A worker without other processes counts with its resident memory, which the system reports faster.
"""

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

from dragoman.config.model_spec import ModelSpec
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.files.gguf import list_parts
from dragoman.models.fingerprint import describe_spec

log = logging.getLogger("dragoman.models")

PROCESS_BYTES = 100 * 1024 * 1024
"""Memory of a worker before it loads a model."""
MAX_REMEMBERED = 500
_lock = threading.Lock()
SESSIONS_SECONDS = 0.25
"""The table of sessions is read once in each period of this length, because many models are measured at once."""
PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def expected_memory(spec: ModelSpec) -> int:
    """Return the expected memory. Blocks: it reads files and downloads missing ones."""
    measured = _read_measurements().get(_key(spec))
    if measured is not None:
        return measured
    engine = engine_class(spec.engine)
    if not engine.needs_worker(spec.build_options()):
        return 0
    # An engine that loads a directory keeps the weights mostly in GPU memory.
    path = None if spec.file is None else sources.fetch(spec.file)
    size = 0 if path is None else sum(part.stat().st_size for part in list_parts(path))
    return PROCESS_BYTES + size + engine.memory_beside_file(spec.build_options(path))


def remember_memory(spec: ModelSpec, size: int) -> None:
    """Store a measurement; the largest one counts, because a model grows while it is used."""
    key = _key(spec)
    with _lock:
        known = _read_measurements()
        if known.get(key, 0) >= size:
            return
        # New entries go to the end; the oldest are dropped.
        known.pop(key, None)
        entries = dict([*known.items(), (key, size)][-MAX_REMEMBERED:])
        file = _file()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".memory-{os.getpid()}.json")
            temporary.write_text(json.dumps(entries))
            temporary.replace(file)
        except OSError as error:
            log.warning("%s cannot be written: %s", file, error.strerror)


def _key(spec: ModelSpec) -> str:
    return hashlib.sha256(describe_spec(spec).encode()).hexdigest()


def _read_measurements() -> dict[str, int]:
    try:
        known = json.loads(_file().read_text())
        return {str(key): int(size) for key, size in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        # The file is missing or damaged; its values can be measured again.
        return {}


def _file() -> Path:
    return sources.home_directory() / "memory.json"


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
    others = _read_sessions(int(time.monotonic() / SESSIONS_SECONDS)).get(leader, set()) - {leader}
    return sum(_proportional_size(pid) for pid in (leader, *others)) if others else resident_memory(leader)


def _proportional_size(pid: int) -> int:
    try:
        found = PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resident_memory(pid)


@lru_cache(maxsize=1)
def _read_sessions(period: int) -> dict[int, set[int]]:
    """Return the processes of each session."""
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

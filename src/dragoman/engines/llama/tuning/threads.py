"""Chooses the number of compute threads by measurement, and remembers the choice.

    candidates := the CPUs that the process may use | the physical cores among them | half of them
                | MANY, if that is fewer

The fastest number depends on the model, the memory bandwidth and the cores. It differs between single rows (replies),
which are bound by memory, and many rows (prompts), which are bound by computation.

Rules
1. One or two CPUs are all used, without measurement.
2. The candidates take turns for several rounds. The shortest time of each counts, because other load only adds time.
3. Among candidates within TIE of the fastest, the largest wins. Fewer than half of the CPUs must be faster by CLEARLY.
4. Nothing is measured while other processes keep half of the machine busy.
5. The choice is stored under `home_directory()/threads` for this file, these CPUs and this version.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import Context
from dragoman.engines.llama.library import SUPPORTED
from dragoman.files.sources import home_directory

log = logging.getLogger("dragoman.engine")

TIE = 0.05
CLEARLY = 0.2
BUSY_LOAD = 0.5
MEASURE_SECONDS = 0.4
"""Time to measure single rows, and again for prompts. Each candidate runs once even if that takes longer."""
MAX_ROUNDS = 8
PROMPT_ROWS = 32


class ThreadCounts(msgspec.Struct, frozen=True):
    """Threads for steps of one row, and for steps of several rows."""

    single: int
    many: int


def choose_threads(context: Context, model_file: Path) -> ThreadCounts:
    """Return the stored choice, or measure now. Call it in the compute thread."""
    cpus = hardware.cpus()
    if cpus <= 2:
        return ThreadCounts(cpus, cpus)
    file = home_directory() / "threads" / f"{_key(model_file, cpus)}.json"
    counts = _load(file)
    if counts is None and _is_busy():
        log.info("threads: %d; the machine is too busy to measure which number is fastest", hardware.threads())
        return ThreadCounts(hardware.threads(), hardware.threads())
    if counts is None:
        started = time.monotonic()
        counts = _measure(context, cpus)
        _save(file, counts)
        log.info(
            "threads: %d for single tokens and %d for prompts are fastest on %d CPUs (measured in %.1f s, see %s)",
            *(counts.single, counts.many, cpus, time.monotonic() - started, file),
        )
    return counts


def candidates(cpus: int, cores: int) -> list[int]:
    return sorted(
        {cpus, min(max(cores, 1), cpus), -(-cpus // 2), min(cpus, hardware.MAX_DEFAULT_THREADS)}, reverse=True
    )


def fastest(seconds: Mapping[int, float], cpus: int) -> int:
    """Apply rule 3 to the candidates' times."""
    enough = {count: took for count, took in seconds.items() if 2 * count >= cpus}
    best = min(enough.values())
    usual = max(count for count, took in enough.items() if took <= best * (1 + TIE))
    few = {count: took for count, took in seconds.items() if took < best * (1 - CLEARLY) and count not in enough}
    return min(few, key=few.__getitem__) if few else usual


def shortest_times(counts: Sequence[int], run: Callable[[int], None], clock: Callable[[], float]) -> dict[int, float]:
    """Apply rule 2: return the shortest time of `run` with each number of threads."""
    started = clock()
    times: dict[int, float] = {}
    for rounds in range(1, MAX_ROUNDS + 1):
        for count in counts:
            before = clock()
            run(count)
            took = clock() - before
            times[count] = min(took, times.get(count, took))
        # Judge by the shortest time: one disturbed run must not end the measurement.
        if rounds * len(counts) * min(times.values()) > MEASURE_SECONDS or clock() - started > 3 * MEASURE_SECONDS:
            break
    return times


def _measure(context: Context, cpus: int) -> ThreadCounts:
    counts = candidates(cpus, hardware.cores())

    def decode(count: int, rows: int) -> None:
        context.use_threads(count, count)
        context.decode([0] * rows, range(rows), [0] * rows, [False] * (rows - 1) + [True])
        context.clear(0)

    rows = min(PROMPT_ROWS, context.rows, context.length)
    single = shortest_times(counts, lambda count: decode(count, 1), time.monotonic)
    many = shortest_times(counts, lambda count: decode(count, rows), time.monotonic)
    return ThreadCounts(fastest(single, cpus), fastest(many, cpus))


def _is_busy() -> bool:
    load: float = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > BUSY_LOAD * (os.cpu_count() or 1)


def _key(model_file: Path, cpus: int) -> str:
    stat = model_file.stat()
    names = (str(model_file.resolve()), stat.st_size, stat.st_mtime_ns, hardware.processor().name, cpus, SUPPORTED)
    return hashlib.sha256(repr(names).encode()).hexdigest()[:32]


def _load(file: Path) -> ThreadCounts | None:
    try:
        counts = msgspec.json.decode(file.read_bytes(), type=ThreadCounts)
    except (OSError, *DECODE_ERRORS):
        return None
    return counts if min(counts.single, counts.many) >= 1 else None


def _save(file: Path, counts: ThreadCounts) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(counts))
        part.replace(file)
    except OSError as error:
        log.warning("the number of threads cannot be stored (%s): every start measures it again", error)

"""How many threads compute, where the configuration does not say: tried out once, then remembered.

    candidates := the CPUs that the process may use | the physical cores among them | half of them
                | MANY, where that is less

Which is fastest depends on the model, on the memory's speed and on what a core is, and differs between a reply's single
rows, which are bound by memory, and a prompt's many, which are not.

Rules
1. One or two CPUs are all used, and nothing is tried.
2. The candidates are tried in turn, several times; of each the shortest time counts, since a busy machine only adds.
3. Between two that take the same time, up to TIE, the one with more threads is chosen: whatever kept it from being
   faster may go away. Fewer than half of the CPUs must be faster by CLEARLY.
4. Where others keep half of the machine busy nothing is tried, since what would be found holds for no other time.
5. What was found is kept under `home()/threads`, for this file, these CPUs and this version.
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
from dragoman.files.sources import home

log = logging.getLogger("dragoman.engine")

TIE = 0.05
CLEARLY = 0.2
BUSY = 0.5
SECONDS = 0.4
"""About how long single rows, and then prompts, are tried; each candidate once even if that takes longer."""
MOST_ROUNDS = 8
PROMPT_ROWS = 32


class Threads(msgspec.Struct, frozen=True):
    """For steps of one row, and for those of more."""

    single: int
    many: int


def chosen(context: Context, model_file: Path) -> Threads:
    """Remembered or tried out now; to be called by whoever may compute."""
    cpus = hardware.cpus()
    if cpus <= 2:
        return Threads(cpus, cpus)
    memo = home() / "threads" / f"{_key(model_file, cpus)}.json"
    found = _remembered(memo)
    if found is None and _busy():
        log.info("threads: %d; the machine is too busy to try out how many are fastest", hardware.threads())
        return Threads(hardware.threads(), hardware.threads())
    if found is None:
        begun = time.monotonic()
        found = _tried(context, cpus)
        _remember(memo, found)
        log.info(
            "threads: %d for single tokens and %d for prompts are fastest on %d CPUs (tried for %.1f s, see %s)",
            *(found.single, found.many, cpus, time.monotonic() - begun, memo),
        )
    return found


def candidates(cpus: int, cores: int) -> list[int]:
    return sorted({cpus, min(max(cores, 1), cpus), -(-cpus // 2), min(cpus, hardware.MANY)}, reverse=True)


def fastest(seconds: Mapping[int, float], cpus: int) -> int:
    """By rule 3, of the times that the candidates took."""
    enough = {count: took for count, took in seconds.items() if 2 * count >= cpus}
    best = min(enough.values())
    usual = max(count for count, took in enough.items() if took <= best * (1 + TIE))
    few = {count: took for count, took in seconds.items() if took < best * (1 - CLEARLY) and count not in enough}
    return min(few, key=few.__getitem__) if few else usual


def shortest(counts: Sequence[int], run: Callable[[int], None], clock: Callable[[], float]) -> dict[int, float]:
    """By rule 2: how long `run` takes with each of the numbers of threads."""
    begun = clock()
    found: dict[int, float] = {}
    for rounds in range(1, MOST_ROUNDS + 1):
        for count in counts:
            before = clock()
            run(count)
            took = clock() - before
            found[count] = min(took, found.get(count, took))
        # One try that was disturbed for long must not be the last of its candidate.
        if rounds * len(counts) * min(found.values()) > SECONDS or clock() - begun > 3 * SECONDS:
            break
    return found


def _tried(context: Context, cpus: int) -> Threads:
    counts = candidates(cpus, hardware.cores())

    def decode(count: int, rows: int) -> None:
        context.use_threads(count, count)
        context.decode([0] * rows, range(rows), [0] * rows, [False] * (rows - 1) + [True])
        context.clear(0)

    rows = min(PROMPT_ROWS, context.rows, context.length)
    single = shortest(counts, lambda count: decode(count, 1), time.monotonic)
    many = shortest(counts, lambda count: decode(count, rows), time.monotonic)
    return Threads(fastest(single, cpus), fastest(many, cpus))


def _busy() -> bool:
    load: float = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > BUSY * (os.cpu_count() or 1)


def _key(model_file: Path, cpus: int) -> str:
    facts = model_file.stat()
    names = (str(model_file.resolve()), facts.st_size, facts.st_mtime_ns, hardware.processor().name, cpus, SUPPORTED)
    return hashlib.sha256(repr(names).encode()).hexdigest()[:32]


def _remembered(memo: Path) -> Threads | None:
    try:
        found = msgspec.json.decode(memo.read_bytes(), type=Threads)
    except (OSError, *DECODE_ERRORS):
        return None
    return found if min(found.single, found.many) >= 1 else None


def _remember(memo: Path, found: Threads) -> None:
    part = memo.with_suffix(f".{os.getpid()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(found))
        part.replace(memo)
    except OSError as error:
        log.warning("the number of threads cannot be kept (%s): it is tried out at every start", error)

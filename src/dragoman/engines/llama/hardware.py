"""What this machine has for a model: its CPUs, its memory, its processor.

A container's limits, which are often far below what the machine has, count as what there is.
"""

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec

MANY = 16
"""Where there are many CPUs, decoding may be bound by memory long before all of them are used."""
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
PROCESSORS = Path("/proc/cpuinfo")
FEATURES = ("avx", "fma", "f16c", "amx", "asimd", "i8mm", "sve", "bf16", "fphp")
"""How the instructions begin for which llama.cpp has kernels of their own."""


class Processor(msgspec.Struct, frozen=True):
    name: str
    features: tuple[str, ...] = ()


def threads() -> int:
    """As many as compute where nobody says and nothing is tried out."""
    return min(cpus(), MANY)


def cpus() -> int:
    """Those that the process may use, and no more than the quota of its container."""
    return max(min(len(_affinity()), int(quota())), 1)


def quota() -> float:
    """CPUs that the process's control group, and those around it, may use; as many as there are where nobody says."""
    found = float(os.cpu_count() or 1)
    for folder in _groups():
        try:
            most, period = (folder / "cpu.max").read_text().split()
            found = min(found, int(most) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            # No such file, or "max".
            continue
    return found


def _groups() -> Sequence[Path]:
    """The control group of the process, of version 2, and those around it: the limits of all of them hold."""
    try:
        # Of version 2 there is one line, `0::/path`.
        paths = [line[3:].strip("/") for line in OWN_GROUP.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        paths = []
    group = GROUPS.joinpath(*paths[:1])
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(GROUPS)]


def cores() -> int:
    """Physical ones among the allowed; as many as are allowed where the system does not say."""
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in _affinity()})
    except OSError:
        return len(_affinity())


def _affinity() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def memory() -> float:
    """Bytes of memory that the process may have; infinite where the system does not say."""
    try:
        machine: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        machine = math.inf
    return min([machine, *(_memory_limit(folder) for folder in _groups())])


def _memory_limit(folder: Path) -> float:
    try:
        return int((folder / "memory.max").read_text())
    except (OSError, ValueError):
        # No such file, or "max".
        return math.inf


def processor() -> Processor:
    fallback = platform.processor() or platform.machine()
    try:
        text = PROCESSORS.read_text("utf-8", "replace")
    except OSError:
        return Processor(fallback)
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    flags = told.get("flags", told.get("Features", "")).split()
    return Processor(told.get("model name", fallback), tuple(sorted({flag for flag in flags if _matters(flag)})))


def _matters(flag: str) -> bool:
    return flag.startswith(FEATURES)

"""What this machine has for a model: its cores, its memory, its processor."""

import math
import os
import platform
from pathlib import Path

import msgspec

MAX_DEFAULT_THREADS = 16
"""Decoding is bound by memory: more threads rarely help, and on machines with many cores they hurt."""
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's limit, which is often far below the machine's memory."""
PROCESSORS = Path("/proc/cpuinfo")
FEATURES = ("avx", "fma", "f16c", "amx", "asimd", "i8mm", "sve", "bf16", "fphp")
"""How the instructions begin for which llama.cpp has kernels of their own."""


class Processor(msgspec.Struct, frozen=True):
    name: str
    features: tuple[str, ...] = ()


def threads() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, MAX_DEFAULT_THREADS)


def memory() -> float:
    """Bytes of memory that the process may have; infinite where the system does not say."""
    try:
        machine: float = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        machine = math.inf
    return min(machine, _container_limit())


def _container_limit() -> float:
    try:
        return int(MEMORY_LIMIT.read_text())
    except (OSError, ValueError):
        # No control groups of version 2 here, or "max".
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

"""CPUs, memory and processor of this machine, within the limits of the container."""

import contextlib
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

CGROUP_ROOT, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
CPUINFO = Path("/proc/cpuinfo")


def threads() -> int:
    """Return the default number of compute threads: one for each physical core, within the quota of the container."""
    return min(cores(), cpus())


def cpus() -> int:
    """Return the number of CPUs that the process may use, within the quota of its container."""
    return max(min(len(_affinity()), int(cpu_quota())), 1)


def cpu_quota() -> float:
    """Return the CPU limit of the process's control group and its parents. Without a limit: all CPUs."""
    quota = float(os.cpu_count() or 1)
    for folder in _cgroups():
        # ValueError: the limit is "max".
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            most, period = (folder / "cpu.max").read_text().split()
            quota = min(quota, int(most) / int(period))
    return quota


def _cgroups() -> Sequence[Path]:
    """Return the process's control group (version 2) and its parents. All of their limits apply."""
    try:
        # Version 2 has one line, `0::/path`.
        paths = [line[3:].strip("/") for line in OWN_CGROUP.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        paths = []
    group = CGROUP_ROOT.joinpath(*paths[:1])
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(CGROUP_ROOT)]


def cores() -> int:
    """Return the number of physical cores that the process may use, or of CPUs if the topology is unknown."""
    try:
        return len({Path(SIBLINGS.format(cpu)).read_text() for cpu in _affinity()})
    except OSError:
        return len(_affinity())


def _affinity() -> Sequence[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def memory() -> float:
    """Return the bytes of memory that the process may use. Infinity if unknown."""
    limits = [math.inf]
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for folder in _cgroups():
        # ValueError: the limit is "max".
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((folder / "memory.max").read_text()))
    return min(limits)


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

"""Whether memory, open files and threads of a server stay flat under steady load.

The median of the last third of a run is compared with that of the second third. The first third is for what a server
allocates once. Short peaks do not matter.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from tools.server import Server, Usage, is_server_process

MEMORY_SHARE = 0.03
"""By how much memory may grow in an hour. Allocators and caches need a little."""
COUNT = 4
"""Files or threads by which the medians may differ."""


class Growth(NamedTuple):
    name: str
    before: float
    after: float
    allowed: float

    @property
    def problem(self) -> str | None:
        if self.after <= self.before + self.allowed:
            return None
        return f"{self.name} grew: {self.before:,.0f}, then {self.after:,.0f}"


def growth(name: str, values: Sequence[int], allowed: float) -> Growth:
    third = len(values) // 3
    return Growth(name, statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :]), allowed)


class UsageLog:
    """What a server used, sampled at even intervals."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.samples: list[Usage] = []
        self.processes: set[int] = set()
        """All that were seen."""

    @asynccontextmanager
    async def sampling(self, seconds: float) -> AsyncIterator[None]:
        """Sample during the block, which takes about as many seconds."""
        task = asyncio.create_task(self._sample(max(0.25, seconds / 1000)))
        try:
            yield
        finally:
            task.cancel()

    async def _sample(self, pause: float) -> None:
        while True:
            self.processes.update(self._server.processes())
            self.samples.append(self._server.usage())
            await asyncio.sleep(pause)

    def report(self, memory_share: float) -> list[str]:
        """Print the medians and return what is wrong with them. Memory may grow by a share of itself."""
        print(f"\n{'all processes':20}{'second third':>14}{'last third':>14}")
        problems = []
        for name, values in zip(Usage._fields, zip(*self.samples, strict=True), strict=True):
            is_memory = name == "memory"
            unit = 2**20 if is_memory else 1
            found = growth(name, values, statistics.median(values) * memory_share if is_memory else COUNT)
            print(f"{name + (', MiB' if is_memory else ''):20}{found.before / unit:14,.1f}{found.after / unit:14,.1f}")
            problems += [found.problem] if found.problem else []
        return problems

    def stop(self) -> list[str]:
        """Stop the server with SIGTERM and return what is wrong with its end."""
        begun = time.monotonic()
        code = self._server.stop()
        left = [pid for pid in self.processes if is_server_process(pid)]
        print(f"stopped within {time.monotonic() - begun:.1f} s")
        problems = [f"the server exited with {code}"] if code else []
        return problems + ([f"processes are left: {left}"] if left else [])

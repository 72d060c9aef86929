"""Runs jobs periodically while the server runs, such as heartbeats and the removal of expired rows.

Rules
1. Every job runs when the server starts, and then repeatedly with its pause in between.
2. A job that fails is logged and runs again after its pause. It does not affect the other jobs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dragoman.core.errors import StorageUnavailable

log = logging.getLogger("dragoman.storage")

PeriodicJob = Callable[[], Awaitable[object]]


class Maintenance:
    def __init__(self) -> None:
        self._jobs: list[tuple[PeriodicJob, float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, job: PeriodicJob, pause: float) -> None:
        """Add a job, before the start. `pause` is in seconds."""
        self._jobs.append((job, pause))

    def start(self) -> None:
        self._tasks = [asyncio.get_running_loop().create_task(_repeat(job, pause)) for job, pause in self._jobs]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


async def _repeat(job: PeriodicJob, pause: float) -> None:
    while True:
        try:
            await job()
        except StorageUnavailable:
            # The database has logged the reason.
            pass
        except Exception:
            log.exception("a periodic job of the storage failed")
        await asyncio.sleep(pause)

"""Runs short work that outlives its request, such as storing the end of a stream whose client has gone."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from dragoman.core.errors import StorageUnavailable

log = logging.getLogger("dragoman.server")


class DetachedTasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the work. Its errors are logged."""
        task = asyncio.get_running_loop().create_task(_log_failure(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def finish(self) -> None:
        """Wait for all of it, before the app stops."""
        while self._running:
            await asyncio.wait(self._running)


async def _log_failure(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except StorageUnavailable:
        # The database has logged the reason.
        pass
    except Exception:
        log.exception("work after the end of a request failed")

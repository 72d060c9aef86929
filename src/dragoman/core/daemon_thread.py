"""Runs blocking work in a thread that does not delay the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Run long work, such as a download, in a thread of its own."""
    result: Future[T] = Future()
    # The work cannot be cancelled: it runs to its end even if the caller stops waiting.
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised in the caller)
            result.set_exception(error)

    threading.Thread(target=run, name="dragoman-background", daemon=True).start()
    return await asyncio.wrap_future(result)

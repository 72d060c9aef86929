"""Work of uncertain length beside the event loop, as a download is.

A thread of asyncio's own pool keeps the process from ending until it has; one of these does not.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    made: Future[T] = Future()
    # It cannot be called off: who stops waiting leaves it to its end.
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            made.set_exception(error)

    threading.Thread(target=run, name="dragoman-aside", daemon=True).start()
    return await asyncio.wrap_future(made)

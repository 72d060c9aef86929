"""Work of uncertain length beside the event loop, as a download is.

A thread of asyncio's own pool keeps the process from ending until it has; one of these does not.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(made: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(made)  # type: ignore[arg-type]  # None is a T where there is no error

    def run() -> None:
        made, wrong = None, None
        try:
            made = work()
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            wrong = error
        # Where the loop has ended, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, made, wrong)

    threading.Thread(target=run, name="dragoman-aside", daemon=True).start()
    return await done

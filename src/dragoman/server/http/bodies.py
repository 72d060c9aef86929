"""Decodes large request bodies in a thread.

Rules
1. One thread decodes all large bodies, one at a time, so that the event loop keeps running.
2. The garbage collector is off while a large body is decoded: it would visit the new values repeatedly.
"""

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")


async def run_in_body_thread(make: Callable[[], T]) -> T:
    """Call `make` in the thread that decodes large bodies."""
    # The executor's future becomes part of a reference cycle, so it must not hold the result or the error.
    results: list[T] = []
    errors: list[Exception] = []
    await asyncio.get_running_loop().run_in_executor(_thread, _run, make, results, errors)
    if errors:
        raise errors.pop()
    return results.pop()


def _run(make: Callable[[], T], results: list[T], errors: list[Exception]) -> None:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        results.append(make())
    except Exception as error:  # noqa: BLE001 (raised again by the caller)
        errors.append(error)
    finally:
        if is_enabled:
            gc.enable()

"""Decodes request bodies, large ones in a thread.

Rules
1. A body with more elements than the limit is refused before it is decoded.
2. One thread decodes all large bodies, one at a time, so that the event loop keeps running.
3. The memory of a large body returns to the system when it is freed.
4. The garbage collector is off while a large body is decoded: it would visit the new values repeatedly.
"""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dragoman.core.errors import TooLarge
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.protocols.json_elements import has_more_elements

T = TypeVar("T")
M_MMAP_THRESHOLD = -3
"""The value of this option in glibc's malloc.h."""
LARGE_BLOCK = 1024 * 1024
"""Bytes."""

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")


async def decode_body(body: bytes, limit: int, decode: Callable[[bytes], T]) -> T:
    """Decode a body with at most `limit` JSON elements."""

    def checked() -> T:
        if has_more_elements(body, limit):
            raise TooLarge(f"the body has more than {limit} JSON elements (`limits.body_elements` of this server)")
        return decode(body)

    return await run_in_body_thread(checked) if len(body) > LARGE_BODY else checked()


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


def return_large_blocks() -> None:
    """Have glibc map every large block separately, so that freeing it returns the memory to the system at once."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)

"""From the bytes of a body to a request: large ones one at a time, beside the event loop.

Rules
1. A body with more elements than the limit is refused before it is decoded.
2. One thread decodes large bodies. Between two of them, and whenever Python code runs, the event loop gets its turn.
3. Memory of a large body returns to the system as soon as it is freed.
4. While a large body is decoded the garbage collector is off: it would visit the half-made values again and again.
"""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from dragoman.errors import TooLarge
from dragoman.protocols.elements import has_more_elements

T = TypeVar("T")
LARGE_BODY = 256 * 1024
"""Bytes. A smaller body is decoded within a few milliseconds."""
M_MMAP_THRESHOLD = -3
"""The name of the option in glibc's malloc.h."""
LARGE_BLOCK = 1024 * 1024

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")


async def decode_body(body: bytes, limit: int, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of a body that has no more elements than the limit."""

    def checked() -> T:
        if has_more_elements(body, limit):
            raise TooLarge(f"the body has more than {limit} JSON elements (`limits.body_elements` of this server)")
        return decode(body)

    return await run_beside_loop(checked) if len(body) > LARGE_BODY else checked()


async def run_beside_loop(make: Callable[[], T]) -> T:
    """What `make` returns, called in the thread that decodes large bodies."""
    # A future that is awaited across threads is part of a reference cycle. It must not keep the request or the body.
    made: list[T] = []
    errors: list[Exception] = []
    await asyncio.get_running_loop().run_in_executor(_thread, _run, make, made, errors)
    if errors:
        raise errors.pop()
    return made.pop()


def _run(make: Callable[[], T], made: list[T], errors: list[Exception]) -> None:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        made.append(make())
    except Exception as error:  # noqa: BLE001 (raised again by the caller)
        errors.append(error)
    finally:
        if is_enabled:
            gc.enable()


def return_large_blocks() -> None:
    """Have glibc allocate every large block apart, also after some were freed: only then does memory return at once."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)

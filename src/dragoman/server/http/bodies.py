"""Checks the type of request bodies and decodes them, large ones in a thread.

Rules
1. A body with more elements than the limit is refused before it is decoded.
2. One thread decodes all large bodies, one at a time, so that the event loop keeps running.
3. The garbage collector is off while a large body is decoded: it would visit the new values repeatedly.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

from dragoman.core.errors import TooLarge, UnsupportedMedia
from dragoman.protocols.json_body import has_more_elements

T = TypeVar("T")
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-bodies")


@lru_cache(maxsize=256)
def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def check_media_type(headers: Mapping[bytes, bytes]) -> None:
    media = _media_type(headers.get(b"content-type", b""))
    # A web page of another origin must not send a body without a type; other programs may.
    if media != b"application/json" and (media or b"origin" in headers):
        raise UnsupportedMedia("send the body as JSON, with the header 'content-type: application/json'")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise UnsupportedMedia("compressed bodies are not accepted")


def decode_body(body: bytes, limit: int, decode: Callable[[bytes], T]) -> T:
    """Decode a body with at most `limit` JSON elements."""
    if has_more_elements(body, limit):
        raise TooLarge(f"the body has more than {limit} JSON elements (`limits.body_elements` of this server)")
    return decode(body)


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

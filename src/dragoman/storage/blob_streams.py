"""Writes and reads blobs in pieces, from coroutines.

Rules
1. Files are accessed in threads of this module, so that a slow disk does not delay other work.
2. A cancelled task waits for its call in the thread, so a file is never closed or removed while it is in use.
3. A piece is written before the next one is accepted. The memory that an upload or a download needs does not depend on
   its size.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import BinaryIO, ParamSpec, TypeVar

from dragoman.storage.blobs import Blob, BlobStore, BlobWriter

PIECE = 256 * 1024
"""Bytes that are read or written at once."""
P = ParamSpec("P")
T = TypeVar("T")
_threads = ThreadPoolExecutor(4, "dragoman-blobs")


class BlobSink:
    """Accepts a blob in pieces of any size."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self._waiting = bytearray()

    async def write(self, data: bytes) -> None:
        self._waiting += data
        if len(self._waiting) >= PIECE:
            await self._flush()

    async def commit(self) -> Blob:
        await self._flush()
        return await _run(self._writer.commit)

    async def _flush(self) -> None:
        data, self._waiting = self._waiting, bytearray()
        await _run(self._writer.write, data)


@asynccontextmanager
async def write_blob(blobs: BlobStore) -> AsyncIterator[BlobSink]:
    """Leaving the context without `commit` removes the blob."""
    writer = blobs.writer()
    try:
        await _run(writer.__enter__)
        yield BlobSink(writer)
    finally:
        await _run(writer.__exit__)


@asynccontextmanager
async def read_blob(blobs: BlobStore, digest: str) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield the pieces of a blob. Raises StorageUnavailable if the blob cannot be opened."""
    file = await _run(blobs.open, digest)
    try:
        async with aclosing(_pieces(file)) as pieces:
            yield pieces
    finally:
        await _run(file.close)


async def _pieces(file: BinaryIO) -> AsyncGenerator[bytes]:
    while piece := await _run(file.read, PIECE):
        yield piece


async def _run(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in a thread."""
    call = asyncio.get_running_loop().run_in_executor(_threads, partial(function, *args, **kwargs))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        if not call.cancelled():
            # Retrieved only so that asyncio does not log it.
            call.exception()
        raise

"""Sends the requests of the lines of one batch as jobs, and records their results.

Rules
1. Lines run in the order of their prefixes, several at once.
2. A request that failed for a reason that may pass is sent again after a pause (see `batch_states.retry_pause`).
3. A result that cannot be recorded now is recorded later; meanwhile no other line takes its place.
4. A line whose job is cancelled has no result, and runs again.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from dragoman.core.errors import StorageUnavailable, Unauthorized
from dragoman.core.events import Usage
from dragoman.protocols.batch_lines import LineResult, read_usage, request_body
from dragoman.protocols.registry import ANTHROPIC
from dragoman.protocols.wire_protocol import OPENAI
from dragoman.server.app_calls import AppReply, RequestJob, call_app, job_scope
from dragoman.server.auth.callers import Caller, SavedCaller
from dragoman.server.telemetry.metrics import Metrics
from dragoman.storage.batch_states import FAILED_STATUS, StoredBatch, retry_pause
from dragoman.storage.batches import FIRST, BatchStore, WaitingLine
from dragoman.storage.blobs import BlobStore

PAGE = 64
"""Waiting lines that are read at once."""
RETRY_SECONDS = 2.0


class JobApp(Protocol):
    """The app that answers the jobs."""

    def restore_caller(self, saved: SavedCaller) -> Caller: ...

    def new_request_id(self, path: str) -> str: ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class JobPool:
    """The slots for jobs, which all batches of a server share, and what the jobs need."""

    def __init__(self, app: JobApp, store: BatchStore, blobs: BlobStore, metrics: Metrics, parallel: int) -> None:
        self.app = app
        self.store = store
        self.blobs = blobs
        self.metrics = metrics
        self.parallel = parallel
        self.slots = asyncio.Semaphore(parallel)
        self.stopping = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """Wait this long, or until the server stops."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()


class LineJobs:
    """The jobs of one batch. `on_lost` is called if a result does not count: this server no longer runs the batch."""

    def __init__(self, pool: JobPool, batch: StoredBatch, on_lost: Callable[[], None]) -> None:
        self._pool = pool
        self._batch = batch
        self._on_lost = on_lost
        self._caller = msgspec.json.decode(batch.caller, type=SavedCaller)
        self._waiting: deque[WaitingLine] = deque()
        self._place = FIRST
        self._reading = asyncio.Lock()

    async def run(self) -> None:
        """Run the lines that wait, until none is left or the server stops."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._pool.parallel):
                group.create_task(self._work())

    async def _work(self) -> None:
        while (line := await self._next_line()) is not None:
            result = await self._answer(line)
            if result is not None:
                await self._record(line, result)

    async def _read_body(self, line: WaitingLine) -> bytes | None:
        """The body of the request of a line; None if the server stops before it can be read."""
        while not self._pool.stopping.is_set():
            try:
                return await asyncio.to_thread(self._read, line)
            except StorageUnavailable:
                await self._pool.pause(RETRY_SECONDS)
        return None

    def _read(self, line: WaitingLine) -> bytes:
        with self._pool.blobs.open(self._batch.digest) as source:
            return request_body(self._batch.api, os.pread(source.fileno(), line.length, line.begin))

    async def _next_line(self) -> WaitingLine | None:
        pool = self._pool
        async with self._reading:
            while not self._waiting and not pool.stopping.is_set():
                try:
                    page = await pool.store.read_waiting(self._batch.id, self._place, PAGE)
                except StorageUnavailable:
                    await pool.pause(RETRY_SECONDS)
                    continue
                if not page:
                    return None
                self._waiting.extend(page)
                self._place = page[-1].prefix, page[-1].number
            return None if pool.stopping.is_set() else self._waiting.popleft()

    async def _answer(self, line: WaitingLine) -> LineResult | None:
        """The final result of a line; None if the server stops before. Only a line with a slot has its body in
        memory."""
        pool, tries = self._pool, 0
        while True:
            async with pool.slots:
                body = await self._read_body(line)
                if body is None:
                    return None
                request_id = pool.app.new_request_id(self._batch.endpoint)
                reply = await self._send(request_id, body)
            tries += 1
            headers = dict(reply.headers)
            pause = None
            if headers.get(b"x-should-retry") != b"false":
                pause = retry_pause(reply.status, tries, _seconds(headers.get(b"retry-after", b"")))
            if pause is None:
                return LineResult(reply.status, request_id, reply.body)
            await pool.pause(pause)

    async def _send(self, request_id: str, body: bytes) -> AppReply:
        app = self._pool.app
        try:
            caller = app.restore_caller(self._caller)
        except Unauthorized as error:
            encode = (OPENAI if self._batch.api == "openai" else ANTHROPIC).encode_error
            return AppReply(error.status, [], msgspec.json.encode(encode(error, request_id)))
        scope = job_scope(RequestJob(caller, request_id, is_batch=True), self._batch.endpoint)
        disconnected = asyncio.Event()
        call = asyncio.create_task(call_app(app, scope, body, disconnected))
        try:
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            disconnected.set()
            await asyncio.wait([call])
            if not call.cancelled():
                # Retrieved only so that asyncio does not log it.
                call.exception()
            raise
        return reply if reply.body else AppReply(FAILED_STATUS, [], b"")

    async def _record(self, line: WaitingLine, result: LineResult) -> None:
        usage = read_usage(result.body) if result.state == "succeeded" else Usage()
        while True:
            try:
                is_recorded = await self._pool.store.record(self._batch.id, line.number, result, usage)
                break
            except StorageUnavailable:
                if self._pool.stopping.is_set():
                    return
                await self._pool.pause(RETRY_SECONDS)
        if is_recorded:
            self._pool.metrics.batch_lines[result.state] += 1
        else:
            self._on_lost()


def _seconds(value: bytes) -> float | None:
    return float(value) if value.isdigit() else None

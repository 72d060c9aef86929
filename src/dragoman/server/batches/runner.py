"""Runs the batches of this server: validates inputs, sends the requests of their lines, and writes the results.

Rules
1. Every line is a job (see `app_calls`), so it has a slot, an entry in the ledger and metrics.
2. At most `limits.batch_lines` jobs run or wait for a model at once, of all batches together. The batches take turns.
   A line that waits for its next try holds no slot.
3. While the storage is not available, a batch pauses: it starts no further lines until results can be recorded.
4. A stop lets running lines finish within the grace time. All others run after the next start, or on another server.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from dragoman.core.errors import StorageUnavailable
from dragoman.protocols.batch_lines import InputLine, LineReader, TooManyLines
from dragoman.protocols.batches import MAX_ERRORS, InputError
from dragoman.server.batches.line_jobs import RETRY_SECONDS, JobPool, LineJobs
from dragoman.server.batches.results import ResultWriter
from dragoman.storage.batch_states import Step, StoredBatch, WrongState, next_step
from dragoman.storage.blob_streams import read_blob

log = logging.getLogger("dragoman.batches")

POLL_SECONDS = 5.0
LINES_PER_WRITE = 1000
"""Lines of an input that are written in one transaction."""
END_SECONDS = 10.0
"""Time for cancelled jobs to end."""


class BatchRunner:
    """`max_line` is the size of the largest line in bytes."""

    def __init__(self, pool: JobPool, writer: ResultWriter, max_line: int) -> None:
        self.pool = pool
        self.writer = writer
        self.max_line = max_line
        self._woken = asyncio.Event()
        self._runs: dict[str, tuple[_BatchRun, asyncio.Task[None]]] = {}
        self._polling: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    def wake(self) -> None:
        """Look now for batches that were added or cancelled."""
        self._woken.set()

    async def stop(self, grace_seconds: float, forced: asyncio.Event | None = None) -> None:
        """Run no further lines. Running ones have the grace time, unless the stop is forced."""
        self.pool.stopping.set()
        if self._polling is not None:
            self._polling.cancel()
        tasks = [task for _, task in self._runs.values()]
        if not tasks:
            return
        ended = asyncio.create_task(_wait(tasks))
        forcing = asyncio.create_task((forced or asyncio.Event()).wait())
        await asyncio.wait([ended, forcing], timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (forcing, *tasks):
            task.cancel()
        await asyncio.wait([ended], timeout=END_SECONDS)
        ended.cancel()

    async def _poll(self) -> None:
        while True:
            self._woken.clear()
            try:
                await self._update_runs()
            except StorageUnavailable:
                # The database has logged the reason.
                pass
            except Exception:
                log.exception("polling for batches failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._woken.wait()

    async def _update_runs(self) -> None:
        """Start the batches of this server and of dead servers, and interrupt those whose state has changed."""
        store = self.pool.store
        if not store.is_used:
            return
        if claimed := await store.claim():
            log.info("took over batches of servers that stopped: %d", claimed)
        own = {batch.id: batch for batch in await store.list_own()}
        for batch_id, (run, _) in self._runs.items():
            batch = own.get(batch_id)
            if batch is None or batch.state == "cancelling":
                run.interrupt()
        for batch_id in own.keys() - self._runs.keys():
            self._start_run(batch_id)

    def _start_run(self, batch_id: str) -> None:
        run = _BatchRun(self, batch_id)
        task = asyncio.create_task(run.run())
        self._runs[batch_id] = run, task
        task.add_done_callback(lambda _: self._runs.pop(batch_id))


async def _wait(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


class _BatchRun:
    """Runs one batch until it has ended, or until another server runs it."""

    def __init__(self, runner: BatchRunner, batch_id: str) -> None:
        self._pool = runner.pool
        self._store = runner.pool.store
        self._writer = runner.writer
        self._runner = runner
        self._id = batch_id
        self._interrupted = asyncio.Event()
        self._steps: Mapping[Step, Callable[[StoredBatch], Awaitable[None]]] = {
            "validate": self._validate,
            "run": self._run_lines,
            "write_results": self._write_results,
        }

    def interrupt(self) -> None:
        """Stop running lines, and look at the state of the batch again."""
        self._interrupted.set()

    async def run(self) -> None:
        while not self._pool.stopping.is_set():
            self._interrupted.clear()
            try:
                batch = await self._store.find_own(self._id)
                step = None if batch is None else next_step(batch)
                if batch is None or step is None:
                    return
                await self._steps[step](batch)
            except StorageUnavailable:
                await self._pool.pause(RETRY_SECONDS)
            except WrongState:
                log.info("%s: another server has taken it over", self._id)
            except Exception:
                log.exception("a step of %s failed; it will be tried again", self._id)
                await self._pool.pause(POLL_SECONDS)

    async def _validate(self, batch: StoredBatch) -> None:
        """Read the input. After a crash it is read again from the start."""
        await self._store.remove_lines(self._id, is_reading=True)
        reader = LineReader(batch.api, batch.endpoint, self._runner.max_line)
        errors: list[InputError] = []
        bad, total = 0, 0

        async def add(read: list[InputLine]) -> int:
            for start in range(0, len(read), LINES_PER_WRITE):
                await self._store.add_lines(self._id, read[start : start + LINES_PER_WRITE])
            found = [line.error for line in read if line.error is not None]
            errors.extend(found[: MAX_ERRORS - len(errors)])
            return len(found)

        try:
            async with read_blob(self._pool.blobs, batch.digest) as pieces:
                async for piece in pieces:
                    bad += await add(await asyncio.to_thread(reader.feed, piece))
                    if self._pool.stopping.is_set():
                        return
            bad += await add(reader.end())
            total = reader.count
            if not total:
                errors.append(InputError("empty_file", "the input has no lines"))
        except TooManyLines as error:
            await self._store.remove_lines(self._id, is_reading=True)
            errors, bad = [InputError("too_many_lines", error.message)], 0
        if await self._store.note_validated(self._id, total, tuple(errors), bad) is not None:
            log.info("%s: started; lines: %d, of which %d have errors", self._id, total, bad)
            self._pool.metrics.batch_lines["errored"] += bad

    async def _run_lines(self, batch: StoredBatch) -> None:
        jobs = asyncio.create_task(LineJobs(self._pool, batch, self.interrupt).run())
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            timeout = max(0.0, batch.expires - time.time())
            await asyncio.wait([jobs, interrupted], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted.cancel()
            jobs.cancel()
            await asyncio.wait([jobs])
        if not jobs.cancelled():
            jobs.result()
        if not self._pool.stopping.is_set():
            await self._store.finalize(self._id)

    async def _write_results(self, batch: StoredBatch) -> None:
        ended = await self._writer.write(batch)
        if ended is None:
            return
        kind = "canceled" if ended.state == "cancelled" else "expired"
        self._pool.metrics.batch_lines[kind] += ended.waiting
        log.info(
            "%s: %s after %.1f s; lines: %d succeeded, %d failed, %d not run; "
            "tokens: %d in the prompts, of which %d cached, %d in the replies",
            *(ended.id, ended.state, (ended.ended or ended.created) - ended.created),
            *(ended.succeeded, ended.errored, ended.waiting),
            *(ended.prompt, ended.cached, ended.completion),
        )

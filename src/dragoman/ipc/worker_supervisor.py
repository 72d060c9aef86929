"""Keeps the worker of an engine running.

Rules
1. A worker that dies fails its requests with `EngineDied` and is restarted: at once the first time, with growing
   pauses if it keeps dying early. After `MOST_DEATHS` early deaths it is given up, and `on_lost` is called.
2. Requests wait for a starting worker for at most `load_seconds`. A model that cannot be loaded raises `ModelFailed`
   and is tried again with the next request.
3. A worker that sends nothing for `stall_seconds` while it is busy is killed.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from dragoman.core.errors import (
    ConfigError,
    DragomanError,
    EngineTimeout,
    ModelFailed,
    ModelLoading,
    Unavailable,
)
from dragoman.ipc.fatal_requests import FatalRequests
from dragoman.ipc.restart_backoff import RestartBackoff
from dragoman.ipc.worker_messages import Answer, Failure, Loading, PackedStep, Ready, Start, StartFailed, Step
from dragoman.ipc.worker_process import WorkerProcess

log = logging.getLogger("dragoman.ipc")

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
MOST_DEATHS = 3
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a worker that was killed from outside."""
STOPPED = "the engine has been stopped"


class SupervisedEngine(Protocol):
    """The engine that shows the state of the worker."""

    progress: float | None
    kv_used: float | None

    def describe(self, info: Ready) -> None: ...


class WorkerSupervisor:
    def __init__(
        self,
        start: Start,
        engine: SupervisedEngine,
        fatal: FatalRequests,
        stall_seconds: float,
        on_lost: Callable[[str], None] | None,
        load_seconds: float | None,
    ) -> None:
        self.worker: WorkerProcess | None = None
        self._start = start
        self._engine = engine
        self._fatal = fatal
        self._stall_seconds = stall_seconds
        self._on_lost = on_lost
        self._load_seconds = load_seconds
        self._starting: asyncio.Task[WorkerProcess] | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._backoff = RestartBackoff(SHORTEST_PAUSE, LONGEST_PAUSE)
        self._is_lost = self._is_started = self._is_stopped = False
        self._died_at = 0.0

    async def start(self) -> None:
        await self._running()
        self._is_started = True

    async def stop(self) -> None:
        self._is_stopped = True
        ending: list[Awaitable[object]] = [*self._readers]
        if self._starting is not None:
            self._starting.cancel()
            ending.append(self._starting)
        if self.worker is not None:
            ending.append(self.worker.kill())
        await asyncio.gather(*ending, return_exceptions=True)

    @property
    def is_restarting(self) -> bool:
        return self._is_started and self.worker is None

    @property
    def restart_seconds(self) -> float:
        return time.monotonic() - self._died_at

    async def worker_for_request(self) -> WorkerProcess:
        if self.worker is not None and not self._is_stopped:
            return self.worker
        return await self.running_worker(self._load_seconds)

    async def running_worker(self, timeout: float | None) -> WorkerProcess:
        """Return the running worker. Errors of the configuration are not shown to the caller of the API."""
        try:
            async with asyncio.timeout(timeout):
                return await self._running()
        except TimeoutError:
            raise ModelLoading("the model is still being loaded; try again later", retry_after=5) from None
        except ConfigError as error:
            raise self._load_error() from error

    async def _running(self) -> WorkerProcess:
        """Return the worker. Concurrent callers share one start."""
        if self._is_stopped:
            raise Unavailable(STOPPED)
        if self._is_lost:
            raise self._load_error()
        if self.worker is not None:
            return self.worker
        if self._starting is None:
            self._starting = asyncio.create_task(self._launch())
            self._starting.add_done_callback(self._finish_start)
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not starting.cancelled() or (caller is not None and caller.cancelling()):
                raise
            # The start was cancelled, not the caller.
            raise Unavailable(STOPPED) from None

    def _finish_start(self, task: "asyncio.Task[WorkerProcess]") -> None:
        self._starting = None
        # The caller of the first start reports its error.
        if self._is_started and not task.cancelled() and task.exception() is not None:
            log.error("model %s: %s", self._start.name, task.exception())

    async def _launch(self) -> WorkerProcess:
        if self._backoff.pause:
            await asyncio.sleep(self._backoff.pause)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dragoman.ipc.worker_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Its own session, so that the processes an engine starts can be killed with it.
            start_new_session=True,
        )
        worker = WorkerProcess(process)
        try:
            worker.send(self._start)
            while isinstance(answer := await worker.read(), Loading):
                self._engine.progress = answer.progress
            if not isinstance(answer, Ready):
                raise self._start_error(answer)
        except BaseException:
            await worker.kill()
            raise
        self.worker = worker
        self._engine.describe(answer)
        if self._is_started:
            log.info("model %s: running again after %.1f s", self._start.name, self.restart_seconds)
        reader = asyncio.create_task(self._serve(worker))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        return worker

    def _start_error(self, answer: object) -> Exception:
        if isinstance(answer, StartFailed):
            return ConfigError(answer.reason) if answer.is_config_error else self._load_error()
        self._backoff.note_failure(age=0)
        return ModelFailed(f"model '{self._start.name}' could not be loaded: its process died", retry_after=10)

    def _load_error(self) -> ModelFailed:
        return ModelFailed(f"model '{self._start.name}' could not be loaded; see the server's log", retry_after=10)

    async def _serve(self, worker: WorkerProcess) -> None:
        """Deliver the worker's messages until it dies, then start another."""
        started_at = time.monotonic()
        watch = asyncio.create_task(self._kill_when_stalled(worker))
        try:
            await self._deliver(worker)
        except Exception:
            # Without this reader the worker is useless, so it is replaced.
            log.exception("model %s: a message of the engine's process could not be delivered", self._start.name)
        finally:
            watch.cancel()
            self.worker = self._engine.progress = self._engine.kv_used = None
            self._died_at = time.monotonic()
            await worker.kill()
            only_request = next(iter(worker.unfinished.values())) if len(worker.unfinished) == 1 else None
            worker.fail_pending()
        if self._is_stopped:
            return
        exit_code = worker.process.returncode
        if only_request is not None and exit_code not in KILLED:
            self._fatal.note_crash(only_request)
        self._backoff.note_failure(age=time.monotonic() - started_at)
        deaths = self._backoff.count
        if deaths >= MOST_DEATHS and self._give_up(
            f"its process died {deaths} times soon after its start (exit {exit_code})"
        ):
            return
        log.error("model %s: the engine's process died (exit %s); starting it again", self._start.name, exit_code)
        try:
            await self._running()
        except (DragomanError, ConfigError) as error:
            # `_finish_start` logs it. Without `on_lost`, the next request tries again.
            self._give_up(str(error))

    async def _deliver(self, worker: WorkerProcess) -> None:
        while isinstance(message := await worker.read(), Step | PackedStep | Answer):
            worker.deliver(message)
            if isinstance(message, Step | PackedStep):
                self._engine.kv_used = message.kv_used

    def _give_up(self, reason: str) -> bool:
        """Call `on_lost`; return False if there is none, or after `stop`."""
        if self._on_lost is None or self._is_stopped:
            return False
        self._is_lost = True
        if self._starting is not None:
            # A request may have started another worker in the meantime, which would never be stopped.
            self._starting.cancel()
        self._on_lost(reason)
        return True

    async def _kill_when_stalled(self, worker: WorkerProcess) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._stall_seconds / 4))
            if worker.busy and time.monotonic() - worker.last_message_at > self._stall_seconds:
                log.error("model %s: the engine stalled; killing its process", self._start.name)
                timeout = EngineTimeout(f"the engine gave no answer within {self._stall_seconds:g} s")
                worker.exit_error = Failure.of(timeout)
                await worker.kill()

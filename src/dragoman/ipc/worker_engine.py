"""The proxy engine in the server process for an engine that runs in a worker process. Keeps the worker running.

Rules
1. A worker that dies fails its requests with `EngineDied` and is restarted: at once the first time, with growing
   pauses if it keeps dying early. After `MAX_DEATHS` early deaths it is given up, and `on_lost` is called.
2. Requests wait for a starting worker for at most `load_seconds`. A model that cannot be loaded raises `ModelFailed`
   and is tried again with the next request.
3. A worker that sends nothing for `stall_seconds` while it owes output is killed. A complete reply is no longer work,
   even if its reader lags behind.
4. A request that crashed the worker `MAX_CRASHES` times is refused. A crash counts against a request only if it was
   alone in the worker, and if the worker was not killed by an operator, the system or the stall timer.
"""

import asyncio
import hashlib
import logging
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from dragoman.core.engine import ModelInfo, PutProgress
from dragoman.core.errors import (
    ENCODE_ERRORS,
    ConfigError,
    EngineTimeout,
    ModelFailed,
    ModelLoading,
    RequestRefused,
    Unavailable,
)
from dragoman.core.events import Listener
from dragoman.core.request import GenerationRequest
from dragoman.ipc.child_process import (
    RestartBackoff,
    keep_running,
    kill_child,
    start_child,
    wait_for_event,
    wait_for_exit,
)
from dragoman.ipc.engine_client import LoadReply, ProxyEngine, WorkerConnection, WorkerRequest
from dragoman.ipc.framing import encode
from dragoman.ipc.messages import EngineInfo, Failure, MethodCall, RawGenerate, Start, StartFailed, decode_request

log = logging.getLogger("dragoman.ipc")
T = TypeVar("T")

MIN_PAUSE, MAX_PAUSE = 1.0, 30.0
MAX_DEATHS = 3
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a worker that was killed from outside."""
STOPPED = "the engine has been stopped"
MAX_CRASHES = 2
MAX_REQUESTS = 1024
MEMORY_SECONDS = 3600.0


class FatalRequests:
    """Counts crashes by request. Two requests are the same if the engine gets the same input: ids, labels and callers
    are ignored. Crashes are forgotten after `MEMORY_SECONDS`; beyond `MAX_REQUESTS`, the oldest are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, list[float]] = OrderedDict()

    def note_crash(self, request: WorkerRequest) -> None:
        """Record that the worker crashed while this was its only request."""
        digest = _digest(request)
        if digest is None:
            return
        self._crashes[digest] = [*self._recent(digest), self._clock()]
        self._crashes.move_to_end(digest)
        while len(self._crashes) > MAX_REQUESTS:
            self._crashes.popitem(last=False)

    def check(self, request: WorkerRequest) -> None:
        """Raise RequestRefused if the request has crashed the worker too often."""
        digest = _digest(request) if self._crashes else None
        if digest is not None and len(self._recent(digest)) >= MAX_CRASHES:
            raise RequestRefused(
                f"this request crashed the engine's process {MAX_CRASHES} times; it is refused for "
                f"{MEMORY_SECONDS / 60:g} minutes. Change the request."
            )

    def _recent(self, digest: bytes) -> list[float]:
        since = self._clock() - MEMORY_SECONDS
        return [crash for crash in self._crashes.get(digest, ()) if crash > since]


def _digest(request: WorkerRequest) -> bytes | None:
    """None for a request that cannot be encoded and therefore never reaches a worker."""
    try:
        if isinstance(request, GenerationRequest | msgspec.Raw):
            # Decoding makes 0 and 0.0 the same.
            decoded = decode_request(msgspec.msgpack.encode(request))
            same: object = msgspec.structs.replace(decoded, id="", principal="", labels={}, headers={})
        else:
            same = msgspec.structs.replace(request, key=0)
        return hashlib.sha256(msgspec.msgpack.encode(same)).digest()
    except ENCODE_ERRORS:
        return None


class WorkerEngine(ProxyEngine):
    """Passes every call on to a worker, which it keeps running."""

    def __init__(
        self,
        engine: str,
        name: str,
        options: Mapping[str, Any],
        stall_seconds: float = 600.0,
        on_lost: Callable[[str], None] | None = None,
        load_seconds: float | None = None,
    ) -> None:
        super().__init__(EngineInfo((ModelInfo(name),)))
        self.pid: int | None = None
        self.worker_control = self
        self._start = Start(engine, name, options)
        self._stall_seconds = stall_seconds
        self._on_lost = on_lost
        self._load_seconds = load_seconds
        self._worker: WorkerConnection | None = None
        self._fatal = FatalRequests()
        self._backoff = RestartBackoff(MIN_PAUSE, MAX_PAUSE)
        self._stopping = asyncio.Event()
        self._is_lost = self._is_started = False
        self._died_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[WorkerConnection] | None = None
        """The next worker, for requests that wait for it."""

    async def start(self) -> None:
        await self._running()
        self._is_started = True

    async def stop(self) -> None:
        self._stopping.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_waiting(Unavailable(STOPPED))

    @property
    def is_restarting(self) -> bool:
        return self._is_started and self._worker is None

    @property
    def restart_seconds(self) -> float:
        return time.monotonic() - self._died_at

    async def wait_until_running(self, timeout: float | None = None) -> WorkerConnection:
        """Return the running worker. Errors of the configuration are not shown to the caller of the API."""
        try:
            async with asyncio.timeout(timeout):
                return await self._running()
        except TimeoutError:
            raise ModelLoading("the model is still being loaded; try again later", retry_after=5) from None
        except ConfigError as error:
            raise self._load_error() from error

    async def _worker_for_request(self, request: WorkerRequest) -> WorkerConnection:
        self._fatal.check(request)
        if self._worker is not None and not self._stopping.is_set():
            return self._worker
        return await self.wait_until_running(self._load_seconds)

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        await (await self._worker_for_request(request)).deliver(request, listener)

    async def call_method(self, method_call: MethodCall, value_type: type[T]) -> T:
        return await (await self._worker_for_request(method_call)).call_method(method_call, value_type)

    def forward(self, put: PutProgress, key: int, request: msgspec.Raw) -> bool:
        if self._worker is None:
            return False
        self._fatal.check(request)
        self._worker.forward(put, RawGenerate(key, request))
        return True

    async def forward_when_running(self, put: PutProgress, key: int, request: msgspec.Raw) -> None:
        (await self._worker_for_request(request)).forward(put, RawGenerate(key, request))

    def stop_forwarding(self, key: int) -> None:
        if self._worker is not None:
            self._worker.stop_forwarding(key)

    async def _running(self) -> WorkerConnection:
        """Return the worker. Concurrent callers share one start."""
        if self._stopping.is_set():
            raise Unavailable(STOPPED)
        if self._is_lost:
            raise self._load_error()
        if self._worker is not None:
            return self._worker
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_running())
        return await asyncio.shield(self._ready)

    async def _keep_running(self) -> None:
        try:
            await keep_running(self._run, self._backoff, self._stopping)
        except Exception as error:  # noqa: BLE001 (raised in the requests that wait)
            self._fail_waiting(error)
            # The caller of the first start reports its error. Without `on_lost`, the next request tries again.
            if self._is_started and self._on_lost is not None:
                self._is_lost = True
                self._on_lost(str(error))
            elif self._is_started:
                log.error("model %s: %s", self._start.name, error)

    def _fail_waiting(self, error: Exception) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.set_exception(error)
            # Without a request that waits, asyncio would report that the error was not retrieved.
            ready.exception()

    async def _run(self) -> None:
        """Run one worker to its end."""
        worker = WorkerConnection(self._start.name, self)
        process = await start_child(worker.link, "dragoman.ipc.worker_main")
        only_request = None
        try:
            worker.link.send(encode(self._start))
            self._announce(worker, await worker.loaded, process.pid)
            started_at = time.monotonic()
            await self._watch(worker)
        finally:
            if self._worker is not None:
                self._worker = self.pid = self.kv_used = None
                self._died_at = time.monotonic()
            self.progress = None
            kill_child(process)
            try:
                await wait_for_exit(process)
            finally:
                worker.link.close()
                if len(worker.unfinished) == 1:
                    (only_request,) = worker.unfinished.values()
                worker.fail_pending()
        if only_request is not None and process.returncode not in KILLED:
            self._fatal.note_crash(only_request)
        self._backoff.note_failure(age=time.monotonic() - started_at)
        deaths = self._backoff.count
        if deaths >= MAX_DEATHS and self._on_lost is not None:
            self._fail_waiting(self._load_error())
            raise ModelFailed(f"its process died {deaths} times soon after its start (exit {process.returncode})")
        message = "model %s: the engine's process died (exit %s); starting it again"
        log.error(message, self._start.name, process.returncode)

    def _announce(self, worker: WorkerConnection, answer: LoadReply | None, pid: int) -> None:
        """Use a worker that has loaded the engine; raise if it has not."""
        name = self._start.name
        if answer is None:
            self._backoff.note_failure(age=0)
            raise ModelFailed(f"model '{name}' could not be loaded: its process died", retry_after=10)
        if isinstance(answer, StartFailed):
            raise ConfigError(answer.reason) if answer.is_config_error else self._load_error()
        self._worker, self.pid = worker, pid
        self.describe(answer)
        if self._is_started:
            log.info("model %s: running again after %.1f s", name, self.restart_seconds)
        if self._ready is not None:
            self._ready.set_result(worker)
            self._ready = None

    def _load_error(self) -> ModelFailed:
        return ModelFailed(f"model '{self._start.name}' could not be loaded; see the server's log", retry_after=10)

    async def _watch(self, worker: WorkerConnection) -> None:
        """Wait until the worker ends or stalls. Checks are counted, because this process may have been suspended."""
        period = min(1.0, self._stall_seconds / 4)
        while not await wait_for_event(worker.ended, period):
            worker.silent_seconds = worker.silent_seconds + period if worker.unfinished else 0.0
            if worker.silent_seconds > self._stall_seconds:
                log.error("model %s: the engine stalled; killing its process", self._start.name)
                timeout = EngineTimeout(f"the engine gave no answer within {self._stall_seconds:g} s")
                worker.exit_error = Failure.of(timeout)
                return

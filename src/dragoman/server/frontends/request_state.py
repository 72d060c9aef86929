"""Holds what the requests of a front end use in the parent, and runs their generations."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from dragoman.core import loop_guard
from dragoman.core.engine import Engine
from dragoman.core.rate_limits import Rate
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_main import to_failure
from dragoman.ipc.worker_messages import Failure, Progress, pack
from dragoman.pipeline.event_stream import run
from dragoman.server.auth.quotas import Lease
from dragoman.server.frontends.messages import PassedGenerate, Pause, decode_request
from dragoman.server.model_lease import Engagement

log = logging.getLogger("dragoman.fronts")


class RequestState:
    __slots__ = ("engine", "local", "model_lease", "opening", "quota_lease", "tasks", "via", "worker_keys")

    def __init__(self) -> None:
        self.quota_lease: Lease | None = None
        self.model_lease: Engagement | None = None
        self.engine: Engine | None = None
        self.worker_keys: set[int] = set()
        """Generations in workers."""
        self.opening: dict[int, asyncio.Task[None]] = {}
        """Those of them that wait for their worker."""
        self.local: dict[int, LocalGeneration] = {}
        """Generations in this process."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.via: bytes | None = None
        """The header that detects loops (see `loop_guard`)."""

    def rates(self) -> tuple[Rate, ...]:
        return () if self.quota_lease is None else tuple(self.quota_lease.rates())

    def cancel(self, key: int, ended: bool) -> None:
        """Stop a generation; `ended` if it has come to its end already."""
        if key in self.worker_keys:
            self.worker_keys.discard(key)
            if key in self.opening:
                self.opening.pop(key).cancel()
            elif isinstance(self.engine, WorkerEngine):
                self.engine.stop_forwarding(key, ended)
        elif key in self.local:
            self.local.pop(key).task.cancel()

    def release(self, ended: bool) -> None:
        """Release the model; `ended` if the generations have come to their end or were cancelled."""
        for task in self.tasks:
            task.cancel()
        for key in [*self.worker_keys, *self.local]:
            self.cancel(key, ended)
        if self.model_lease is not None:
            self.model_lease.close()
        self.model_lease = self.engine = None


class LocalGeneration:
    """A generation of an engine in this process, which can be paused."""

    __slots__ = ("running", "task")

    def __init__(self, task: "asyncio.Task[None]", running: asyncio.Event) -> None:
        self.task = task
        self.running = running


class GenerationOutput(Protocol):
    """The connection to the front end, as generations see it."""

    def put(self, progress: msgspec.Raw) -> None: ...

    def spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None
    ) -> "asyncio.Task[None]": ...


class GenerationRunner:
    """Runs the generations of a front end in workers or in this process."""

    def __init__(self, output: GenerationOutput) -> None:
        self._output = output

    def start(self, message: PassedGenerate, state: RequestState) -> None:
        if state.engine is None:
            return
        try:
            self._open(message, state, state.engine)
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            self._end(message.key, to_failure(error))

    def _open(self, message: PassedGenerate, state: RequestState, engine: Engine) -> None:
        key = message.key
        if not isinstance(engine, WorkerEngine):
            running = asyncio.Event()
            running.set()
            work = self._run_local(key, engine, decode_request(message.request), running, state)
            state.local[key] = LocalGeneration(self._output.spawn(message.id, work), running)
            return
        if not engine.forward_now(self._output, key, message.request):
            later = self._forward_later(engine, key, message.request.copy(), state)
            state.opening[key] = self._output.spawn(message.id, later, state.tasks)
        state.worker_keys.add(key)

    async def _forward_later(self, engine: WorkerEngine, key: int, request: msgspec.Raw, state: RequestState) -> None:
        try:
            await engine.forward(self._output, key, request)
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            self._end(key, to_failure(error))
        state.opening.pop(key, None)

    async def _run_local(
        self, key: int, engine: Engine, request: GenerationRequest, running: asyncio.Event, state: RequestState
    ) -> None:
        failure = None
        # The task belongs to this request, so it sets the context variable of the loop guard.
        loop_guard.arrive(state.via)
        try:
            async with aclosing(run(engine, request)) as stream:
                async for events in stream:
                    self._output.put(pack(Progress(key, tuple(events))))
                    if not running.is_set():
                        await running.wait()
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            failure = to_failure(error)
        self._end(key, failure)
        state.local.pop(key, None)

    def _end(self, key: int, failure: Failure | None) -> None:
        self._output.put(pack(Progress(key, ended=True, failure=failure)))

    def pause(self, message: Pause, state: RequestState) -> None:
        """Pause or resume a local generation; workers cannot be paused."""
        generation = state.local.get(message.key)
        if generation is not None and message.is_paused:
            generation.running.clear()
        elif generation is not None:
            generation.running.set()

"""Holds what the requests of a front end use in the parent, and handles their messages."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from dragoman.core import loop_guard
from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_main import to_failure
from dragoman.ipc.worker_messages import Failure, GenerationProgress, pack
from dragoman.pipeline.event_stream import stream_events
from dragoman.pipeline.generate import STAGE_FEATURES
from dragoman.server.app import App
from dragoman.server.auth.quotas import QuotaLease
from dragoman.server.auth.scopes import Caller
from dragoman.server.frontends import messages
from dragoman.server.model_lease import LeaseInfo, ModelLease

log = logging.getLogger("dragoman.fronts")


Handler = Callable[[Any], object]


class RequestState:
    __slots__ = ("engine", "local", "model_lease", "opening", "quota_lease", "tasks", "via", "worker_keys")

    def __init__(self) -> None:
        self.quota_lease: QuotaLease | None = None
        self.model_lease: ModelLease | None = None
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

    def rates(self) -> tuple[RateLimitState, ...]:
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


class FrontEndOutput(Protocol):
    """The connection to the front end, as the handlers of its messages see it."""

    def send(self, message: messages.ToFrontEnd) -> None: ...

    def put(self, progress: msgspec.Raw) -> None: ...

    def spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None
    ) -> "asyncio.Task[None]": ...


class GenerationRunner:
    """Runs the generations of a front end in workers or in this process."""

    def __init__(self, output: FrontEndOutput) -> None:
        self._output = output

    def start(self, message: messages.RawStartGeneration, state: RequestState) -> None:
        if state.engine is None:
            return
        try:
            self._open(message, state, state.engine)
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            self._end(message.key, to_failure(error))

    def _open(self, message: messages.RawStartGeneration, state: RequestState, engine: Engine) -> None:
        key = message.key
        if not isinstance(engine, WorkerEngine):
            running = asyncio.Event()
            running.set()
            work = self._run_local(key, engine, messages.decode_request(message.request), running, state)
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
        loop_guard.store_path_header(state.via)
        try:
            async with aclosing(stream_events(engine, request)) as stream:
                async for events in stream:
                    self._output.put(pack(GenerationProgress(key, tuple(events))))
                    if not running.is_set():
                        await running.wait()
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            failure = to_failure(error)
        self._end(key, failure)
        state.local.pop(key, None)

    def _end(self, key: int, failure: Failure | None) -> None:
        self._output.put(pack(GenerationProgress(key, ended=True, failure=failure)))

    def pause(self, message: messages.Pause, state: RequestState) -> None:
        """Pause or resume a local generation; workers cannot be paused."""
        generation = state.local.get(message.key)
        if generation is not None and message.is_paused:
            generation.running.clear()
        elif generation is not None:
            generation.running.set()


class RequestHandlers:
    """Handles the messages of requests that use models."""

    def __init__(self, app: App, connection: FrontEndOutput) -> None:
        self._app = app
        self._connection = connection
        self._states: dict[str, RequestState] = {}
        self._generations = GenerationRunner(connection)

    def handlers(self) -> dict[type, Handler]:
        return {
            messages.EnterQuota: self._enter_quota,
            messages.AcquireLease: self._acquire_lease,
            messages.RawStartGeneration: self._generate,
            messages.CancelGeneration: self._cancel,
            messages.Pause: self._pause,
            messages.AcquireSlot: self._acquire_slot,
            messages.ReleaseSlot: self._release_slot,
            messages.ReleaseLease: self._release_lease,
            messages.RequestEnded: self._finish,
        }

    def close(self) -> int:
        """Release all requests; return their number."""
        count = len(self._states)
        for state in self._states.values():
            state.release(ended=False)
            if state.quota_lease is not None:
                state.quota_lease.abandon()
        self._states.clear()
        return count

    def refuse(self, request_id: str, error: Exception) -> None:
        state = self._states.get(request_id) or RequestState()
        lease = state.model_lease
        label, fallbacks = (None, ()) if lease is None else (lease.label, lease.fallbacks)
        if not isinstance(error, DragomanError):
            log.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
            error = EngineFailed("an internal error; see the server log")
        cause = None if error.__cause__ is None else str(error.__cause__)
        self._connection.send(
            messages.ErrorReply(request_id, Failure.of(error), label, fallbacks, state.rates(), cause)
        )

    def _enter_quota(self, message: messages.EnterQuota) -> None:
        state = self._states.setdefault(message.id, RequestState())
        headers = {b"authorization": message.authorization, b"x-api-key": message.api_key}
        try:
            state.quota_lease = lease = self._app.quota_lease_for(headers)
            if lease is not None:
                lease.enter()
        except DragomanError as error:
            self.refuse(message.id, error)
            return
        self._connection.send(messages.QuotaEntered(message.id, state.rates()))

    def _acquire_lease(self, message: messages.AcquireLease) -> None:
        state = self._states.setdefault(message.id, RequestState())
        caller = Caller(message.principal, models=message.models, within=message.within)
        state.via = message.via
        state.model_lease = lease = self._app.make_model_lease(caller, state.quota_lease)
        self._connection.spawn(message.id, self._start_lease(message, state, lease), state.tasks)

    async def _start_lease(self, message: messages.AcquireLease, state: RequestState, lease: ModelLease) -> None:
        try:
            info = await lease.find(message.wish)
            engine = lease.start_now()
            if engine is None:
                self._connection.send(messages.LeaseQueued(message.id, info, state.rates()))
                engine = await lease.start()
        except asyncio.CancelledError:
            lease.close()
            raise
        state.engine = engine
        self._connection.send(_lease_granted(message.id, info, engine, lease.queue_us, state.rates()))

    def _generate(self, message: messages.RawStartGeneration) -> None:
        if (state := self._states.get(message.id)) is not None:
            self._generations.start(message, state)

    def _cancel(self, message: messages.CancelGeneration) -> None:
        if (state := self._states.get(message.id)) is not None:
            state.cancel(message.key, ended=False)

    def _pause(self, message: messages.Pause) -> None:
        if (state := self._states.get(message.id)) is not None:
            self._generations.pause(message, state)

    def _acquire_slot(self, message: messages.AcquireSlot) -> None:
        state = self._states.get(message.id)
        if state is not None and state.model_lease is not None:
            self._connection.spawn(message.id, self._grant_slot(message.id, state.model_lease), state.tasks)

    async def _grant_slot(self, request_id: str, lease: ModelLease) -> None:
        await lease.turns.acquire()
        self._connection.send(messages.SlotGranted(request_id))

    def _release_slot(self, message: messages.ReleaseSlot) -> None:
        state = self._states.get(message.id)
        if state is not None and state.model_lease is not None:
            state.model_lease.turns.release()

    def _release_lease(self, message: messages.ReleaseLease) -> None:
        if (state := self._states.get(message.id)) is None:
            return
        if state.model_lease is not None:
            state.model_lease.note_speed(message.tokens, message.seconds)
        state.release(ended=True)

    def _finish(self, message: messages.RequestEnded) -> None:
        record = message.record
        state = self._states.pop(record.id, None)
        if state is not None:
            state.release(ended=True)
            if state.quota_lease is not None:
                state.quota_lease.settle(record.spent_tokens)
        telemetry = self._app.telemetry
        if message.gaps is not None and record.model is not None:
            telemetry.metrics.for_model(record.model).gaps.add_all(message.gaps.counts, message.gaps.total)
        telemetry.request(record)


def _lease_granted(
    request_id: str, info: LeaseInfo, engine: Engine, queue_us: int, rates: tuple[RateLimitState, ...]
) -> messages.LeaseGranted:
    format_name = next((model.format for model in engine.models() if model.name == info.model), "plain")
    features = engine.supports() & STAGE_FEATURES
    return messages.LeaseGranted(request_id, info, format_name, features, engine.emits_tool_calls, queue_us, rates)

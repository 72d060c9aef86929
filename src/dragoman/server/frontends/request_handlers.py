"""Holds what the requests of a front end use in the parent, and handles their messages.

Rules
1. What a request holds (quota, slots, engine) is released when the request leaves or its front end dies. Tokens
   reserved by a front end that died count as spent, because they may have been; also in the ledger.
2. The progress of all generations leaves in one message per turn of the event loop.
3. A front end is killed if more than `MAX_UNSENT` bytes wait for it. Engines in this process wait long before that:
   a fast one must not delay the messages of other requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from dragoman.core import loop_guard
from dragoman.core.engine import Engine, WorkerControl
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest
from dragoman.ipc.framing import MessageConnection, encode
from dragoman.ipc.messages import (
    Cancel,
    EngineInfo,
    Failure,
    GenerationProgress,
    MethodCall,
    MethodResult,
    PackedStep,
    RawGenerate,
    decode_request,
    pack,
)
from dragoman.ipc.worker_main import run_generation, run_method_call
from dragoman.pipeline.generate import STAGE_FEATURES
from dragoman.protocols.responses.items import PREFIX
from dragoman.server.app import App
from dragoman.server.app_calls import call_app
from dragoman.server.auth.callers import Caller, QuotaLease
from dragoman.server.frontends import messages
from dragoman.server.frontends.messages import LeaseReply
from dragoman.server.model_lease import LeaseInfo, LocalModelLease

log = logging.getLogger("dragoman.fronts")

MAX_UNSENT = 256 * 1024 * 1024
PIPELINE_FEATURES = STAGE_FEATURES | {Feature.COUNT_TOKENS, Feature.RENDER, Feature.THINKING}
"""Features of an engine that matter to the pipeline, which runs in the front end."""
NO_SERVER: dict[str, Any] = {"asgi": {"version": "3.0"}, "server": None, "extensions": {}}
"""The parts of an ASGI scope that a front end does not send."""
LEASE_METHODS = ("enter_quota", "acquire_lease", "start_lease", "load_model")
"""Their answer is a `LeaseReply` even if they fail."""

Handler = Callable[[Any], object]


class FrontEndOutput:
    """Sends messages to a front end; `kill` is called with the reason if it does not read them."""

    def __init__(self, link: MessageConnection, kill: Callable[[str], None]) -> None:
        self._link = link
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._batch: list[msgspec.Raw] = []

    def send(self, message: msgspec.Struct) -> None:
        self._link.send(encode(message))

    def pause(self) -> Awaitable[Any] | None:
        """What to wait for before more is sent, if the front end reads too slowly."""
        return None if self._link.writable.is_set() else self._link.writable.wait()

    def put(self, progress: msgspec.Raw) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(progress)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self.send(PackedStep(tuple(batch)))
        if self._link.unsent > MAX_UNSENT:
            self._kill(f"has not read {self._link.unsent / 1e6:.0f} MB of output")


class RequestState:
    __slots__ = ("calls", "engine", "id", "model", "model_lease", "paused", "quota_lease", "via")

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.quota_lease: QuotaLease | None = None
        self.model_lease: LocalModelLease | None = None
        self.model = ""
        self.engine: Engine | None = None
        self.calls: dict[int, Callable[[], object]] = {}
        """How to cancel a call that may still run, by its key."""
        self.paused: dict[int, asyncio.Event] = {}
        """Generations whose reader lags behind. The event is set when they may go on."""
        self.via: bytes | None = None
        """The header that detects loops (see `loop_guard`)."""

    def reply(self, failure: Failure | None = None, found: LeaseInfo | None = None) -> LeaseReply:
        rates = () if self.quota_lease is None else tuple(self.quota_lease.rates())
        lease = self.model_lease
        if lease is None:
            return LeaseReply(rates, failure)
        engine = None if self.engine is None else _describe(self.engine, self.model)
        return LeaseReply(
            *(rates, failure, lease.label, lease.fallbacks, found, engine, lease.queue_us, lease.budget_warning)
        )

    def cancel(self, key: int) -> None:
        cancel = self.calls.pop(key, None)
        if cancel is not None:
            cancel()

    def release(self) -> None:
        """Cancel what still runs and release the model."""
        for key in list(self.calls):
            self.cancel(key)
        if self.model_lease is not None:
            self.model_lease.close()
        self.model_lease = self.engine = None


class RequestHandlers:
    """Handles the messages of requests."""

    def __init__(self, app: App, output: FrontEndOutput) -> None:
        self._app = app
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._states: dict[str, RequestState] = {}
        self.handlers: dict[type, Handler] = {
            messages.RawRequestCall: self._call,
            messages.Pause: self._pause,
            messages.ReleaseSlot: self._release_slot,
            messages.ReleaseLease: self._release_lease,
            messages.RequestEnded: self._finish,
        }
        self._methods: dict[str, Callable[..., Awaitable[object]]] = {
            "enter_quota": self._enter_quota,
            "acquire_lease": self._acquire_lease,
            "start_lease": self._start_lease,
            "load_model": self._load_model,
            "acquire_slot": self._acquire_slot,
            "relay": self._relay,
        }
        responses = app.responses
        stored: dict[str, Callable[..., Awaitable[object]]] = {
            "check_responses": responses.check,
            "keep_response": responses.keep,
            "record_response": responses.record,
            "end_response_early": responses.end_early,
            "find_response": responses.find,
            "find_response_items": responses.find_items,
            "find_items": responses.items,
            "read_response_events": responses.read_events,
            "conversation_items": responses.conversation_items,
            "start_background": app.background.start,
            "add_file": app.files.add,
            "find_file": app.files.find,
            "add_batch": app.batches.add,
            "find_batch": app.batches.find,
        }
        self._methods |= {name: partial(_call_store, method) for name, method in stored.items()}

    def close(self) -> int:
        """Release all requests; return their number."""
        count = len([request_id for request_id in self._states if request_id])
        for state in self._states.values():
            state.release()
            self._app.ledger.abandon(state.id)
            if state.quota_lease is not None:
                state.quota_lease.abandon()
        lost = [request_id for request_id in self._states if request_id.startswith(PREFIX)]
        self._states.clear()
        if lost:
            self._app.responses.note_lost(lost)
            self._app.tasks.spawn(self._app.background.resume())
        return count

    def _call(self, message: messages.RawRequestCall) -> None:
        call, state = message.call, self._states.get(message.id)
        if isinstance(call, MethodCall):
            if state is None:
                self._states[message.id] = state = RequestState(message.id)
            state.calls[call.key] = self._loop.create_task(self._run_method_call(state, call)).cancel
        elif state is not None and isinstance(call, Cancel):
            state.cancel(call.key)
        elif state is not None and isinstance(call, RawGenerate) and state.engine is not None:
            try:
                self._generate(call, state, state.engine)
            except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
                self._fail(call.key, error)

    async def _run_method_call(self, state: RequestState, method_call: MethodCall) -> None:
        method = self._methods.get(method_call.method)
        try:
            if method is not None:
                arguments = messages.ARGUMENTS[method_call.method].decode(method_call.arguments)
                result = MethodResult(method_call.key, pack(await method(state, *arguments)))
            else:
                assert state.engine is not None
                result = await run_method_call(state.engine, method_call)
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            failure = self._report(state, error)
            if method_call.method in LEASE_METHODS:
                result = MethodResult(method_call.key, pack(state.reply(failure)))
            else:
                result = MethodResult(method_call.key, failure=failure)
        finally:
            state.calls.pop(method_call.key, None)
        self._output.send(result)

    def _report(self, state: RequestState, error: Exception) -> Failure:
        if not isinstance(error, DragomanError):
            log.error("request %s failed", state.id, exc_info=error, extra={"request_id": state.id})
            error = EngineFailed("an internal error; see the server log")
        return Failure.of(error)

    async def _enter_quota(self, state: RequestState, authorization: bytes, api_key: bytes) -> LeaseReply:
        headers = {b"authorization": authorization, b"x-api-key": api_key}
        state.quota_lease = lease = self._app.quota_lease_for(headers)
        if lease is not None:
            lease.enter()
        return state.reply()

    async def _acquire_lease(self, state: RequestState, request: messages.AcquireLease) -> LeaseReply:
        caller = Caller(
            request.principal,
            models=request.models,
            configured_models=request.configured_models,
            key=request.key,
            budgets=request.budgets,
        )
        state.via = request.via
        app = self._app
        state.model_lease = lease = LocalModelLease(app.catalog, caller, state.quota_lease, app.ledger, state.id)
        try:
            info = await lease.find(request.lease_request)
        except asyncio.CancelledError:
            lease.close()
            raise
        state.model = info.model
        state.engine = lease.start_now()
        return state.reply(found=info)

    async def _start_lease(self, state: RequestState) -> LeaseReply:
        lease = state.model_lease
        assert lease is not None
        try:
            state.engine = await lease.start()
        except asyncio.CancelledError:
            lease.close()
            raise
        return state.reply()

    async def _load_model(self, state: RequestState) -> LeaseReply:
        assert state.model_lease is not None
        await state.model_lease.load()
        return state.reply()

    async def _acquire_slot(self, state: RequestState) -> None:
        assert state.model_lease is not None
        await state.model_lease.slots.acquire()

    async def _relay(self, state: RequestState, scope: dict[str, Any], body: bytes) -> messages.RelayReply:
        disconnected = asyncio.Event()
        # A relayed request makes no other call.
        ((key, cancel),) = state.calls.items()
        state.calls[key] = lambda: cancel() if self._app.is_stopping else disconnected.set()
        try:
            reply = await call_app(self._app, scope | NO_SERVER, body, disconnected)
            return messages.RelayReply(reply.status, reply.headers, reply.body)
        finally:
            self._states.pop(state.id, None)

    def _generate(self, call: RawGenerate, state: RequestState, engine: Engine) -> None:
        worker = engine.worker_control
        if worker is None:
            work = self._run_local(engine, call.key, decode_request(call.request), state)
            state.calls[call.key] = self._loop.create_task(work).cancel
        elif worker.forward(self._output.put, call.key, call.request):
            state.calls[call.key] = partial(worker.stop_forwarding, call.key)
        else:
            state.calls[call.key] = self._loop.create_task(self._forward_later(worker, call, state)).cancel

    async def _forward_later(self, worker: WorkerControl, call: RawGenerate, state: RequestState) -> None:
        try:
            await worker.forward_when_running(self._output.put, call.key, call.request)
            state.calls[call.key] = partial(worker.stop_forwarding, call.key)
        except Exception as error:  # noqa: BLE001 (reported to the front end and logged)
            self._fail(call.key, error)

    async def _run_local(self, engine: Engine, key: int, request: GenerationRequest, state: RequestState) -> None:
        def put(progress: GenerationProgress) -> Awaitable[Any] | None:
            self._output.put(pack(progress))
            if progress.ended:
                return None
            return state.paused[key].wait() if key in state.paused else self._output.pause()

        # The task belongs to this request, so it sets the context variable of the loop guard.
        loop_guard.store_path_header(state.via)
        await run_generation(engine, key, request, put)
        state.calls.pop(key, None)

    def _fail(self, key: int, error: Exception) -> None:
        self._output.put(pack(GenerationProgress(key, ended=True, failure=Failure.of(error))))

    def _pause(self, message: messages.Pause) -> None:
        """Pause or resume a generation in this process; workers cannot be paused."""
        state = self._states.get(message.id)
        if state is not None and message.is_paused:
            state.paused[message.key] = asyncio.Event()
        elif state is not None and message.key in state.paused:
            state.paused.pop(message.key).set()

    def _release_slot(self, message: messages.ReleaseSlot) -> None:
        state = self._states.get(message.id)
        if state is not None and state.model_lease is not None:
            state.model_lease.slots.release()

    def _release_lease(self, message: messages.ReleaseLease) -> None:
        state = self._states.get(message.id)
        if state is not None:
            if state.model_lease is not None:
                state.model_lease.note_speed(message.tokens, message.seconds)
            state.release()

    def _finish(self, message: messages.RequestEnded) -> None:
        record = message.record
        state = self._states.pop(record.id, None)
        if state is not None:
            state.release()
            if state.quota_lease is not None:
                state.quota_lease.settle(record.spent_tokens)
        telemetry = self._app.telemetry
        if message.gaps is not None and record.model is not None:
            telemetry.metrics.for_model(record.model).gaps.add_all(message.gaps.counts, message.gaps.total)
        telemetry.request(record)


async def _call_store(method: Callable[..., Awaitable[object]], state: RequestState, *arguments: object) -> object:
    """Call a method of a store, which belongs to no request."""
    return await method(*arguments)


def _describe(engine: Engine, name: str) -> EngineInfo:
    return EngineInfo(
        (engine.model_info(name),), engine.supports() & PIPELINE_FEATURES, emits_tool_calls=engine.emits_tool_calls
    )

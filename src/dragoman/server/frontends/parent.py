"""Contains the parent's end of the connection to one front end, and handles the messages of its requests.

Rules
1. What a request holds (quota, slots, engine) is released when the request leaves or its front end dies. Tokens
   reserved by a front end that died count as spent, because they may have been.
2. The progress of all generations leaves in one message per turn of the event loop.
3. An error while a message is handled is reported to its request and affects no other. A message that cannot be decoded
   ends the connection and with it the front end.
4. A front end is killed if more than `MOST_UNSENT` bytes wait for it, if it misses `MOST_PINGS` pings in a row, or if
   it does not listen `LISTEN_SECONDS` after its start. Pings are counted instead of seconds because the parent itself
   may have been suspended, with unread answers in its socket.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.rate_limits import Rate
from dragoman.ipc.link import Link
from dragoman.ipc.worker_messages import Failure
from dragoman.pipeline.generate import STAGED
from dragoman.server.app import App
from dragoman.server.auth.scopes import Caller
from dragoman.server.frontends.messages import (
    AcquireSlot,
    ApplyConfig,
    Begin,
    Cancel,
    CancelRelay,
    ConfigApplied,
    Ended,
    Engage,
    Enter,
    Entered,
    FindItems,
    FindResponse,
    Granted,
    Kept,
    Knock,
    LeaseGranted,
    LeaseQueued,
    Leave,
    Listening,
    PassedGenerate,
    Pause,
    Pong,
    RawProgressBatch,
    Refused,
    Relay,
    ReleaseSlot,
    StoreResponse,
    ToFront,
    decode_to_parent,
    encode,
)
from dragoman.server.frontends.relay import RelayedRequest
from dragoman.server.frontends.request_state import GenerationRunner, RequestState
from dragoman.server.model_lease import Engagement, Found

log = logging.getLogger("dragoman.fronts")

MOST_UNSENT = 256 * 1024 * 1024
PING_SECONDS = 2.0
MOST_PINGS = 5
LISTEN_SECONDS = 60.0

Handler = Callable[[Any], object]


class FrontEndMonitor:
    """Detects a front end that does not listen or does not answer, and calls `kill` once."""

    def __init__(self, send: Callable[[ToFront], None], kill: Callable[[], None]) -> None:
        self._send = send
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_killed = False
        """After the kill, messages of the front end no longer count."""

    def start(self) -> None:
        self._timer = self._loop.call_later(LISTEN_SECONDS, self._report_not_listening)

    def start_pings(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def note_pong(self) -> None:
        self._unanswered = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def kill(self, reason: str) -> None:
        if not self.is_killed:
            self.is_killed = True
            log.error("a front end %s; killing it", reason)
            self._kill()

    def _report_not_listening(self) -> None:
        self.kill(f"does not listen {LISTEN_SECONDS:g} s after its start")

    def _ping(self) -> None:
        if self._unanswered >= MOST_PINGS:
            self.kill(f"has not answered for {MOST_PINGS * PING_SECONDS:g} s")
            return
        self._unanswered += 1
        self._send(Knock())
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)


class FrontEndConnection:
    """`on_listening` is called when the front end accepts connections, `kill` when it must be killed."""

    def __init__(
        self, app: App, on_lost: Callable[[], None], on_listening: Callable[[], None], kill: Callable[[], None]
    ) -> None:
        self.link = Link(self._receive, on_lost)
        self.monitor = FrontEndMonitor(self.send, kill)
        self.is_listening = False
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        self._requests = RequestHandlers(app, self)
        self._app_calls = AppCallHandlers(app, self)
        self._pending_configs: deque[asyncio.Future[None]] = deque()
        self._batch: list[msgspec.Raw] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: dict[type, Handler] = {
            Listening: self._note_listening,
            ConfigApplied: self._note_config_applied,
            Pong: lambda _: self.monitor.note_pong(),
            **self._requests.handlers(),
            **self._app_calls.handlers(),
        }

    def begin(self, number: int, settings: Settings) -> None:
        self.send(Begin(number, _without_models(settings)))
        self.monitor.start()

    def configure(self, settings: Settings) -> "asyncio.Future[None]":
        """Send new settings; the future is done when the front end has applied them."""
        applied: asyncio.Future[None] = self._loop.create_future()
        self._pending_configs.append(applied)
        self.send(ApplyConfig(_without_models(settings)))
        return applied

    def send(self, message: ToFront) -> None:
        self.link.send(encode(message))

    def put(self, progress: msgspec.Raw) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(progress)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self.link.send(encode(RawProgressBatch(tuple(batch))))
        if self.link.unsent > MOST_UNSENT:
            self.monitor.kill(f"has not read {self.link.unsent / 1e6:.0f} MB of output")

    def close(self) -> int:
        """Release everything after the front end has gone; return the number of requests that it had."""
        self.link.close()
        self.monitor.stop()
        while self._pending_configs:
            self._note_config_applied(ConfigApplied())
        return self._requests.close() + self._app_calls.close()

    def spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None
    ) -> "asyncio.Task[None]":
        """Start a task whose error is reported to the request."""
        tasks = self._tasks if tasks is None else tasks
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(self._report_error, request_id))
        return task

    def _report_error(self, request_id: str, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._requests.refuse(request_id, error)

    def _receive(self, body: memoryview) -> None:
        message = decode_to_parent(body)
        try:
            self._handlers[type(message)](message)
        except Exception as error:
            if isinstance(message, Listening | ConfigApplied | Pong):
                # These belong to no request.
                raise
            self._requests.refuse(message.id, error)

    def _note_listening(self, message: Listening) -> None:
        if not self.monitor.is_killed:
            self.is_listening = True
            self._on_listening()
            self.monitor.start_pings()

    def _note_config_applied(self, message: ConfigApplied) -> None:
        applied = self._pending_configs.popleft()
        if not applied.done():
            applied.set_result(None)


class RequestHandlers:
    """Handles the messages of requests that use models."""

    def __init__(self, app: App, connection: FrontEndConnection) -> None:
        self._app = app
        self._connection = connection
        self._states: dict[str, RequestState] = {}
        self._generations = GenerationRunner(connection)

    def handlers(self) -> dict[type, Handler]:
        return {
            Enter: self._enter_quota,
            Engage: self._acquire_lease,
            PassedGenerate: self._generate,
            Cancel: self._cancel,
            Pause: self._pause,
            AcquireSlot: self._acquire_slot,
            ReleaseSlot: self._release_slot,
            Leave: self._release_lease,
            Ended: self._finish,
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
            error = EngineFailed("an internal error; the server's log says more")
        cause = None if error.__cause__ is None else str(error.__cause__)
        self._connection.send(Refused(request_id, Failure.of(error), label, fallbacks, state.rates(), cause))

    def _enter_quota(self, message: Enter) -> None:
        state = self._states.setdefault(message.id, RequestState())
        headers = {b"authorization": message.authorization, b"x-api-key": message.api_key}
        try:
            state.quota_lease = lease = self._app.lease_for(headers)
            if lease is not None:
                lease.enter()
        except DragomanError as error:
            self.refuse(message.id, error)
            return
        self._connection.send(Entered(message.id, state.rates()))

    def _acquire_lease(self, message: Engage) -> None:
        state = self._states.setdefault(message.id, RequestState())
        caller = Caller(message.principal, models=message.models, within=message.within)
        state.via = message.via
        state.model_lease = lease = self._app.engagement_of(caller, state.quota_lease)
        self._connection.spawn(message.id, self._start_lease(message, state, lease), state.tasks)

    async def _start_lease(self, message: Engage, state: RequestState, lease: Engagement) -> None:
        try:
            info = await lease.find(message.wish)
            engine = lease.start_now()
            if engine is None:
                self._connection.send(LeaseQueued(message.id, info, state.rates()))
                engine = await lease.start()
        except asyncio.CancelledError:
            lease.close()
            raise
        state.engine = engine
        self._connection.send(_lease_granted(message.id, info, engine, lease.queue_us, state.rates()))

    def _generate(self, message: PassedGenerate) -> None:
        if (state := self._states.get(message.id)) is not None:
            self._generations.start(message, state)

    def _cancel(self, message: Cancel) -> None:
        if (state := self._states.get(message.id)) is not None:
            state.cancel(message.key, ended=False)

    def _pause(self, message: Pause) -> None:
        if (state := self._states.get(message.id)) is not None:
            self._generations.pause(message, state)

    def _acquire_slot(self, message: AcquireSlot) -> None:
        state = self._states.get(message.id)
        if state is not None and state.model_lease is not None:
            self._connection.spawn(message.id, self._grant_slot(message.id, state.model_lease), state.tasks)

    async def _grant_slot(self, request_id: str, lease: Engagement) -> None:
        await lease.turns.another()
        self._connection.send(Granted(request_id))

    def _release_slot(self, message: ReleaseSlot) -> None:
        state = self._states.get(message.id)
        if state is not None and state.model_lease is not None:
            state.model_lease.turns.give_back()

    def _release_lease(self, message: Leave) -> None:
        if (state := self._states.get(message.id)) is None:
            return
        if state.model_lease is not None:
            state.model_lease.note_speed(message.tokens, message.seconds)
        state.release(ended=True)

    def _finish(self, message: Ended) -> None:
        record = message.record
        state = self._states.pop(record.id, None)
        if state is not None:
            state.release(ended=True)
            if state.quota_lease is not None:
                state.quota_lease.settle(record.spent_tokens)
        telemetry = self._app.telemetry
        if message.gaps is not None and record.model is not None:
            telemetry.metrics.of(record.model).gaps.add_all(message.gaps.counts, message.gaps.total)
        telemetry.request(record)


class AppCallHandlers:
    """Handles relayed requests and queries of stored responses."""

    def __init__(self, app: App, connection: FrontEndConnection) -> None:
        self._app = app
        self._connection = connection
        self._relays: dict[str, RelayedRequest] = {}

    def handlers(self) -> dict[type, Handler]:
        return {
            Relay: self._relay,
            CancelRelay: self._cancel_relay,
            FindResponse: self._in_task(self._find_response),
            FindItems: self._in_task(self._find_items),
            StoreResponse: self._in_task(self._store_response),
        }

    def _in_task(self, handle: Callable[[Any], Coroutine[Any, Any, None]]) -> Handler:
        return lambda message: self._connection.spawn(message.id, handle(message))

    def close(self) -> int:
        """Disconnect all relayed requests; return their number."""
        count = len(self._relays)
        for relay in self._relays.values():
            relay.disconnect()
        self._relays.clear()
        return count

    def _relay(self, message: Relay) -> None:
        self._relays[message.id] = relay = RelayedRequest(message)
        relay.task = self._connection.spawn(message.id, self._answer(message.id, relay))

    async def _answer(self, request_id: str, relay: RelayedRequest) -> None:
        try:
            answer = await relay.answer(self._app)
        finally:
            is_wanted = self._relays.pop(request_id, None) is not None
        if is_wanted:
            self._connection.send(answer)

    def _cancel_relay(self, message: CancelRelay) -> None:
        relay = self._relays.pop(message.id, None)
        if relay is None or relay.task is None:
            return
        if self._app.is_stopping:
            relay.task.cancel()
        else:
            relay.disconnect()

    async def _find_response(self, message: FindResponse) -> None:
        response = await self._app.responses.find(message.principal, message.response)
        self._connection.send(Kept(message.id, response))

    async def _find_items(self, message: FindItems) -> None:
        items = await self._app.responses.items(message.principal, message.items)
        self._connection.send(Kept(message.id, items=dict(items)))

    async def _store_response(self, message: StoreResponse) -> None:
        await self._app.responses.keep(message.response)
        self._connection.send(Kept(message.id))


def _lease_granted(
    request_id: str, info: Found, engine: Engine, queue_us: int, rates: tuple[Rate, ...]
) -> LeaseGranted:
    format_name = next((model.format for model in engine.models() if model.name == info.model), "plain")
    return LeaseGranted(request_id, info, format_name, engine.supports() & STAGED, engine.tells_calls, queue_us, rates)


def _without_models(settings: Settings) -> Settings:
    """Front ends do not need the models."""
    return msgspec.structs.replace(settings, models=(), aliases={}, default=None)

"""The parent's side of one front end: what its requests ask for is done here.

Rules
1. What a request holds (a lease, slots, an engine) it holds here, and gives it back when it leaves or its front end
   dies, whichever comes first. The tokens that one who died had reserved count as spent: they may have been.
2. Progress of generations leaves in one message for each turn of the event loop, whichever engines it comes from.
3. Whatever goes wrong with a question is told to whoever asked it, so that nobody waits for an answer in vain, and is
   nobody else's trouble. Only what cannot be read at all ends the link, and with it the front end.
4. A front end for which more than `MOST_UNSENT` waits is ended: it has not taken anything off its socket for long. So
   is one that has not answered `MOST_KNOCKS` knocks in a row, and one that does not listen `LISTEN_SECONDS` after it
   began. Knocks are counted, not seconds: this process may have stood still itself, with answers before it that it
   has not read, and then no time proves anything.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.rate_limits import Rate
from dragoman.core.request import GenerationRequest
from dragoman.ipc.link import Link
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_messages import Failure, Progress, pack
from dragoman.pipeline.event_stream import failed, run
from dragoman.pipeline.generate import STAGED
from dragoman.server.app import App
from dragoman.server.auth.scopes import Caller
from dragoman.server.frontends.messages import (
    Adopted,
    Another,
    Begin,
    Cancel,
    Configured,
    Drop,
    Ended,
    Engage,
    Engaged,
    Enter,
    Entered,
    FindItems,
    FindResponse,
    GiveBack,
    Granted,
    Here,
    Hold,
    KeepResponse,
    Kept,
    Knock,
    Leave,
    Listening,
    PassedGenerate,
    PassedStep,
    Refused,
    Relay,
    ToFront,
    Waiting,
    decode_request,
    decode_to_parent,
    encode,
)
from dragoman.server.frontends.relay import Passing
from dragoman.server.frontends.request_state import Guest, Played
from dragoman.server.model_lease import Engagement, Found

log = logging.getLogger("dragoman.fronts")

MOST_UNSENT = 256 * 1024 * 1024
KNOCK_SECONDS = 2.0
MOST_KNOCKS = 5
LISTEN_SECONDS = 60.0


class Desk:
    """`listens` is called when the front end takes connections, `stuck` when it must be ended."""

    def __init__(self, app: App, lost: Callable[[], None], listens: Callable[[], None], stuck: Callable[[], None]):
        self.link = Link(self._take, lost)
        self._app = app
        self._listens = listens
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._guests: dict[str, Guest] = {}
        self._relays: dict[str, Passing] = {}
        self._adopting: deque[asyncio.Future[None]] = deque()
        self._step: list[msgspec.Raw] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        self._looking: asyncio.TimerHandle | None = None
        """When it is next seen to whether the front end is there."""
        self.is_listening = False
        self.is_ended = False
        """Whether it hung and was ended: what it still says does not count."""

    def begin(self, number: int, settings: Settings) -> None:
        self.send(Begin(number, _for_fronts(settings)))
        self._looking = self._loop.call_later(LISTEN_SECONDS, self._miss)

    def configure(self, settings: Settings) -> "asyncio.Future[None]":
        """Done when it holds there."""
        adopted: asyncio.Future[None] = self._loop.create_future()
        self._adopting.append(adopted)
        self.send(Configured(_for_fronts(settings)))
        return adopted

    def send(self, message: ToFront) -> None:
        self.link.send(encode(message))

    def put(self, progress: msgspec.Raw) -> None:
        if not self._step:
            self._loop.call_soon(self._flush)
        self._step.append(progress)

    def _flush(self) -> None:
        step, self._step = self._step, []
        self.link.send(encode(PassedStep(tuple(step))))
        if self.link.unsent > MOST_UNSENT:
            self.end(f"has left {self.link.unsent / 1e6:.0f} MB waiting for it")

    def close(self) -> int:
        """The front end has gone; how many requests went with it."""
        self.link.close()
        if self._looking is not None:
            self._looking.cancel()
        count = len(self._guests) + len(self._relays)
        for guest in self._guests.values():
            guest.leave(ended=False)
            if guest.lease is not None:
                guest.lease.abandon()
        self._guests.clear()
        for passing in self._relays.values():
            passing.leave()
        self._relays.clear()
        while self._adopting:
            self._adopted(Adopted())
        return count

    def _take(self, body: memoryview) -> None:
        message = decode_to_parent(body)
        try:
            HANDLERS[type(message)](self, message)
        except Exception as error:
            if isinstance(message, Listening | Adopted | Here):
                # Of no request.
                raise
            self._refuse(message.id, error)

    def _spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]"
    ) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(self._look_at, request_id))
        return task

    def _look_at(self, request_id: str, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._refuse(request_id, error)

    def _guest(self, request_id: str) -> Guest:
        guest = self._guests.get(request_id)
        if guest is None:
            guest = self._guests[request_id] = Guest()
        return guest

    def _listening(self, message: Listening) -> None:
        if self.is_ended:
            return
        self.is_listening = True
        self._listens()
        if self._looking is not None:
            self._looking.cancel()
        self._looking = self._loop.call_later(KNOCK_SECONDS, self._knock)

    def _miss(self) -> None:
        self.end(f"does not listen, {LISTEN_SECONDS:g} s after its start")

    def end(self, why: str) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        log.error("a front end %s; ending it", why)
        self._stuck()

    def _knock(self) -> None:
        if self._unanswered >= MOST_KNOCKS:
            self.end(f"has not answered for {MOST_KNOCKS * KNOCK_SECONDS:g} s")
            return
        self._unanswered += 1
        self.send(Knock())
        self._looking = self._loop.call_later(KNOCK_SECONDS, self._knock)

    def _here(self, message: Here) -> None:
        self._unanswered = 0

    def _adopted(self, message: Adopted) -> None:
        adopted = self._adopting.popleft()
        if not adopted.done():
            adopted.set_result(None)

    def _enter(self, message: Enter) -> None:
        guest = self._guest(message.id)
        headers = {b"authorization": message.authorization, b"x-api-key": message.api_key}
        try:
            guest.lease = lease = self._app.lease_for(headers)
            if lease is not None:
                lease.enter()
        except DragomanError as error:
            self._refuse(message.id, error)
            return
        self.send(Entered(message.id, guest.rates()))

    def _refuse(self, request_id: str, error: Exception) -> None:
        guest = self._guests.get(request_id) or Guest()
        label, fallbacks = (
            (None, ()) if guest.engagement is None else (guest.engagement.label, guest.engagement.fallbacks)
        )
        if not isinstance(error, DragomanError):
            log.error("request %s failed", request_id, exc_info=error, extra={"request_id": request_id})
            error = EngineFailed("an internal error; the server's log says more")
        cause = None if error.__cause__ is None else str(error.__cause__)
        self.send(Refused(request_id, Failure.of(error), label, fallbacks, guest.rates(), cause))

    def _engage(self, message: Engage) -> None:
        guest = self._guest(message.id)
        caller = Caller(message.principal, models=message.models, within=message.within)
        guest.via = message.via
        guest.engagement = engagement = self._app.engagement_of(caller, guest.lease)
        self._spawn(message.id, self._engaged(message, guest, engagement), guest.tasks)

    async def _engaged(self, message: Engage, guest: Guest, engagement: Engagement) -> None:
        try:
            found = await engagement.find(message.wish)
            engine = engagement.start_now()
            if engine is None:
                self.send(Waiting(message.id, found, guest.rates()))
                engine = await engagement.start()
        except asyncio.CancelledError:
            engagement.close()
            raise
        guest.engine = engine
        self.send(_told(message.id, found, engine, engagement.queue_us, guest.rates()))

    def _generate(self, message: PassedGenerate) -> None:
        guest = self._guests.get(message.id)
        if guest is None or guest.engine is None:
            return
        try:
            self._open(message, guest, guest.engine)
        except Exception as error:  # noqa: BLE001 (told to the front end, and to the log)
            self._fail(message.key, _failure(error))

    def _open(self, message: PassedGenerate, guest: Guest, engine: Engine) -> None:
        key = message.key
        if not isinstance(engine, WorkerEngine):
            free = asyncio.Event()
            free.set()
            play = self._play(key, engine, decode_request(message.request), free, guest)
            guest.played[key] = Played(self._spawn(message.id, play, self._tasks), free)
            return
        if not engine.pass_on_now(self, key, message.request):
            later = self._pass_later(engine, key, message.request.copy(), guest)
            guest.opening[key] = self._spawn(message.id, later, guest.tasks)
        guest.passed.add(key)

    async def _pass_later(self, engine: WorkerEngine, key: int, request: msgspec.Raw, guest: Guest) -> None:
        try:
            await engine.pass_on(self, key, request)
        except Exception as error:  # noqa: BLE001 (told to the front end, and to the log)
            self._fail(key, _failure(error))
        guest.opening.pop(key, None)

    async def _play(
        self, key: int, engine: Engine, request: GenerationRequest, free: asyncio.Event, guest: Guest
    ) -> None:
        failure = None
        # The task is this request's alone, as it would be where it came in.
        loop_guard.arrive(guest.via)
        try:
            async with aclosing(run(engine, request)) as stream:
                async for events in stream:
                    self.put(pack(Progress(key, tuple(events))))
                    if not free.is_set():
                        await free.wait()
        except Exception as error:  # noqa: BLE001 (told to the front end, and to the log)
            failure = _failure(error)
        self._fail(key, failure)
        guest.played.pop(key, None)

    def _fail(self, key: int, failure: Failure | None) -> None:
        self.put(pack(Progress(key, ended=True, failure=failure)))

    def _cancel(self, message: Cancel) -> None:
        guest = self._guests.get(message.id)
        if guest is not None:
            guest.let_go(message.key, ended=False)

    def _hold(self, message: Hold) -> None:
        """Only what is made in this process can wait for its reader."""
        guest = self._guests.get(message.id)
        played = None if guest is None else guest.played.get(message.key)
        if played is not None and message.held:
            played.free.clear()
        elif played is not None:
            played.free.set()

    def _another(self, message: Another) -> None:
        guest = self._guests.get(message.id)
        if guest is not None and guest.engagement is not None:
            self._spawn(message.id, self._granted(message.id, guest.engagement), guest.tasks)

    async def _granted(self, request_id: str, engagement: Engagement) -> None:
        await engagement.turns.another()
        self.send(Granted(request_id))

    def _give_back(self, message: GiveBack) -> None:
        guest = self._guests.get(message.id)
        if guest is not None and guest.engagement is not None:
            guest.engagement.turns.give_back()

    def _leave(self, message: Leave) -> None:
        guest = self._guests.get(message.id)
        if guest is None:
            return
        if guest.engagement is not None:
            guest.engagement.note_speed(message.tokens, message.seconds)
        guest.leave(ended=True)

    def _ended(self, message: Ended) -> None:
        record = message.record
        guest = self._guests.pop(record.id, None)
        if guest is not None:
            guest.leave(ended=True)
            if guest.lease is not None:
                guest.lease.settle(record.spent_tokens)
        telemetry = self._app.telemetry
        if message.gaps is not None and record.model is not None:
            telemetry.metrics.of(record.model).gaps.add_all(message.gaps.counts, message.gaps.total)
        telemetry.request(record)

    def _relay(self, message: Relay) -> None:
        self._relays[message.id] = passing = Passing(message)
        passing.task = self._spawn(message.id, self._answer(passing), self._tasks)

    async def _answer(self, passing: Passing) -> None:
        scope = passing.question.scope | {"asgi": {"version": "3.0"}, "server": None, "extensions": {}}
        try:
            await self._app(scope, passing.receive, passing.send)
        finally:
            wanted = self._relays.pop(passing.question.id, None)
        if wanted is not None:
            self.send(passing.answer())

    def _drop(self, message: Drop) -> None:
        passing = self._relays.pop(message.id, None)
        if passing is None or passing.task is None:
            return
        if self._app.is_stopping:
            passing.task.cancel()
        else:
            passing.leave()

    def _find_response(self, message: FindResponse) -> None:
        async def find() -> None:
            self.send(Kept(message.id, await self._app.responses.find(message.principal, message.response)))

        self._spawn(message.id, find(), self._tasks)

    def _find_items(self, message: FindItems) -> None:
        async def find() -> None:
            found = await self._app.responses.items(message.principal, message.items)
            self.send(Kept(message.id, items=dict(found)))

        self._spawn(message.id, find(), self._tasks)

    def _keep(self, message: KeepResponse) -> None:
        async def keep() -> None:
            await self._app.responses.keep(message.response)
            self.send(Kept(message.id))

        self._spawn(message.id, keep(), self._tasks)


HANDLERS: dict[type, Callable[[Desk, Any], None]] = {
    Listening: Desk._listening,
    Adopted: Desk._adopted,
    Here: Desk._here,
    Enter: Desk._enter,
    Engage: Desk._engage,
    PassedGenerate: Desk._generate,
    Cancel: Desk._cancel,
    Hold: Desk._hold,
    Another: Desk._another,
    GiveBack: Desk._give_back,
    Leave: Desk._leave,
    Ended: Desk._ended,
    Relay: Desk._relay,
    Drop: Desk._drop,
    FindResponse: Desk._find_response,
    FindItems: Desk._find_items,
    KeepResponse: Desk._keep,
}


def _failure(error: Exception) -> Failure:
    if not isinstance(error, DragomanError):
        log.error("the engine raised", exc_info=error)
        error = failed(error)
    return Failure.of(error)


def _told(request_id: str, found: Found, engine: Engine, queue_us: int, rates: tuple[Rate, ...]) -> Engaged:
    form = next((info.format for info in engine.models() if info.name == found.model), "plain")
    return Engaged(request_id, found, form, engine.supports() & STAGED, engine.tells_calls, queue_us, rates)


def _for_fronts(settings: Settings) -> Settings:
    """Models are none of a front end's business."""
    return msgspec.structs.replace(settings, models=(), aliases={}, default=None)

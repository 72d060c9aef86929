"""Gives a front end access to the models, quotas, stored responses and telemetry of its parent."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import msgspec

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import DECODE_ERRORS, ENCODE_ERRORS, BadRequest
from dragoman.core.event_queue import EventQueue
from dragoman.core.events import Event
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.request import GenerationRequest
from dragoman.ipc.link import Link
from dragoman.ipc.worker_messages import KEY_BITS, decode_progress, decode_progress_head
from dragoman.ipc.worker_process import UNSENDABLE
from dragoman.server.frontends import messages
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LeaseInfo, LeaseRequest
from dragoman.server.telemetry import RequestRecord
from dragoman.server.telemetry.metrics import Metrics
from dragoman.storage.base import StoredResponse

BACKLOG = 1024
"""Unread events of one generation before its engine is paused."""

Command = (
    messages.StartFrontEnd | messages.ApplyConfig | messages.ShutdownNotice | messages.GracefulStop | messages.ForceStop
)
LeaseAnswer = messages.LeaseQueued | messages.LeaseGranted | messages.ErrorReply
Query = messages.EnterQuota | messages.StoreQuery | messages.Relay


class _Stream:
    """A generation that the parent forwards."""

    __slots__ = ("id", "is_paused", "mailbox")

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.mailbox = EventQueue()
        self.is_paused = False


class ParentConnection:
    """The connection to the parent; `on_command` gets the messages for the front end itself."""

    def __init__(self, on_command: Callable[[Command], None], on_lost: Callable[[], None]) -> None:
        self.link = Link(self._receive, on_lost)
        self._on_command = on_command
        self._listeners: dict[str, Callable[[messages.Answer], None]] = {}
        self._streams: dict[int, _Stream] = {}
        self._keys = itertools.count()

    def set_number(self, number: int) -> None:
        """Set the number of this front end, which makes its keys unique."""
        self._keys = itertools.count(number << KEY_BITS)

    def _receive(self, body: memoryview) -> None:
        message: messages.ToFrontEnd | messages.RawProgressBatch
        try:
            message = messages.decode_to_frontend(body)
        except DECODE_ERRORS as error:
            message = messages.decode_in_parts(body, error)
        if isinstance(message, messages.ProgressBatch):
            self._deliver(message)
        elif isinstance(message, messages.RawProgressBatch):
            self._deliver_parts(message.progress)
        elif isinstance(message, Command):
            self._on_command(message)
        elif isinstance(message, messages.Ping):
            self.send(messages.Pong())
        else:
            listener = self._listeners.get(message.id)
            if listener is not None:
                listener(message)

    def _deliver(self, step: messages.ProgressBatch) -> None:
        streams = self._streams
        for progress in step.progress:
            stream = streams.get(progress.id)
            if stream is None:
                continue
            mailbox = stream.mailbox
            mailbox.put(progress.events)
            if progress.ended:
                del streams[progress.id]
                if progress.failure is None:
                    mailbox.end()
                else:
                    mailbox.fail(progress.failure.error())
            elif len(mailbox) > BACKLOG and not stream.is_paused:
                stream.is_paused = True
                self.send(messages.Pause(stream.id, progress.id, is_paused=True))

    def _deliver_parts(self, parts: Iterable[msgspec.Raw]) -> None:
        """Deliver a step that cannot be decoded as a whole; an invalid part fails its own generation."""
        for part in parts:
            head = decode_progress_head(part)
            stream = self._streams.get(head.id)
            if stream is None:
                continue
            progress = decode_progress(part)
            self._deliver(messages.ProgressBatch((progress,)))
            if progress.ended and not head.ended:
                self.send(messages.CancelGeneration(stream.id, head.id))

    def send(self, message: messages.ToParent | messages.StartGeneration) -> None:
        try:
            encoded = messages.encode(message)
        except ENCODE_ERRORS as error:
            raise BadRequest(UNSENDABLE) from error
        self.link.send(encoded)

    def add_listener(self, request_id: str, listener: Callable[[messages.Answer], None]) -> None:
        self._listeners[request_id] = listener

    def remove_listener(self, request_id: str) -> None:
        self._listeners.pop(request_id, None)

    async def ask(self, query: Query) -> messages.Answer:
        """Send a query and return its answer; a request has one query at a time."""
        answer: asyncio.Future[messages.Answer] = asyncio.get_running_loop().create_future()
        self.add_listener(query.id, lambda message: None if answer.done() else answer.set_result(message))
        try:
            self.send(query)
            return await answer
        finally:
            self.remove_listener(query.id)

    async def generate(self, request_id: str, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        key = next(self._keys)
        self.send(messages.StartGeneration(request_id, key, request))
        self._streams[key] = stream = _Stream(request_id)
        try:
            while events := await stream.mailbox.take():
                if stream.is_paused:
                    stream.is_paused = False
                    self.send(messages.Pause(request_id, key, is_paused=False))
                yield events
        finally:
            if self._streams.pop(key, None) is not None:
                self.send(messages.CancelGeneration(request_id, key))


class RemoteQuotaLease:
    """A lease on a quota of the parent, which settles it at the end of the request."""

    def __init__(self) -> None:
        self.known: Sequence[RateLimitState] = ()

    def rates(self) -> list[RateLimitState]:
        return list(self.known)

    def settle(self, tokens: int) -> None:
        """The parent settles it from the request record."""

    async def enter(self, parent: ParentConnection, exchange: HttpExchange) -> None:
        headers = exchange.headers
        credentials = (headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
        answer = await parent.ask(messages.EnterQuota(exchange.record.id, *credentials))
        assert isinstance(answer, messages.QuotaEntered | messages.ErrorReply)
        self.known = answer.rates
        if isinstance(answer, messages.ErrorReply):
            raise answer.error()


class RemoteEngine(Engine):
    """The parent's engine, for one request."""

    emits_events = True

    def __init__(self, parent: ParentConnection, granted: messages.LeaseGranted) -> None:
        self._parent = parent
        self._id = granted.id
        self._info = ModelInfo(granted.found.model, format=granted.format)
        self._staged = granted.staged
        self.emits_tool_calls = granted.emits_tool_calls

    def models(self) -> Sequence[ModelInfo]:
        return [self._info]

    def supports(self) -> frozenset[str]:
        """The features that the pipeline needs to know."""
        return self._staged

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        return self._parent.generate(self._id, request)


class RemoteModelLease:
    """A lease on a model of the parent; it also acquires and releases the slots of further choices."""

    def __init__(self, parent: ParentConnection, exchange: HttpExchange) -> None:
        self.label: str | None = None
        self.fallbacks: tuple[str, ...] = ()
        self.queue_us = 0
        self._parent = parent
        self._exchange = exchange
        self._id = exchange.record.id
        loop = asyncio.get_running_loop()
        self._found: asyncio.Future[LeaseAnswer] = loop.create_future()
        self._started: asyncio.Future[messages.LeaseGranted | messages.ErrorReply] = loop.create_future()
        self._pending_slots: deque[asyncio.Future[None]] = deque()
        self._is_open = False
        self._speed = (0, 0.0)

    async def find(self, wish: LeaseRequest) -> LeaseInfo:
        caller = self._exchange.caller
        self._parent.add_listener(self._id, self._receive)
        self._is_open = True
        via = self._exchange.headers.get(loop_guard.HEADER_BYTES)
        self._parent.send(messages.AcquireLease(self._id, caller.principal, caller.models, wish, caller.within, via))
        answer = await self._found
        if isinstance(answer, messages.ErrorReply):
            self.label, self.fallbacks = answer.label, answer.fallbacks
            raise answer.error()
        self.label, self.fallbacks = answer.found.label, answer.found.fallbacks
        return answer.found

    async def start(self) -> Engine:
        answer = await self._started
        if isinstance(answer, messages.ErrorReply):
            raise answer.error()
        self.queue_us = answer.queue_us
        return RemoteEngine(self._parent, answer)

    def _receive(self, message: messages.Answer) -> None:
        if isinstance(message, messages.SlotGranted):
            if self._pending_slots:
                slot = self._pending_slots.popleft()
                if not slot.done():
                    slot.set_result(None)
            return
        assert isinstance(message, LeaseAnswer)
        if isinstance(message, messages.ErrorReply):
            self._fail_pending_slots(message)
        lease = self._exchange.quota_lease
        if isinstance(lease, RemoteQuotaLease) and message.rates:
            lease.known = message.rates
        if not self._found.done():
            self._found.set_result(message)
        if not isinstance(message, messages.LeaseQueued) and not self._started.done():
            self._started.set_result(message)

    def _fail_pending_slots(self, message: messages.ErrorReply) -> None:
        while self._pending_slots:
            slot = self._pending_slots.popleft()
            if not slot.done():
                slot.set_exception(message.error())

    @property
    def turns(self) -> "RemoteModelLease":
        return self

    async def acquire(self) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_slots.append(slot)
        self._parent.send(messages.AcquireSlot(self._id))
        await slot

    def release(self) -> None:
        self._parent.send(messages.ReleaseSlot(self._id))

    def note_speed(self, tokens: int, seconds: float) -> None:
        self._speed = (tokens, seconds)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._parent.remove_listener(self._id)
            self._parent.send(messages.ReleaseLease(self._id, *self._speed))
            # Flushed before the reply ends: a client that retries at once, on another front end, gets the slot.
            self._parent.link.flush()


class RemoteResponses:
    """The parent's stored responses; front ends neither delete nor list them."""

    def __init__(self, parent: ParentConnection) -> None:
        self._parent = parent
        self._numbers = itertools.count()

    async def keep(self, response: StoredResponse) -> None:
        await self._ask(lambda key: messages.StoreResponse(key, response))

    async def find(self, principal: str, response_id: str) -> StoredResponse | None:
        return (await self._ask(lambda key: messages.FindResponse(key, principal, response_id))).response

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        item_ids = tuple(ids)
        return (await self._ask(lambda key: messages.FindItems(key, principal, item_ids))).items if item_ids else {}

    async def _ask(self, query: Callable[[str], messages.StoreQuery]) -> messages.StoreReply:
        answer = await self._parent.ask(query(f"store-{next(self._numbers)}"))
        if isinstance(answer, messages.ErrorReply):
            raise answer.error()
        assert isinstance(answer, messages.StoreReply)
        return answer


class RemoteTelemetry:
    """The telemetry of a front end: sends everything to the parent."""

    def __init__(self, parent: ParentConnection, settings: Settings) -> None:
        self.metrics = Metrics()
        self.is_tracing = settings.telemetry.traces is not None
        self._parent = parent

    def request(self, record: RequestRecord) -> None:
        gaps = None
        if record.model is not None:
            counted = self.metrics.for_model(record.model).gaps.pop_counts()
            gaps = None if counted is None else messages.TokenGaps(*counted)
        self._parent.send(messages.RequestEnded(record, gaps))


async def relay_request(parent: ParentConnection, message: messages.Relay) -> messages.RelayReply:
    answer = await parent.ask(message)
    if isinstance(answer, messages.ErrorReply):
        raise answer.error()
    assert isinstance(answer, messages.RelayReply)
    return answer

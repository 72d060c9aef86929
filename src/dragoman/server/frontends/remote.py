"""Gives a front end access to the models, quotas, stored responses, files, batches and telemetry of its parent."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.events import Listener
from dragoman.core.reply import RateLimitState
from dragoman.core.request import GenerationRequest
from dragoman.ipc.engine_client import EngineClient, ProxyEngine, RemoteStream, encode_request, make_method_call
from dragoman.ipc.framing import MessageConnection
from dragoman.ipc.messages import Call, EngineInfo, MethodCall, PackedStep, Ping, Pong, decode_packed_step
from dragoman.protocols.batches import Api
from dragoman.server.background import BackgroundRequest
from dragoman.server.frontends import messages
from dragoman.server.frontends.messages import LeaseReply
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LeaseInfo, LeaseRequest, ModelLease
from dragoman.server.telemetry.metrics import Metrics, RequestRecord
from dragoman.storage.batch_states import StoredBatch
from dragoman.storage.batches import NewBatch
from dragoman.storage.files import NewFile, StoredFile
from dragoman.storage.response_values import (
    EarlyEnd,
    EndedResponse,
    EventPage,
    Recording,
    ResponseItems,
    StoredItem,
    StoredResponse,
)

T = TypeVar("T")


class ParentConnection(EngineClient):
    """The connection to the parent; `on_command` gets the messages for the front end itself."""

    def __init__(
        self, number: int, on_command: Callable[[messages.Command], None], on_lost: Callable[[], None]
    ) -> None:
        super().__init__(number)
        self.link = MessageConnection(self._receive, on_lost)
        self._on_command = on_command

    def _receive(self, body: memoryview) -> None:
        message: messages.ToFrontEnd | PackedStep
        try:
            message = messages.decode_to_frontend(body)
        except DECODE_ERRORS:
            message = decode_packed_step(body)
        if isinstance(message, messages.Command):
            self._on_command(message)
        elif isinstance(message, Ping):
            self.send(Pong())
        else:
            self.receive(message)

    def send(self, message: msgspec.Struct) -> None:
        self.link.send(encode_request(message))

    def send_call(self, call: Call, owner: str) -> None:
        self.send(messages.RequestCall(owner, call))

    def pause(self, key: int, stream: RemoteStream, is_paused: bool) -> None:
        self.send(messages.Pause(stream.owner, key, is_paused))


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
        reply = await parent.call_method(make_method_call("enter_quota", *credentials), LeaseReply, exchange.record.id)
        self.known = reply.rates
        if reply.failure is not None:
            raise reply.failure.error()


class RemoteEngine(ProxyEngine):
    """The parent's engine, for one request. `supports` has only the features that the pipeline needs to know."""

    def __init__(self, parent: ParentConnection, request_id: str, info: EngineInfo) -> None:
        super().__init__(info)
        self._parent = parent
        self._id = request_id

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        await self._parent.deliver(request, listener, self._id)

    async def call_method(self, method_call: MethodCall, value_type: type[T]) -> T:
        return await self._parent.call_method(method_call, value_type, self._id)


class RemoteModelLease(ModelLease):
    """A lease on a model of the parent; it also acquires and releases the slots of further choices."""

    def __init__(self, parent: ParentConnection, exchange: HttpExchange) -> None:
        self._parent = parent
        self._exchange = exchange
        self._id = exchange.record.id
        self._engine: EngineInfo | None = None
        self._is_open = False
        self._speed = (0, 0.0)

    async def find(self, request: LeaseRequest) -> LeaseInfo:
        caller = self._exchange.caller
        self._is_open = True
        via = self._exchange.headers.get(loop_guard.HEADER_BYTES)
        asked = messages.AcquireLease(
            *(caller.principal, caller.models, request, caller.configured_models, via, caller.key, caller.budgets)
        )
        found = (await self._call_parent(make_method_call("acquire_lease", asked))).found
        assert found is not None
        return found

    async def start(self) -> RemoteEngine:
        if self._engine is None:
            await self._call_parent(make_method_call("start_lease"))
        assert self._engine is not None
        return RemoteEngine(self._parent, self._id, self._engine)

    async def load(self) -> None:
        await self._call_parent(make_method_call("load_model"))

    async def _call_parent(self, method_call: MethodCall) -> LeaseReply:
        reply = await self._parent.call_method(method_call, LeaseReply, self._id)
        self.label, self.fallbacks, self.queue_us = reply.label, reply.fallbacks, reply.queue_us
        self.budget_warning = reply.budget_warning
        self._engine = reply.engine
        lease = self._exchange.response.quota_lease
        if isinstance(lease, RemoteQuotaLease) and reply.rates:
            lease.known = reply.rates
        if reply.failure is not None:
            raise reply.failure.error()
        return reply

    @property
    def slots(self) -> "RemoteModelLease":
        return self

    async def acquire(self) -> None:
        await self._parent.call_method(make_method_call("acquire_slot"), type(None), self._id)

    def release(self) -> None:
        self._parent.send(messages.ReleaseSlot(self._id))

    def note_speed(self, tokens: int, seconds: float) -> None:
        self._speed = (tokens, seconds)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._parent.send(messages.ReleaseLease(self._id, *self._speed))
            # Flushed before the reply ends: a client that retries at once, on another front end, gets the slot.
            self._parent.link.flush()


class RemoteResponses:
    """The parent's stored responses; front ends neither delete nor list them."""

    def __init__(self, parent: ParentConnection) -> None:
        self._parent = parent

    async def _call(self, value_type: Any, method: str, *arguments: object) -> Any:
        return await self._parent.call_method(make_method_call(method, *arguments), value_type)

    async def check(self, principal: str) -> None:
        await self._call(type(None), "check_responses", principal)

    async def keep(self, ended: EndedResponse) -> bool:
        return bool(await self._call(bool, "keep_response", ended))

    async def record(self, recording: Recording) -> bool:
        return bool(await self._call(bool, "record_response", recording))

    async def end_early(self, response_id: str, status: EarlyEnd, code: str, message: str) -> None:
        await self._call(type(None), "end_response_early", response_id, status, code, message)

    async def find(self, principal: str, response_id: str) -> StoredResponse | None:
        found: StoredResponse | None
        found = await self._call(StoredResponse | None, "find_response", principal, response_id)
        return found

    async def find_items(self, principal: str, response_id: str) -> ResponseItems | None:
        found: ResponseItems | None
        found = await self._call(ResponseItems | None, "find_response_items", principal, response_id)
        return found

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        item_ids = tuple(ids)
        found: dict[str, bytes]
        found = await self._call(dict[str, bytes], "find_items", principal, item_ids) if item_ids else {}
        return found

    async def read_events(self, principal: str, response_id: str, after: int) -> EventPage | None:
        page: EventPage | None
        page = await self._call(EventPage | None, "read_response_events", principal, response_id, after)
        return page

    async def conversation_items(self, principal: str, conversation_id: str) -> tuple[StoredItem, ...] | None:
        items: tuple[StoredItem, ...] | None
        items = await self._call(tuple[StoredItem, ...] | None, "conversation_items", principal, conversation_id)
        return items


class RemoteBackground:
    """The parent's background responses."""

    def __init__(self, parent: ParentConnection) -> None:
        self._parent = parent

    async def start(self, queued: StoredResponse, request: BackgroundRequest, frames: bytes) -> None:
        method_call = make_method_call("start_background", queued, request, frames)
        await self._parent.call_method(method_call, type(None))


class RemoteFiles:
    """The parent's stored files. Their contents are in a directory that the front ends use themselves."""

    def __init__(self, parent: ParentConnection) -> None:
        self._parent = parent

    async def add(self, new: NewFile) -> StoredFile:
        return await self._parent.call_method(make_method_call("add_file", new), StoredFile)

    async def find(self, principal: str, file_id: str) -> StoredFile | None:
        method_call = make_method_call("find_file", principal, file_id)
        found: StoredFile | None = await self._parent.call_method(method_call, StoredFile | None)  # type: ignore[arg-type]
        return found


class RemoteBatches:
    """The parent's batches, as far as front ends answer requests about them."""

    def __init__(self, parent: ParentConnection) -> None:
        self._parent = parent

    async def add(self, batch: NewBatch) -> StoredBatch:
        return await self._parent.call_method(make_method_call("add_batch", batch), StoredBatch)

    async def find(self, principal: str, api: Api, batch_id: str) -> StoredBatch | None:
        method_call = make_method_call("find_batch", principal, api, batch_id)
        found: StoredBatch | None = await self._parent.call_method(method_call, StoredBatch | None)  # type: ignore[arg-type]
        return found


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

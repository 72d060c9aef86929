"""What the parent has, as a front end sees it: models, quotas, kept responses, telemetry."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

import msgspec

from dragoman.config.settings import Settings
from dragoman.core import loop_guard
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import DECODE_ERRORS, BadRequest
from dragoman.core.event_queue import Mailbox
from dragoman.core.events import Event
from dragoman.core.rate_limits import Rate
from dragoman.core.request import GenerationRequest
from dragoman.ipc.link import Link
from dragoman.ipc.worker_messages import KEY_BITS, head_of, readable
from dragoman.ipc.worker_process import UNSENDABLE
from dragoman.server.frontends.messages import (
    Adopted,
    Another,
    Answer,
    Begin,
    Cancel,
    Configured,
    Ended,
    Engage,
    Engaged,
    Enter,
    Entered,
    FindItems,
    FindResponse,
    Gaps,
    Generate,
    GiveBack,
    Granted,
    Here,
    Hold,
    Hurry,
    KeepResponse,
    Kept,
    Knock,
    Leave,
    Listening,
    PassedStep,
    Question,
    Refused,
    Relay,
    Relayed,
    Step,
    Stop,
    Stopping,
    ToFront,
    ToParent,
    Waiting,
    decode_in_parts,
    decode_to_front,
    encode,
)
from dragoman.server.http_exchange import Exchange
from dragoman.server.model_lease import Found, Wish
from dragoman.server.telemetry import RequestRecord
from dragoman.server.telemetry.metrics import Metrics
from dragoman.storage.base import KeptResponse

BACKLOG = 1024
"""Events of one generation that may wait for their reader before its engine is asked to wait too."""

Command = Begin | Configured | Stopping | Stop | Hurry
Asking = Enter | Question | Relay


class _Stream:
    """A generation that the parent passes on."""

    __slots__ = ("held", "id", "mailbox")

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.mailbox = Mailbox()
        self.held = False


class Parent:
    """`command` is told what the parent wants of the front end itself."""

    def __init__(self, command: Callable[[Command], None], lost: Callable[[], None]) -> None:
        self.link = Link(self._take, lost)
        self._command = command
        self._hearers: dict[str, Callable[[Answer], None]] = {}
        self._streams: dict[int, _Stream] = {}
        self._keys = itertools.count()

    def number(self, number: int) -> None:
        """What this front end has in its keys, and no other has ever had."""
        self._keys = itertools.count(number << KEY_BITS)

    def _take(self, body: memoryview) -> None:
        message: ToFront | PassedStep
        try:
            message = decode_to_front(body)
        except DECODE_ERRORS as error:
            message = decode_in_parts(body, error)
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, PassedStep):
            self._deliver_parts(message.progress)
        elif isinstance(message, Command):
            self._command(message)
        elif isinstance(message, Knock):
            self.send(Here())
        else:
            hearer = self._hearers.get(message.id)
            if hearer is not None:
                hearer(message)

    def _deliver(self, step: Step) -> None:
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
            elif len(mailbox) > BACKLOG and not stream.held:
                stream.held = True
                self.send(Hold(stream.id, progress.id, held=True))

    def _deliver_parts(self, parts: Iterable[msgspec.Raw]) -> None:
        """Of a step that cannot be read as a whole: what is wrong is the trouble of its own generation."""
        for part in parts:
            head = head_of(part)
            stream = self._streams.get(head.id)
            if stream is None:
                continue
            progress = readable(part)
            self._deliver(Step((progress,)))
            if progress.ended and not head.ended:
                self.send(Cancel(stream.id, head.id))

    def send(self, message: ToParent | Generate) -> None:
        try:
            encoded = encode(message)
        except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BadRequest(UNSENDABLE) from error
        self.link.send(encoded)

    def hear(self, request_id: str, hearer: Callable[[Answer], None]) -> None:
        self._hearers[request_id] = hearer

    def forget(self, request_id: str) -> None:
        self._hearers.pop(request_id, None)

    async def ask(self, question: Asking) -> Answer:
        """One question, one answer; a request asks one at a time."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.hear(question.id, lambda message: None if answer.done() else answer.set_result(message))
        try:
            self.send(question)
            return await answer
        finally:
            self.forget(question.id)

    async def generate(self, request_id: str, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        key = next(self._keys)
        self.send(Generate(request_id, key, request))
        self._streams[key] = stream = _Stream(request_id)
        try:
            while events := await stream.mailbox.take():
                if stream.held:
                    stream.held = False
                    self.send(Hold(request_id, key, held=False))
                yield events
        finally:
            if self._streams.pop(key, None) is not None:
                self.send(Cancel(request_id, key))

    def tell_listening(self) -> None:
        self.send(Listening())

    def tell_adopted(self) -> None:
        self.send(Adopted())


class RemoteLease:
    """Of a quota of the parent's, which settles it when it hears of the request's end."""

    def __init__(self) -> None:
        self.known: Sequence[Rate] = ()

    def rates(self) -> list[Rate]:
        return list(self.known)

    def settle(self, tokens: int) -> None:
        """By the record, and not here."""

    async def enter(self, parent: Parent, exchange: Exchange) -> None:
        headers = exchange.headers
        given = (headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
        answer = await parent.ask(Enter(exchange.record.id, *given))
        assert isinstance(answer, Entered | Refused)
        self.known = answer.rates
        if isinstance(answer, Refused):
            raise answer.error()


class RemoteEngine(Engine):
    """The parent's engine, for one request."""

    streams_events = True

    def __init__(self, parent: Parent, engaged: Engaged) -> None:
        self._parent = parent
        self._id = engaged.id
        self._info = ModelInfo(engaged.found.model, format=engaged.format)
        self._staged = engaged.staged
        self.tells_calls = engaged.tells_calls

    def models(self) -> Sequence[ModelInfo]:
        return [self._info]

    def supports(self) -> frozenset[str]:
        """As far as the stages want to know."""
        return self._staged

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        return self._parent.generate(self._id, request)


class RemoteEngagement:
    """A hold on one of the parent's models; its own slots are the `Turns` of further choices."""

    def __init__(self, parent: Parent, exchange: Exchange) -> None:
        self.label: str | None = None
        self.fallbacks: tuple[str, ...] = ()
        self.queue_us = 0
        self._parent = parent
        self._exchange = exchange
        self._id = exchange.record.id
        loop = asyncio.get_running_loop()
        self._found: asyncio.Future[Waiting | Engaged | Refused] = loop.create_future()
        self._started: asyncio.Future[Engaged | Refused] = loop.create_future()
        self._grants: deque[asyncio.Future[None]] = deque()
        self._is_open = False
        self._speed = (0, 0.0)

    async def find(self, wish: Wish) -> Found:
        caller = self._exchange.caller
        self._parent.hear(self._id, self._hear)
        self._is_open = True
        via = self._exchange.headers.get(loop_guard.HEADER_BYTES)
        self._parent.send(Engage(self._id, caller.principal, caller.models, wish, caller.within, via))
        answer = await self._found
        if isinstance(answer, Refused):
            self.label, self.fallbacks = answer.label, answer.fallbacks
            raise answer.error()
        self.label, self.fallbacks = answer.found.label, answer.found.fallbacks
        return answer.found

    async def start(self) -> Engine:
        answer = await self._started
        if isinstance(answer, Refused):
            raise answer.error()
        self.queue_us = answer.queue_us
        return RemoteEngine(self._parent, answer)

    def _hear(self, message: Answer) -> None:
        if isinstance(message, Granted):
            if self._grants:
                grant = self._grants.popleft()
                if not grant.done():
                    grant.set_result(None)
            return
        assert isinstance(message, Waiting | Engaged | Refused)
        if isinstance(message, Refused):
            self._refuse_grants(message)
        lease = self._exchange.lease
        if isinstance(lease, RemoteLease) and message.rates:
            lease.known = message.rates
        if not self._found.done():
            self._found.set_result(message)
        if not isinstance(message, Waiting) and not self._started.done():
            self._started.set_result(message)

    def _refuse_grants(self, message: Refused) -> None:
        while self._grants:
            grant = self._grants.popleft()
            if not grant.done():
                grant.set_exception(message.error())

    @property
    def turns(self) -> "RemoteEngagement":
        return self

    async def another(self) -> None:
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._grants.append(grant)
        self._parent.send(Another(self._id))
        await grant

    def give_back(self) -> None:
        self._parent.send(GiveBack(self._id))

    def note_speed(self, tokens: int, seconds: float) -> None:
        self._speed = (tokens, seconds)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._parent.forget(self._id)
            self._parent.send(Leave(self._id, *self._speed))
            # Before the caller hears of the end: who asks again at once, by another front end, finds the slot free.
            self._parent.link.flush()


class RemoteResponses:
    """What the parent keeps. Nothing is deleted or shown by a front end."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._numbers = itertools.count()

    async def keep(self, response: KeptResponse) -> None:
        await self._ask(lambda key: KeepResponse(key, response))

    async def find(self, principal: str, response_id: str) -> KeptResponse | None:
        return (await self._ask(lambda key: FindResponse(key, principal, response_id))).response

    async def items(self, principal: str, ids: Iterable[str]) -> Mapping[str, bytes]:
        wanted = tuple(ids)
        return (await self._ask(lambda key: FindItems(key, principal, wanted))).items if wanted else {}

    async def _ask(self, question: Callable[[str], Question]) -> Kept:
        answer = await self._parent.ask(question(f"kept-{next(self._numbers)}"))
        if isinstance(answer, Refused):
            raise answer.error()
        assert isinstance(answer, Kept)
        return answer


class Reporting:
    """The telemetry of a front end: everything goes to the parent."""

    def __init__(self, parent: Parent, settings: Settings) -> None:
        self.metrics = Metrics()
        self.is_tracing = settings.telemetry.traces is not None
        self._parent = parent

    def request(self, record: RequestRecord) -> None:
        gaps = None
        if record.model is not None:
            counted = self.metrics.of(record.model).gaps.taken()
            gaps = None if counted is None else Gaps(*counted)
        self._parent.send(Ended(record, gaps))


async def relayed(parent: Parent, question: Relay) -> Relayed:
    answer = await parent.ask(question)
    if isinstance(answer, Refused):
        raise answer.error()
    assert isinstance(answer, Relayed)
    return answer

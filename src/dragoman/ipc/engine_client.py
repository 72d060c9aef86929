"""Sends requests to an engine in another process and delivers what comes back.

Rules
1. The events of a generation go to its listener, without waking a task for each of them.
2. Output that cannot be decoded fails its own request, and the generation is cancelled.
3. A request that cannot be encoded is the client's mistake.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec

from dragoman.core.delivery import EventQueue
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, PutProgress, RenderedPrompt
from dragoman.core.errors import DECODE_ERRORS, ENCODE_ERRORS, BadRequest, EngineDied
from dragoman.core.events import Event, Listener
from dragoman.core.request import GenerationRequest
from dragoman.ipc import messages
from dragoman.ipc.framing import MessageConnection, encode
from dragoman.ipc.messages import (
    Cancel,
    EngineInfo,
    Failure,
    GenerationProgress,
    MethodCall,
    MethodResult,
    PackedStep,
    Step,
)

log = logging.getLogger("dragoman.ipc")
T = TypeVar("T")

WorkerRequest = GenerationRequest | msgspec.Raw | MethodCall
"""A request to a worker; `Raw` is an encoded GenerationRequest."""
LoadReply = EngineInfo | messages.StartFailed
"""The first message of a worker."""
BACKLOG = 1024
"""Unread events of one generation before its engine is paused."""
UNSENDABLE = "the request cannot be passed to the engine: it has an integer of more than 64 bits or a lone surrogate"


def encode_request(message: msgspec.Struct) -> bytes:
    try:
        return encode(message)
    except ENCODE_ERRORS as error:
        raise BadRequest(UNSENDABLE) from error


def make_method_call(method: str, *arguments: object) -> MethodCall:
    try:
        return MethodCall(0, method, messages.pack(arguments))
    except ENCODE_ERRORS as error:
        raise BadRequest(UNSENDABLE) from error


class RemoteStream(EventQueue):
    """The events of a generation in another process; `owner` is the request that it belongs to."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.is_paused = False


class EngineClient:
    """The calls of this process to engines in another one. `number` makes their keys unique."""

    def __init__(self, number: int = 0) -> None:
        self._keys = itertools.count(number << messages.KEY_BITS)
        self._streams: dict[int, RemoteStream] = {}
        self._results: dict[int, asyncio.Future[MethodResult]] = {}

    def send_call(self, call: messages.Call, owner: str) -> None:
        raise NotImplementedError

    def pause(self, key: int, stream: RemoteStream, is_paused: bool) -> None:
        """Pause or resume a generation whose reader lags behind."""

    def forget(self, key: int) -> None:
        """Called when a call has ended."""

    async def deliver(self, request: GenerationRequest, listener: Listener, owner: str = "") -> None:
        """Run a generation and pass its events to the listener."""
        key, stream = next(self._keys), RemoteStream(owner)

        def listen(events: Sequence[Event]) -> Awaitable[None] | None:
            if stream.is_paused:
                stream.is_paused = False
                self.pause(key, stream, is_paused=False)
            return listener(events)

        self.send_call(messages.Generate(key, request), owner)
        self._streams[key] = stream
        try:
            await stream.deliver(listen)
        finally:
            if self._streams.pop(key, None) is not None:
                self.send_call(Cancel(key), owner)

    async def call_method(self, method_call: MethodCall, value_type: type[T], owner: str = "") -> T:
        key = next(self._keys)
        result: asyncio.Future[MethodResult] = asyncio.get_running_loop().create_future()
        self._results[key] = result
        try:
            self.send_call(MethodCall(key, method_call.method, method_call.arguments), owner)
            return (await result).decode(value_type)
        except asyncio.CancelledError:
            self.send_call(Cancel(key), owner)
            raise
        finally:
            del self._results[key]
            self.forget(key)

    def receive(self, message: Step | PackedStep | MethodResult) -> None:
        if isinstance(message, Step):
            for progress in message.progress:
                self._put(progress)
        elif isinstance(message, PackedStep):
            for part in message.progress:
                self.put_part(messages.decode_progress_head(part), part)
        else:
            result = self._results.get(message.key)
            if result is not None and not result.done():
                result.set_result(message)

    def fail_all(self, failure: Failure) -> None:
        for stream in self._streams.values():
            stream.fail(failure.error())
        self._streams.clear()
        for result in self._results.values():
            if not result.done():
                result.set_exception(failure.error())

    def put_part(self, head: messages.ProgressHead, part: msgspec.Raw) -> None:
        if head.ended:
            self.forget(head.key)
        if head.key in self._streams:
            owner, progress = self._streams[head.key].owner, messages.decode_progress(part)
            self._put(progress)
            if progress.ended and not head.ended:
                self.send_call(Cancel(head.key), owner)

    def _put(self, progress: GenerationProgress) -> None:
        if progress.ended:
            self.forget(progress.key)
        stream = self._streams.get(progress.key)
        if stream is None:
            return
        stream.put(progress.events)
        if progress.ended:
            del self._streams[progress.key]
            if progress.failure is None:
                stream.end()
            else:
                stream.fail(progress.failure.error())
        elif len(stream) > BACKLOG and not stream.is_paused:
            stream.is_paused = True
            self.pause(progress.key, stream, is_paused=True)


class WorkerConnection(EngineClient):
    """The connection to one worker. `engine` shows its progress and the use of its KV cache."""

    def __init__(self, name: str, engine: Engine) -> None:
        super().__init__(messages.OWN_NUMBER)
        self.link = MessageConnection(self._receive, self._note_end)
        self.ended = asyncio.Event()
        self.loaded: asyncio.Future[LoadReply | None] = asyncio.get_running_loop().create_future()
        self.unfinished: dict[int, WorkerRequest] = {}
        """Requests whose end the worker has not reported, even if their reader has gone."""
        self.exit_error = Failure.of(EngineDied("the engine's process died; send the request again"))
        self.silent_seconds = 0.0
        self._name = name
        self._engine = engine
        self._forwarded: dict[int, PutProgress] = {}
        """Generations of other processes, each until its end or until `stop_forwarding`."""
        self._is_dead = False

    def send_call(self, call: messages.Call | messages.RawGenerate, owner: str = "") -> None:
        encoded = encode_request(call)
        if self._is_dead and not isinstance(call, Cancel):
            raise self.exit_error.error()
        if isinstance(call, messages.Generate | messages.RawGenerate):
            self.unfinished[call.key] = call.request
        elif not isinstance(call, Cancel):
            self.unfinished[call.key] = call
        self.link.send(encoded)

    def forget(self, key: int) -> None:
        self.unfinished.pop(key, None)

    def forward(self, put: PutProgress, call: messages.RawGenerate) -> None:
        self.send_call(call)
        self._forwarded[call.key] = put

    def stop_forwarding(self, key: int) -> None:
        if self._forwarded.pop(key, None) is not None:
            self.send_call(Cancel(key))

    def _receive(self, body: memoryview) -> None:
        self.silent_seconds = 0.0
        try:
            self._handle(self._decode(body))
        except Exception:
            # Without its messages the worker is useless, so it is replaced.
            log.exception("model %s: a message of the engine's process could not be delivered", self._name)
            self.link.close()

    def _decode(self, body: memoryview) -> object:
        try:
            return messages.decode_to_forwarder(body) if self._forwarded else messages.decode_to_parent(body)
        except DECODE_ERRORS:
            return messages.decode_packed_step(body)

    def _handle(self, message: object) -> None:
        if isinstance(message, Step | PackedStep):
            self.receive(message)
            self._engine.kv_used = message.kv_used
        elif isinstance(message, MethodResult):
            self.receive(message)
        elif isinstance(message, messages.Loading):
            self._engine.progress = message.progress
        elif isinstance(message, LoadReply) and not self.loaded.done():
            self.loaded.set_result(message)

    def put_part(self, head: messages.ProgressHead, part: msgspec.Raw) -> None:
        put = self._forwarded.get(head.key)
        if put is None:
            super().put_part(head, part)
            return
        put(part)
        if head.ended:
            del self._forwarded[head.key]
            self.forget(head.key)

    def _note_end(self) -> None:
        self.ended.set()
        if not self.loaded.done():
            self.loaded.set_result(None)

    def fail_pending(self) -> None:
        """Fail every pending request with `exit_error`."""
        self._is_dead = True
        for key, put in self._forwarded.items():
            put(messages.pack(GenerationProgress(key, ended=True, failure=self.exit_error)))
        self._forwarded.clear()
        self.fail_all(self.exit_error)


class ProxyEngine(Engine):
    """An engine in another process. Subclasses implement `deliver` and `call_method`."""

    def __init__(self, info: EngineInfo) -> None:
        self.describe(info)

    def describe(self, info: EngineInfo) -> None:
        self._info = info
        self.device, self.slots, self.emits_tool_calls = info.device, info.slots, info.emits_tool_calls
        self.reads_fields, self.reads_headers = info.reads_fields, info.reads_headers

    def models(self) -> Sequence[ModelInfo]:
        return self._info.models

    def supports(self) -> frozenset[str]:
        return self._info.supports

    async def call_method(self, method_call: MethodCall, value_type: type[T]) -> T:
        raise NotImplementedError

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        return await self.call_method(make_method_call("render", request), RenderedPrompt)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self.call_method(make_method_call("count_tokens", request), int)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return await self.call_method(make_method_call("tokenize", text, special), tuple[int, ...])

    async def tokenize_text(self, text: str, special: bool) -> Sequence[int]:
        return await self.call_method(make_method_call("tokenize_text", text, special), tuple[int, ...])

    async def token_texts(self, tokens: Sequence[int]) -> Sequence[bytes]:
        return await self.call_method(make_method_call("token_texts", tuple(tokens)), tuple[bytes, ...])

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self.call_method(make_method_call("detokenize", tuple(tokens)), str)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return await self.call_method(make_method_call("embed", tuple(inputs)), tuple[Embedding, ...])

"""The replica that runs a model's engine in Ray Serve, and the proxy engine in the app for the replicas of a model.

Rules
1. If a replica dies before the first output, another one is tried, a few times. Later the caller gets an error: a reply
   never mixes the output of two replicas.
2. Without a free replica a request waits for one; the app's queue limits how many wait.
3. Closing a generation cancels it in the replica.
4. The messages are those of a worker, without framing. Errors travel in them, because Ray would lose their fields.
5. An engine that needs a worker gets one in the replica too, although a replica is a process of its own: the engine may
   then kill its process with all that it started, and it restarts faster than a replica. When the worker is given up,
   the replica reports that it is unhealthy, and Serve replaces it.
"""

import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.core.engine import ModelInfo, list_models, start_engine, stream_events
from dragoman.core.errors import ENCODE_ERRORS, BadRequest, DragomanError, EngineDied, Unavailable, engine_failure
from dragoman.core.events import Event, Listener, Started, notify
from dragoman.core.request import GenerationRequest
from dragoman.engines.upstream.pool import hash_prefixes
from dragoman.formats import get_format
from dragoman.ipc.engine_client import UNSENDABLE, ProxyEngine
from dragoman.ipc.framing import encode_body
from dragoman.ipc.messages import (
    EngineInfo,
    Failure,
    GenerationProgress,
    MethodCall,
    MethodResult,
    decode_request,
    unpack,
)
from dragoman.ipc.worker_main import run_method_call
from dragoman.models import local_engine
from dragoman.models.engine_loader import stop_engine
from dragoman.ray.replica_order import ReplicaCall

log = logging.getLogger("dragoman.ray")
T = TypeVar("T")

MAX_TRIES = 3
"""Includes attempts that failed before a replica was chosen."""
DIED = "the model's replica died; send the request again"
NO_REPLICA = "no replica of this model is available; try again later"


class Replica:
    async def __init__(self, spec: ModelSpec, limits: Limits) -> None:  # type: ignore[misc]
        self._lost_reason: str | None = None
        self._engine = await local_engine(spec, limits, self._note_lost)
        await start_engine(self._engine)
        for info in list_models(self._engine):
            get_format(info.format)

    def _note_lost(self, reason: str) -> None:
        self._lost_reason = reason

    async def check_health(self) -> None:
        """Called by Ray Serve; an exception marks the replica as unhealthy."""
        if self._lost_reason is not None:
            raise RuntimeError(self._lost_reason)

    async def describe(self, call: ReplicaCall) -> bytes:
        return encode_body(EngineInfo.of(self._engine))

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(stream_events(self._engine, decode_request(call.body))) as stream:
                async for events in stream:
                    yield encode_body(GenerationProgress(0, tuple(events)))
        except Exception as error:  # noqa: BLE001 (reported to the caller and logged)
            yield encode_body(GenerationProgress(0, ended=True, failure=Failure.of(error)))

    async def answer(self, call: ReplicaCall) -> bytes:
        method_call = msgspec.msgpack.decode(call.body, type=MethodCall)
        return encode_body(await run_method_call(self._engine, method_call))

    async def stop(self) -> None:
        await stop_engine(self._engine)

    # Ray Serve calls `__del__` to release a replica and waits for it.
    __del__ = stop


class ReplicaEngine(ProxyEngine):
    def __init__(self, name: str, handle: Any, slots: int) -> None:
        """`slots` is the capacity of the maximum number of replicas."""
        super().__init__(EngineInfo((ModelInfo(name),), slots=slots))
        self._handle = handle

    async def start(self) -> None:
        body = await self._call(self._handle.describe, b"")
        info = msgspec.msgpack.decode(body, type=EngineInfo)
        self.describe(msgspec.structs.replace(info, slots=self.slots))

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        try:
            body = encode_body(request)
        except ENCODE_ERRORS as error:
            raise BadRequest(UNSENDABLE) from error
        call = ReplicaCall(body, hash_prefixes(request))
        has_output = False
        for attempt in itertools.count(1):
            held: Sequence[Event] = ()
            try:
                async with aclosing(self._stream(call)) as batches:
                    async for events in batches:
                        # Hold back `Started` until the next events: until then another replica can be tried.
                        if not has_output and len(events) == 1 and type(events[0]) is Started:
                            held = events
                            continue
                        has_output = True
                        await notify(listener, [*held, *events] if held else events)
                        held = ()
                return
            except EngineDied:
                if has_output or attempt == MAX_TRIES:
                    raise
                log.warning("request %s: its replica died before the first output; trying another", request.id)
                call = call.retry()

    async def _stream(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Event], None]:
        response = self._handle.generate.options(stream=True).remote(call)
        is_complete = False
        try:
            async for body in response:
                progress = unpack(body)
                if progress.failure is not None:
                    raise progress.failure.error()
                yield progress.events
            is_complete = True
        except (RayError, RayServeException) as error:
            raise _translate(error) from error
        finally:
            call.close()
            if not is_complete:
                response.cancel()

    async def call_method(self, method_call: MethodCall, value_type: type[T]) -> T:
        body = await self._call(self._handle.answer, encode_body(method_call))
        return msgspec.msgpack.decode(body, type=MethodResult).decode(value_type)

    async def _call(self, method: Any, body: bytes) -> bytes:
        """Return the answer of a replica. Nothing is shown before it is complete, so it can be retried."""
        call = ReplicaCall(body)
        tries = 0
        while True:
            tries += 1
            try:
                answer: bytes = await method.remote(call)
                return answer
            except (RayError, RayServeException) as error:
                translated = _translate(error)
                if not isinstance(translated, EngineDied) or tries == MAX_TRIES:
                    raise translated from error
            finally:
                call.close()
            call = call.retry()


def _translate(error: Exception) -> DragomanError:
    if isinstance(error, RayServeException):
        return Unavailable(NO_REPLICA, retry_after=5)
    if isinstance(error, RayTaskError):
        # An unexpected exception in the replica.
        log.error("a replica raised", exc_info=error)
        return engine_failure(error)
    return EngineDied(DIED)

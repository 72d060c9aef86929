"""Contains the Engine that the app holds for a model whose replicas run in the cluster.

Rules
1. If a replica dies before the first output, another one is tried, a few times. Later the caller gets an error: a reply
   never mixes the output of two replicas.
2. Without a free replica a request waits for one; the app's queue limits how many wait.
3. Closing a generation cancels it in the replica.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, RenderedPrompt
from dragoman.core.errors import ENCODE_ERRORS, BadRequest, DragomanError, EngineDied, EngineFailed, Unavailable
from dragoman.core.events import Event, Started
from dragoman.core.request import GenerationRequest
from dragoman.engines.upstream.prefix_index import hash_prefixes
from dragoman.ipc.worker_messages import Answer, CountTokens, Detokenize, Embed, Question, Render, Tokenize
from dragoman.ipc.worker_process import UNSENDABLE
from dragoman.pipeline.event_stream import engine_failure
from dragoman.ray.messages import EngineInfo, decode_answer, decode_engine_info, decode_event_batch, encode
from dragoman.ray.replica_order import ReplicaCall

log = logging.getLogger("dragoman.ray")

MOST_TRIES = 3
"""Includes attempts that failed before a replica was chosen."""
DIED = "the model's replica died; send the request again"
NO_REPLICA = "no replica of this model is available; try again later"


class ReplicaEngine(Engine):
    emits_events = True

    def __init__(self, name: str, handle: Any, slots: int) -> None:
        """`slots` is the capacity of the maximum number of replicas."""
        self.slots = slots
        self._handle = handle
        self._info = EngineInfo((ModelInfo(name),), frozenset(), "cpu", False)

    def models(self) -> Sequence[ModelInfo]:
        return self._info.models

    def supports(self) -> frozenset[str]:
        return self._info.supports

    async def start(self) -> None:
        self._info = info = decode_engine_info(await self._call(self._handle.describe, b""))
        self.device, self.emits_tool_calls = info.device, info.emits_tool_calls

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        call = ReplicaCall(_encode(request), hash_prefixes(request))
        has_output = False
        tries = 0
        while True:
            tries += 1
            try:
                async with aclosing(_merge_started(self._stream(call))) as batches:
                    async for events in batches:
                        has_output = True
                        yield events
                return
            except EngineDied:
                if has_output or tries >= MOST_TRIES:
                    raise
                log.warning("request %s: its replica died before the first output; trying another", request.id)
                call = call.retry()

    async def _stream(self, call: ReplicaCall) -> AsyncGenerator[Sequence[Event], None]:
        response = self._handle.generate.options(stream=True).remote(call)
        is_complete = False
        try:
            async for body in response:
                batch = decode_event_batch(body)
                if batch.failure is not None:
                    raise batch.failure.error()
                yield batch.events
            is_complete = True
        except (RayError, RayServeException) as error:
            raise _translate(error) from error
        finally:
            call.close()
            if not is_complete:
                response.cancel()

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        rendered = (await self._ask(Render(0, request))).rendered
        if rendered is None:
            raise EngineFailed("the engine returned no prompt")
        return rendered

    async def count_tokens(self, request: GenerationRequest) -> int:
        count = (await self._ask(CountTokens(0, request))).count
        if count is None:
            raise EngineFailed("the engine returned no token count")
        return count

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return (await self._ask(Tokenize(0, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return (await self._ask(Detokenize(0, tuple(tokens)))).text or ""

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return (await self._ask(Embed(0, tuple(inputs)))).embeddings or ()

    async def _ask(self, question: Question) -> Answer:
        answer = decode_answer(await self._call(self._handle.answer, _encode(question)))
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    async def _call(self, method: Any, body: bytes) -> bytes:
        """Return the answer of a replica. Nothing is shown before it is complete, so it can be retried."""
        call = ReplicaCall(body)
        tries = 0
        while True:
            tries += 1
            try:
                return await _await_result(method.remote, call)
            except EngineDied:
                if tries >= MOST_TRIES:
                    raise
                call = call.retry()


async def _await_result(method: Callable[[ReplicaCall], Awaitable[bytes]], call: ReplicaCall) -> bytes:
    try:
        return await method(call)
    except (RayError, RayServeException) as error:
        raise _translate(error) from error
    finally:
        call.close()


async def _merge_started(batches: AsyncGenerator[Sequence[Event], None]) -> AsyncGenerator[Sequence[Event], None]:
    """Hold back `Started` until the next events: until then another replica can be tried."""
    held: Sequence[Event] = ()
    async with aclosing(batches):
        async for events in batches:
            if not held and len(events) == 1 and type(events[0]) is Started:
                held = events
                continue
            yield [*held, *events] if held else events
            held = ()


def _encode(message: GenerationRequest | Question) -> bytes:
    try:
        return encode(message)
    except ENCODE_ERRORS as error:
        raise BadRequest(UNSENDABLE) from error


def _translate(error: Exception) -> DragomanError:
    if isinstance(error, RayServeException):
        return Unavailable(NO_REPLICA, retry_after=5)
    if isinstance(error, RayTaskError):
        # An unexpected exception in the replica.
        log.error("a replica raised", exc_info=error)
        return engine_failure(error)
    return EngineDied(DIED)

"""The Engine that the app holds for a model whose replicas run somewhere in the cluster.

Rules
1. As long as nothing of a reply has been told, the death of a replica is another one's chance, a few times over. After
   that the caller is told: nobody gets two halves of different replies.
2. Where there is no replica, or none with room, a request waits for one; how many may wait, the app's queue says.
3. Closing a generation cancels it in the replica.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, Rendered
from dragoman.core.errors import BadRequest, DragomanError, EngineDied, EngineFailed, Unavailable
from dragoman.core.events import Event, Started
from dragoman.core.request import GenerationRequest
from dragoman.engines.upstream.prefix_index import chain
from dragoman.ipc.worker_messages import Answer, CountTokens, Detokenize, Embed, Question, Render, Tokenize
from dragoman.ipc.worker_process import UNSENDABLE
from dragoman.pipeline.event_stream import failed
from dragoman.ray.messages import Facts, decode_answer, decode_facts, decode_told, encode
from dragoman.ray.replica_call import Asked

log = logging.getLogger("dragoman.ray")

MOST_TRIES = 3
"""Counted here and not by the replicas that it has been to: one may die before a request is on its way to any."""
DIED = "the replica of the model that had the request died; the request can be sent again"
NOBODY = "no replica of this model can be asked now; try again later"


class ReplicaEngine(Engine):
    streams_events = True

    def __init__(self, name: str, handle: Any, slots: int) -> None:
        """`slots`: what all replicas that there may be take together."""
        self.slots = slots
        self._handle = handle
        self._facts = Facts((ModelInfo(name),), frozenset(), "cpu", False)

    def models(self) -> Sequence[ModelInfo]:
        return self._facts.models

    def supports(self) -> frozenset[str]:
        return self._facts.supports

    async def start(self) -> None:
        self._facts = facts = decode_facts(await self._once(self._handle.facts, b""))
        self.device, self.tells_calls = facts.device, facts.tells_calls

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        asked = Asked(_encoded(request), chain(request))
        begun = False
        tries = 0
        while True:
            tries += 1
            try:
                async with aclosing(_held(self._stream(asked))) as batches:
                    async for events in batches:
                        begun = True
                        yield events
                return
            except EngineDied:
                if begun or tries >= MOST_TRIES:
                    raise
                log.warning("request %s: its replica died before it said anything; another is asked", request.id)
                asked = asked.again()

    async def _stream(self, asked: Asked) -> AsyncGenerator[Sequence[Event], None]:
        response = self._handle.generate.options(stream=True).remote(asked)
        is_over = False
        try:
            async for body in response:
                told = decode_told(body)
                if told.failure is not None:
                    raise told.failure.error()
                yield told.events
            is_over = True
        except (RayError, RayServeException) as error:
            raise _told(error) from error
        finally:
            asked.close()
            if not is_over:
                response.cancel()

    async def render(self, request: GenerationRequest) -> Rendered:
        rendered = (await self._ask(Render(0, request))).rendered
        if rendered is None:
            raise EngineFailed("the engine told no prompt")
        return rendered

    async def count_tokens(self, request: GenerationRequest) -> int:
        count = (await self._ask(CountTokens(0, request))).count
        if count is None:
            raise EngineFailed("the engine told no count")
        return count

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return (await self._ask(Tokenize(0, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return (await self._ask(Detokenize(0, tuple(tokens)))).text or ""

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return (await self._ask(Embed(0, tuple(inputs)))).embeddings or ()

    async def _ask(self, question: Question) -> Answer:
        answer = decode_answer(await self._once(self._handle.answer, _encoded(question)))
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    async def _once(self, method: Any, body: bytes) -> bytes:
        """What a replica answers; nothing of it is told before all of it is there, so another may be asked."""
        asked = Asked(body)
        tries = 0
        while True:
            tries += 1
            try:
                return await _result(method.remote, asked)
            except EngineDied:
                if tries >= MOST_TRIES:
                    raise
                asked = asked.again()


async def _result(ask: Callable[[Asked], Awaitable[bytes]], asked: Asked) -> bytes:
    try:
        return await ask(asked)
    except (RayError, RayServeException) as error:
        raise _told(error) from error
    finally:
        asked.close()


async def _held(batches: AsyncGenerator[Sequence[Event], None]) -> AsyncGenerator[Sequence[Event], None]:
    """That a reply has begun is told with the first word of it: until then another replica may begin it."""
    kept: Sequence[Event] = ()
    async with aclosing(batches):
        async for events in batches:
            if not kept and len(events) == 1 and type(events[0]) is Started:
                kept = events
                continue
            yield [*kept, *events] if kept else events
            kept = ()


def _encoded(message: GenerationRequest | Question) -> bytes:
    try:
        return encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BadRequest(UNSENDABLE) from error


def _told(error: Exception) -> DragomanError:
    if isinstance(error, RayServeException):
        return Unavailable(NOBODY, retry_after=5)
    if isinstance(error, RayTaskError):
        # An exception in the replica that its own code did not expect.
        log.error("a replica raised", exc_info=error)
        return failed(error)
    return EngineDied(DIED)

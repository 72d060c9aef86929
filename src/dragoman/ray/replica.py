"""Runs the engine of one model in a Ray Serve replica.

An engine that needs a worker gets one here too, although a replica is a process of its own: the engine may then kill
its process with all that it started, and it restarts faster than a replica. When the worker is given up, the replica
reports that it is unhealthy, and Serve replaces it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.formats import get_format
from dragoman.ipc.worker_main import answer_question, to_failure
from dragoman.ipc.worker_messages import Answer
from dragoman.models import local_engine
from dragoman.pipeline.event_stream import stream_events
from dragoman.ray.messages import EngineInfo, EventBatch, decode_question, decode_request, encode
from dragoman.ray.replica_order import ReplicaCall


class Replica:
    async def __init__(self, spec: ModelSpec, limits: Limits) -> None:  # type: ignore[misc]
        self._lost_reason: str | None = None
        self._engine = await local_engine(spec, limits)(self._note_lost)
        await self._engine.start()
        for info in self._engine.models():
            get_format(info.format)

    def _note_lost(self, reason: str) -> None:
        self._lost_reason = reason

    async def check_health(self) -> None:
        """Called by Ray Serve; an exception marks the replica as unhealthy."""
        if self._lost_reason is not None:
            raise RuntimeError(self._lost_reason)

    async def describe(self, call: ReplicaCall) -> bytes:
        return encode(EngineInfo.of(self._engine))

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(stream_events(self._engine, decode_request(call.body))) as stream:
                async for events in stream:
                    yield encode(EventBatch(events))
        except Exception as error:  # noqa: BLE001 (reported to the caller and logged)
            yield encode(EventBatch(failure=to_failure(error)))

    async def answer(self, call: ReplicaCall) -> bytes:
        question = decode_question(call.body)
        try:
            return encode(await answer_question(self._engine, question))
        except Exception as error:  # noqa: BLE001 (reported to the caller and logged)
            return encode(Answer(question.id, failure=to_failure(error)))

    async def stop(self) -> None:
        await self._engine.stop()

    # Ray Serve calls `__del__` to release a replica and waits for it.
    __del__ = stop

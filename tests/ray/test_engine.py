"""Retries of calls to replicas, with Ray's errors but without a cluster."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest
from ray.exceptions import ActorDiedError, RayError

from dragoman.core.engine import stream_events
from dragoman.core.errors import EngineDied
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.ipc.framing import encode_body
from dragoman.ipc.messages import GenerationProgress, MethodResult, pack
from dragoman.ray.engine import MAX_TRIES, ReplicaEngine
from dragoman.ray.replica_order import ReplicaCall


class Method:
    """A method of a fake handle that fails `failures` times before a replica is chosen."""

    def __init__(self, failures: int, *answers: bytes, error: RayError | None = None) -> None:
        self.error = error or ActorDiedError()
        self.failures = failures
        self.answers = answers
        self.calls = 0

    def options(self, stream: bool) -> "Streaming":
        return Streaming(self)

    async def remote(self, call: ReplicaCall) -> bytes:
        self._count()
        return self.answers[0]

    def _count(self) -> None:
        self.calls += 1
        assert self.calls <= MAX_TRIES, "too many retries"
        if self.calls <= self.failures:
            raise self.error


class Streaming:
    def __init__(self, method: Method) -> None:
        self.method = method
        self.cancelled = False

    def remote(self, call: ReplicaCall) -> Self:
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.method._count()
        for answer in self.method.answers:
            yield answer

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    def __init__(self, **methods: Method) -> None:
        self.__dict__.update(methods)


def engine(**methods: Method) -> ReplicaEngine:
    return ReplicaEngine("m", Handle(**methods), slots=1)


async def generate(replica_engine: ReplicaEngine) -> list[Event]:
    return [
        event async for batch in stream_events(replica_engine, GenerationRequest(prompts=("x",))) for event in batch
    ]


REPLY: tuple[Event, ...] = (Started(), TextDelta("hello"), Finished())


def test_generation_is_retried_a_few_times() -> None:
    recovering = Method(MAX_TRIES - 1, *(encode_body(GenerationProgress(0, (event,))) for event in REPLY))
    assert asyncio.run(generate(engine(generate=recovering))) == list(REPLY)
    dying = Method(99)
    with pytest.raises(EngineDied):
        asyncio.run(generate(engine(generate=dying)))
    assert dying.calls == MAX_TRIES


def test_method_call_is_retried_a_few_times() -> None:
    recovering = Method(MAX_TRIES - 1, encode_body(MethodResult(0, pack("hello"))))
    assert asyncio.run(engine(answer=recovering).detokenize([1])) == "hello"
    dying = Method(99)
    with pytest.raises(EngineDied):
        asyncio.run(engine(answer=dying).detokenize([1]))
    assert dying.calls == MAX_TRIES


def test_every_ray_error_is_retried() -> None:
    unknown = Method(99, error=RayError("unknown"))
    with pytest.raises(EngineDied):
        asyncio.run(engine(answer=unknown).detokenize([1]))
    assert unknown.calls == MAX_TRIES

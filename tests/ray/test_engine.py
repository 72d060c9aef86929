"""How often replicas are asked, where none of them lives long enough to be told apart: with Ray's errors, without a
cluster."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest
from ray.exceptions import ActorDiedError, RayError

from dragoman.core.errors import EngineDied
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import Answer
from dragoman.ray.engine import MOST_TRIES, ReplicaEngine
from dragoman.ray.messages import Told, encode
from dragoman.ray.replica_call import Asked


class Method:
    """As a handle's: it fails as often as it is told, before any replica has been chosen."""

    def __init__(self, failures: int, *answers: bytes, error: RayError | None = None) -> None:
        self.error = error or ActorDiedError()
        self.failures = failures
        self.answers = answers
        self.asked = 0

    def options(self, stream: bool) -> "Streaming":
        return Streaming(self)

    async def remote(self, asked: Asked) -> bytes:
        self._count()
        return self.answers[0]

    def _count(self) -> None:
        self.asked += 1
        assert self.asked <= MOST_TRIES, "it is asked for ever"
        if self.asked <= self.failures:
            raise self.error


class Streaming:
    def __init__(self, method: Method) -> None:
        self.method = method
        self.cancelled = False

    def remote(self, asked: Asked) -> Self:
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


async def said(made: ReplicaEngine) -> list[Event]:
    return [event async for batch in made.generate(GenerationRequest(prompts=("x",))) for event in batch]


REPLY: tuple[Event, ...] = (Started(), TextDelta("hello"), Finished())


def test_another_is_asked_a_few_times_and_no_more() -> None:
    lasting = Method(MOST_TRIES - 1, *(encode(Told((event,))) for event in REPLY))
    assert asyncio.run(said(engine(generate=lasting))) == list(REPLY)
    dying = Method(99)
    with pytest.raises(EngineDied):
        asyncio.run(said(engine(generate=dying)))
    assert dying.asked == MOST_TRIES


def test_so_is_a_question() -> None:
    lasting = Method(MOST_TRIES - 1, encode(Answer(0, text="hello")))
    assert asyncio.run(engine(answer=lasting).detokenize([1])) == "hello"
    dying = Method(99)
    with pytest.raises(EngineDied):
        asyncio.run(engine(answer=dying).detokenize([1]))
    assert dying.asked == MOST_TRIES


def test_every_error_of_rays_own_is_a_death() -> None:
    strange = Method(99, error=RayError("nobody knows"))
    with pytest.raises(EngineDied):
        asyncio.run(engine(answer=strange).detokenize([1]))
    assert strange.asked == MOST_TRIES

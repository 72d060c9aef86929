"""What runs in a replica: the engine of one model.

A replica is a process of its own already, whose death is noticed and which is started again: an engine that needs a
worker elsewhere has none here.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dragoman.catalog import chosen
from dragoman.config import ModelSpec
from dragoman.engines.run import run
from dragoman.formats import named
from dragoman.ray.asked import Asked
from dragoman.ray.messages import Facts, Told, decode_question, decode_request, encode
from dragoman.worker.child import answered, failure_of
from dragoman.worker.messages import Answer


class Replica:
    async def __init__(self, spec: ModelSpec) -> None:  # type: ignore[misc]
        cls, options = await chosen(spec)
        self._engine = cls.configured(spec.name, options)
        await self._engine.start()
        for info in self._engine.models():
            named(info.format)

    async def facts(self, asked: Asked) -> bytes:
        return encode(Facts.of(self._engine))

    async def generate(self, asked: Asked) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(run(self._engine, decode_request(asked.body))) as stream:
                async for events in stream:
                    yield encode(Told(events))
        except Exception as error:  # noqa: BLE001 (told to whoever asked, and to the log)
            yield encode(Told(failure=failure_of(error)))

    async def answer(self, asked: Asked) -> bytes:
        question = decode_question(asked.body)
        try:
            return encode(await answered(self._engine, question))
        except Exception as error:  # noqa: BLE001 (told to whoever asked, and to the log)
            return encode(Answer(question.id, failure=failure_of(error)))

    async def stop(self) -> None:
        await self._engine.stop()

    # By this name Ray Serve ends what a replica holds, and waits for it.
    __del__ = stop

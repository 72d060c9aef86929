"""What runs in a replica: the engine of one model.

An engine that needs a worker has one here too, although a replica is a process of its own. What such engines rely on
holds then: they may end their process with all that it has started, and are back sooner than a replica would be. When
the worker is given up, the replica says that it is not well, and Serve takes another in its place.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits
from dragoman.formats import named
from dragoman.ipc.worker_main import answered, failure_of
from dragoman.ipc.worker_messages import Answer
from dragoman.models import made_here
from dragoman.pipeline.event_stream import run
from dragoman.ray.messages import Facts, Told, decode_question, decode_request, encode
from dragoman.ray.replica_call import Asked


class Replica:
    async def __init__(self, spec: ModelSpec, limits: Limits) -> None:  # type: ignore[misc]
        self._given_up: str | None = None
        self._engine = await made_here(spec, limits)(self._give_up)
        await self._engine.start()
        for info in self._engine.models():
            named(info.format)

    def _give_up(self, reason: str) -> None:
        self._given_up = reason

    async def check_health(self) -> None:
        """By this name Ray Serve asks now and then; what is raised means that it is not well."""
        if self._given_up is not None:
            raise RuntimeError(self._given_up)

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

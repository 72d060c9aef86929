"""Runs a generation in this process, without HTTP.

reply = await generate(engine, request)
async for event in generate(engine, request): ...
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import aclosing
from functools import partial

import msgspec

from dragoman.core.delivery import pull_events
from dragoman.core.engine import Engine, check_engine, describe_engine, list_models
from dragoman.core.errors import BadRequest
from dragoman.core.events import Event, Listener, notify
from dragoman.core.ids import new_id
from dragoman.core.reply import Reply, ReplyBuilder
from dragoman.core.request import GenerationRequest
from dragoman.pipeline import generate as pipeline
from dragoman.pipeline.context_edits import COMPACTION_ONLY, edit_context
from dragoman.pipeline.summary_writer import SummaryOptions


class LocalGeneration:
    """A generation of `generate`: awaiting it returns the `Reply`, iterating over it yields the events.

    It runs the stages that the server runs: stop strings, `max_tokens`, thinking, tool calls, the usage.
    """

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self._engine = engine
        self._request = request

    def __await__(self) -> Generator[None, None, Reply]:
        return self._reply().__await__()

    async def __aiter__(self) -> AsyncIterator[Event]:
        request = self._request
        if max(request.choices, request.best_of, len(request.prompts)) > 1:
            raise BadRequest("the events of several choices cannot be told apart; await the generation instead")
        async with aclosing(self._batches()) as batches:
            async for events in batches:
                for event in events:
                    yield event

    def _batches(self) -> AsyncGenerator[Sequence[Event], None]:
        delivery = msgspec.structs.replace(self._request.delivery, stream=True)
        request = msgspec.structs.replace(self._request, delivery=delivery)

        async def deliver(listener: Listener) -> None:
            await self._run(request, lambda choice, events: listener(events))

        return pull_events(deliver)

    async def _reply(self) -> Reply:
        builder = ReplyBuilder()
        await self._run(self._request, builder.add)
        return builder.reply()

    async def _run(self, request: GenerationRequest, on_events: pipeline.OnEvents) -> None:
        engine = self._engine
        await describe_engine(engine)
        model = request.model or next((info.name for info in list_models(engine)), "")
        request = msgspec.structs.replace(request, id=request.id or new_id("gen-"), model=model)
        pipeline.check_features(model, request.asked, engine.supports(), strict=False)
        slots = EngineSlots(engine.slots)
        await slots.acquire()

        async def run(request: GenerationRequest, on_events: pipeline.OnEvents) -> None:
            await pipeline.generate(engine, request, slots, on_events)

        edited: GenerationRequest | None = request
        if request.edits:
            edited = await edit_context(engine, request, SummaryOptions(), run, lambda event: None)
        if edited is None:
            await notify(partial(on_events, 0), COMPACTION_ONLY)
        else:
            await run(edited, on_events)


class EngineSlots:
    """The choices of one request that may run at a time."""

    def __init__(self, slots: int | None) -> None:
        self._semaphore = None if slots is None else asyncio.Semaphore(slots)

    async def acquire(self) -> None:
        if self._semaphore is not None:
            await self._semaphore.acquire()

    def release(self) -> None:
        if self._semaphore is not None:
            self._semaphore.release()


def generate(engine: Engine, request: GenerationRequest) -> LocalGeneration:
    """Run a generation in this process. Start the engine before, if it needs that.

    Await the result for the whole reply, or iterate over it for the events. Concurrent calls do not share the engine's
    slots; several choices of one request do.
    """
    check_engine(engine)
    return LocalGeneration(engine, request)

"""A llama engine with the real model, in the process of the tests, and ways to ask it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.conversation import GenerationRequest, Message, Sampling, Text
from dragoman.engines.llama.engine import LlamaEngine, LlamaOptions
from dragoman.events import Finished, Started, TextDelta, TokenLogprob

GREEDY = Sampling(temperature=0)
FRANCE = "The capital of France is"
IM_START, IM_END = 1, 2


class Collected(msgspec.Struct, frozen=True):
    started: Started
    deltas: tuple[TextDelta, ...]
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs)


Test = Callable[[LlamaEngine], Awaitable[None]]


@pytest.fixture
def with_engine(smollm2_path: Path) -> Callable[..., None]:
    def run(test: Test, slots: int = 2, context: int | None = 512, batch: int = 512) -> None:
        async def main() -> None:
            options = LlamaOptions(str(smollm2_path), slots=slots, context=context, batch=batch, layout="as-is")
            engine = LlamaEngine("smollm2", options)
            await engine.start()
            try:
                await test(engine)
            finally:
                await engine.stop()

        asyncio.run(main())

    return run


Run = Callable[..., None]


def completion(prompt: str | tuple[int, ...] = FRANCE, **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompts": (prompt,), "sampling": GREEDY, "max_tokens": 8, **fields})


def chat(text: str, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (Text(text),)),)
    return GenerationRequest(**{"messages": messages, "sampling": GREEDY, "max_tokens": 8, **fields})


async def collect(engine: LlamaEngine, request: GenerationRequest) -> Collected:
    batches = [batch async for batch in engine.generate(request)]
    assert all(batches)
    started, *deltas, finished = [event for batch in batches for event in batch]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    return Collected(started, tuple(delta for delta in deltas if isinstance(delta, TextDelta)), finished)


async def idle(engine: LlamaEngine) -> None:
    """Until the runner has nothing left; every sequence is then free or waits only for being cleared."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(5):
        while not scheduler.idle:  # noqa: ASYNC110  (it becomes so in another thread)
            await asyncio.sleep(0.01)
    assert len(scheduler.free) + len(scheduler.used) == engine.options.slots


async def reading(engine: LlamaEngine) -> None:
    """Until the first part of a prompt is in memory."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(5):
        while not any(seat.done for seat in list(scheduler.seats.values())):  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.001)

"""Runs a llama engine with the real model in the test process, and builds requests for it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.events import Finished, Started, TextDelta, TokenLogprob
from dragoman.core.request import GenerationRequest, Message, Sampling, Text
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from tests.engines.halves import write_halves

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
def with_engine(smollm2_path: Path) -> "Run":
    return _with_engine(smollm2_path)


@pytest.fixture(scope="session")
def halves_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("halves") / "smollm2.gguf"
    write_halves(smollm2_path, path)
    return path


@pytest.fixture
def with_halves(halves_path: Path) -> "Run":
    return _with_engine(halves_path)


def _with_engine(path: Path) -> "Run":
    def run(test: Test, **options_given: Any) -> None:
        async def main() -> None:
            given = {"path": str(path), "slots": 2, "context": 512, "layout": "as-is", **options_given}
            options = LlamaOptions(**given)
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
    """Wait until the runner is idle and all sequences are free."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(60):
        while not scheduler.idle:  # noqa: ASYNC110  (it changes in another thread)
            await asyncio.sleep(0.01)
    assert not scheduler.sequences.taken
    assert not scheduler.promised.ends


async def reading(engine: LlamaEngine) -> None:
    """Wait until the first part of a prompt has been decoded."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(60):
        while not any(slot.done for slot in list(scheduler.slots.values())):  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.001)

"""A llama engine with a real model in the test process, and helpers to send requests to it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

from dragoman.core.events import Finished, Started, TextDelta, TokenLogprob
from dragoman.core.request import GenerationRequest, Message, Sampling, Text
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions

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
    _write_halves(smollm2_path, path)
    return path


def _write_halves(source: Path, target: Path) -> None:
    """Convert the weights to f16, for tests that compare log probabilities.

    With weights of few bits llama.cpp rounds to eight bits before each matrix, and two orders of addition differ by 0.2
    in a log probability. With f16 they differ by 0.01, so that one wrong token is noticed.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if len(tensor.shape) > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def with_halves(halves_path: Path) -> "Run":
    return _with_engine(halves_path)


def _with_engine(path: Path) -> "Run":
    def run(test: Test, **overrides: Any) -> None:
        async def main() -> None:
            fields = {"path": str(path), "slots": 2, "context": 512, "layout": "as-is", **overrides}
            options = LlamaOptions(**fields)
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


async def wait_until_idle(engine: LlamaEngine) -> None:
    """Wait until the runner is idle, and check that no sequence is occupied."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(60):
        while not scheduler.idle:  # noqa: ASYNC110  (changes in another thread)
            await asyncio.sleep(0.01)
    assert not scheduler.sequences.occupied
    assert not scheduler.promised.ends


async def wait_for_prefill(engine: LlamaEngine) -> None:
    """Wait until the first chunk of a prompt is in memory."""
    assert engine.loaded is not None
    scheduler = engine.loaded.runner.scheduler
    async with asyncio.timeout(60):
        while not any(slot.done for slot in list(scheduler.slots.values())):  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.001)

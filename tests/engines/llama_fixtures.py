"""A llama engine with a real model in the test process, and helpers to send requests to it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dragoman.core.request import GenerationRequest, Logprobs, Message, Sampling, Text
from dragoman.engines.llama.binding import LlamaModel
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.generation import LlamaRequestBuilder
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.runner import Runner
from tests.support.generation import Collected as Collected
from tests.support.generation import collect as collect

GREEDY = Sampling(temperature=0)
FRANCE = "The capital of France is"
IM_START, IM_END = 1, 2
TIE = 0.03
"""Candidates whose log probabilities differ by less may be picked in either order."""
TOLERANCE = 0.03

SEA = (
    "The sea was calm that morning, and the old man went down to his boat with bread, water and a long line. His "
    "daughter had mended the sail in winter; the mast came from a wreck near the lighthouse. Forty years ago he had "
    "crossed the bay in a storm, with three goats and a priest aboard, and since then nobody in town doubted him."
)
CITY = (
    "A city is a machine for meeting people, and its streets are the wires along which they travel. In Lisbon trams "
    "climb past laundry and blue tiles; in Oslo a ferry leaves every ten minutes. Mayors count houses, poets count "
    "windows, and the tax office counts both, twice a year, with a pencil that has never been sharpened."
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def model_path(smollm2_path: Path) -> Path:
    """The model of `engine`; test modules may override it."""
    return smollm2_path


@pytest.fixture
async def engine(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[LlamaEngine]:
    """A running engine. The marker `engine_options` changes its options."""
    marker = request.node.get_closest_marker("engine_options")
    async with running_engine(model_path, **({} if marker is None else marker.kwargs)) as engine:
        yield engine


@asynccontextmanager
async def running_engine(path: Path, **options: Any) -> AsyncIterator[LlamaEngine]:
    fields = {"path": str(path), "slots": 2, "context": 512, "layout": "as-is", **options}
    engine = LlamaEngine("smollm2", LlamaOptions(**fields))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def runner_of(engine: LlamaEngine) -> Runner:
    assert engine.loaded is not None
    return engine.loaded.runners[""]


def builder_of(engine: LlamaEngine) -> LlamaRequestBuilder:
    return engine.require_builder()


def model_of(engine: LlamaEngine) -> LlamaModel:
    assert engine.loaded is not None
    return engine.loaded.model


@pytest.fixture(scope="session")
def halves_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with f16 weights, for tests that compare log probabilities.

    With weights of few bits llama.cpp rounds to eight bits before each matrix, and two orders of addition differ by 0.2
    in a log probability. With f16 they differ by 0.01, so that one wrong token is noticed.
    """
    path = tmp_path_factory.mktemp("halves") / "smollm2.gguf"
    reader = gguf.GGUFReader(smollm2_path)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
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
    return path


def completion(prompt: str | tuple[int, ...] = FRANCE, **fields: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompts": (prompt,), "sampling": GREEDY, "max_tokens": 8, **fields})


def chat(text: str, **fields: Any) -> GenerationRequest:
    messages = (Message("user", (Text(text),)),)
    return GenerationRequest(**{"messages": messages, "sampling": GREEDY, "max_tokens": 8, **fields})


async def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread makes true."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.001)


async def wait_until_idle(engine: LlamaEngine) -> None:
    """Wait until the runner is idle, and check that no sequence is occupied."""
    scheduler = runner_of(engine).scheduler
    await wait_until(lambda: scheduler.idle)
    assert not scheduler.sequences.occupied
    assert not scheduler.promised.ends


async def wait_for_prefill(engine: LlamaEngine) -> None:
    """Wait until the first chunk of a prompt is in memory."""
    scheduler = runner_of(engine).scheduler
    await wait_until(lambda: any(slot.done for slot in list(scheduler.slots.values())))


def short_reply(prompt: str | tuple[int, ...], **fields: object) -> GenerationRequest:
    return completion(prompt, max_tokens=10, ignore_eos=True, logprobs=Logprobs(top=2), **fields)


def differences(one: Collected, other: Collected) -> list[float]:
    """Return the differences of the log probabilities up to the first tie. The replies must be equal until there."""
    found = []
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        if left.token != right.token:
            gap = abs((left.top[0].logprob or 0) - (left.top[1].logprob or 0))
            assert gap < TIE, f"{one.text!r} and {other.text!r} differ without a tie"
            break
        found.append(abs((left.logprob or 0) - (right.logprob or 0)))
    return found


def assert_same(ones: list[Collected], others: list[Collected]) -> None:
    found = [value for one, other in zip(ones, others, strict=True) for value in differences(one, other)]
    assert max(found, default=0) < TOLERANCE


async def clear_memory(engine: LlamaEngine) -> None:
    """Wait until the engine is idle and clear its memory."""
    await wait_until_idle(engine)
    runner = runner_of(engine)
    runner.scheduler = runner.schedule()
    runner.context.clear_all()

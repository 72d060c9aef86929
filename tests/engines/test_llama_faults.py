"""Failures of a model, invalid files and options, and the engine's description of itself."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.core.request import Sampling
from dragoman.engines.llama.binding import ABORTED, LlamaModel
from dragoman.engines.llama.compute_thread import StepPace
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from tests.engines.llama_fixtures import (
    GREEDY,
    Collected,
    collect,
    completion,
    runner_of,
    wait_for_prefill,
    wait_until_idle,
)

pytestmark = pytest.mark.anyio


async def test_failed_decode_fails_only_the_affected_job(engine: LlamaEngine) -> None:
    poison = 4321

    context = runner_of(engine).context
    decode = context.decode

    def failing(tokens: Sequence[int], *rest: Any) -> int:
        return 1 if poison in tokens else decode(tokens, *rest)

    context.decode = failing  # type: ignore[method-assign,assignment]
    good, bad = await asyncio.gather(
        collect(engine, completion()), collect(engine, completion((504, poison))), return_exceptions=True
    )
    assert isinstance(good, Collected)
    assert good.text.startswith(" Paris")
    assert isinstance(bad, EngineFailed)
    assert "code 1" in bad.message
    await wait_until_idle(engine)


@pytest.mark.engine_options(context=1024)
async def test_decode_of_a_cancelled_job_is_aborted(engine: LlamaEngine) -> None:
    context = runner_of(engine).context
    decode, codes = context.decode, []

    def recording(tokens: Sequence[int], *rest: Any) -> int:
        codes.append(decode(tokens, *rest))
        return codes[-1]

    expected = await collect(engine, completion())
    context.decode = recording  # type: ignore[method-assign,assignment]
    runner_of(engine).alone = StepPace(60, minimum=512, maximum=512)
    prefilling = asyncio.create_task(collect(engine, completion(tuple(range(100, 600)))))
    async with asyncio.timeout(60):
        while runner_of(engine).sole is None:  # noqa: ASYNC110  (changes in another thread)
            await asyncio.sleep(0.001)
    prefilling.cancel()
    await wait_until_idle(engine)
    assert codes == [ABORTED]
    assert (await collect(engine, completion())).tokens == expected.tokens


async def test_aborted_decode_is_repeated(engine: LlamaEngine) -> None:
    context = runner_of(engine).context
    decode, seen = context.decode, 0

    def aborting(tokens: Sequence[int], *rest: Any) -> int:
        nonlocal seen
        seen += 1
        return ABORTED if seen % 2 else decode(tokens, *rest)

    expected = await collect(engine, completion())
    context.decode = aborting  # type: ignore[method-assign,assignment]
    assert (await collect(engine, completion())).tokens == expected.tokens


async def test_job_whose_rows_cannot_be_trimmed_fails_alone(engine: LlamaEngine) -> None:
    context = runner_of(engine).context
    decode, trim = context.decode, context.trim

    def failing(tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], *rest: Any) -> int:
        return 1 if len(set(sequences)) > 1 else decode(tokens, positions, sequences, *rest)

    context.decode = failing  # type: ignore[method-assign,assignment]
    context.trim = lambda sequence, length: sequence == 0 and trim(sequence, length)  # type: ignore[method-assign]
    first = asyncio.create_task(collect(engine, completion(max_tokens=40, ignore_eos=True)))
    await wait_for_prefill(engine)
    second = asyncio.create_task(collect(engine, completion("Once upon a time")))
    good, bad = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(good, Collected)
    assert len(good.tokens) == 40
    assert isinstance(bad, EngineFailed)
    assert "code 1" in bad.message
    await wait_until_idle(engine)


async def test_non_finite_logits_fail_only_their_request(engine: LlamaEngine) -> None:
    context = runner_of(engine).context
    logits = context.logits

    def with_nan(row: int) -> Any:
        found = logits(row)
        found[17] = math.nan
        return found

    for sampling in (GREEDY, Sampling()):
        context.logits = with_nan  # type: ignore[method-assign]
        with pytest.raises(EngineFailed, match="NaN or infinity"):
            await collect(engine, completion(sampling=sampling))
        context.logits = logits  # type: ignore[method-assign]
        assert (await collect(engine, completion())).text.startswith(" Paris")


async def test_engine_continues_after_an_unexpected_exception(engine: LlamaEngine) -> None:
    context = runner_of(engine).context
    decode = context.decode

    def broken(*_: object) -> int:
        raise MemoryError("no more")

    context.decode = broken  # type: ignore[method-assign,assignment]
    answers = await asyncio.gather(*(collect(engine, completion()) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineFailed] * 3
    context.decode = decode  # type: ignore[method-assign]
    assert (await collect(engine, completion())).text.startswith(" Paris")


async def test_failed_scheduler_is_replaced(engine: LlamaEngine) -> None:
    scheduler = runner_of(engine).scheduler

    def failing_end(*_: object) -> None:
        raise KeyError("unexpected")

    scheduler.end = failing_end  # type: ignore[method-assign,assignment]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*(collect(engine, completion()) for _ in range(2)), return_exceptions=True)
        assert EngineFailed in [type(answer) for answer in answers]
        assert (await collect(engine, completion())).text.startswith(" Paris")
    assert runner_of(engine).scheduler is not scheduler


async def test_stop_fails_running_requests(engine: LlamaEngine) -> None:
    running = asyncio.create_task(collect(engine, completion(max_tokens=None, ignore_eos=True)))
    await asyncio.sleep(0.2)
    await engine.stop()
    with pytest.raises(EngineFailed, match="stopped"):
        await running
    with pytest.raises(EngineFailed, match="not running"):
        await collect(engine, completion())


@pytest.mark.parametrize("content", [b"", b"this is not a model", b"GGUF\x03\x00\x00\x00" + bytes(64)])
def test_invalid_model_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.gguf") as caught:
        asyncio.run(LlamaEngine("broken", LlamaOptions(path=str(path))).start())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", [2**28, 2**40])
def test_context_larger_than_the_memory_is_refused(smollm2_path: Path, context: int) -> None:
    engine = LlamaEngine("large", LlamaOptions(path=str(smollm2_path), context=context, layout="as-is"))
    with pytest.raises(ConfigError, match="lower context or slots"):
        asyncio.run(engine.start())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model file"):
        asyncio.run(LlamaEngine("none", LlamaOptions(path=str(tmp_path / "none.gguf"))).start())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"slots": 0}, {"slots": 257}, {"context": 0}, {"threads": 0}, {"batch": 0}, {"batch": 65537}),
        *({"gap_ms": 0}, {"cache_sequences": -1}, {"cache_sequences": 257}),
    ],
)
def test_invalid_options(wrong: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
        msgspec.convert({"path": "x", **wrong}, LlamaOptions)


def test_long_text_is_tokenized_in_parts_with_the_same_result(smollm2_path: Path) -> None:
    model = LlamaModel(smollm2_path)
    text = "".join(f"<|im_start|>user\nQuestion {at} <|im_<|im_end|>{'x' * (at % 50)}\n" for at in range(600))
    assert model.tokenize(text, special=True) == model._tokenize(text, special=True)
    model.close()


@pytest.mark.engine_options(context=300)
async def test_models_and_features(engine: LlamaEngine) -> None:
    assert engine.slots == 2
    assert [(model.name, model.context) for model in engine.models()] == [("smollm2", 300)]
    assert {"chat", "completion", "token_prompt", "prompt_logprobs", "top_k"} <= engine.supports()
    assert "infill" not in engine.supports()
    assert LlamaEngine.needs_worker(engine.options)

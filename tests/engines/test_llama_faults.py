"""Failures of a model, invalid files and options, and the engine's description of itself."""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.core.request import Sampling
from dragoman.engines.llama.binding import ABORTED, Context, LlamaModel, Logits
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
    wait_until,
    wait_until_idle,
)

pytestmark = pytest.mark.anyio


Decode = Callable[..., int]
POISON = 4321


def replace_decode(engine: LlamaEngine, replacement: Callable[..., int]) -> None:
    """Replace the decoder by a function that gets the decoder and its arguments."""
    context = runner_of(engine).context
    context.decode = partial(replacement, context.decode)  # type: ignore[method-assign]


async def test_failed_decode_fails_only_the_affected_job(engine: LlamaEngine) -> None:
    replace_decode(engine, lambda decode, tokens, *rest: 1 if POISON in tokens else decode(tokens, *rest))
    good, bad = await asyncio.gather(
        collect(engine, completion()), collect(engine, completion((504, POISON))), return_exceptions=True
    )
    assert isinstance(good, Collected)
    assert good.text.startswith(" Paris")
    assert isinstance(bad, EngineFailed)
    assert "code 1" in bad.message
    await wait_until_idle(engine)


@pytest.mark.engine_options(context=1024)
async def test_decode_of_a_cancelled_job_is_aborted(engine: LlamaEngine) -> None:
    codes = []

    def recording(decode: Decode, *rows: Any) -> int:
        codes.append(decode(*rows))
        return codes[-1]

    expected = await collect(engine, completion())
    replace_decode(engine, recording)
    runner_of(engine).alone = StepPace(60, minimum=512, maximum=512)
    prefilling = asyncio.create_task(collect(engine, completion(tuple(range(100, 600)))))
    await wait_until(lambda: runner_of(engine).sole is not None)
    prefilling.cancel()
    await wait_until_idle(engine)
    assert codes == [ABORTED]
    assert (await collect(engine, completion())).tokens == expected.tokens


async def test_aborted_decode_is_repeated(engine: LlamaEngine) -> None:
    expected = await collect(engine, completion())
    is_aborted = itertools.cycle([True, False])
    replace_decode(engine, lambda decode, *rows: ABORTED if next(is_aborted) else decode(*rows))
    assert (await collect(engine, completion())).tokens == expected.tokens


async def test_job_whose_rows_cannot_be_trimmed_fails_alone(engine: LlamaEngine) -> None:
    def failing(decode: Decode, tokens: Sequence[int], positions: Any, sequences: Sequence[int], *rest: Any) -> int:
        return 1 if len(set(sequences)) > 1 else decode(tokens, positions, sequences, *rest)

    replace_decode(engine, failing)
    context = runner_of(engine).context
    trim = context.trim
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


async def test_non_finite_logits_fail_only_their_request(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Context.logits

    def with_nan(context: Context, row: int) -> Logits:
        found = logits(context, row)
        found[17] = math.nan
        return found

    for sampling in (GREEDY, Sampling()):
        with monkeypatch.context() as patched:
            patched.setattr(Context, "logits", with_nan)
            with pytest.raises(EngineFailed, match="NaN or infinity"):
                await collect(engine, completion(sampling=sampling))
        assert (await collect(engine, completion())).text.startswith(" Paris")


async def test_engine_continues_after_an_unexpected_exception(
    engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(Context, "decode", broken)
        answers = await asyncio.gather(*(collect(engine, completion()) for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineFailed] * 3
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


@pytest.mark.parametrize("content", [b"", b"this is not a model", b"GGUF\x03\x00\x00\x00" + bytes(64), None])
def test_missing_or_invalid_model_file_is_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "broken.gguf"
    if content is not None:
        path.write_bytes(content)
    message = "no model file at .*" if content is None else ""
    with pytest.raises(ConfigError, match=rf"{message}broken\.gguf") as caught:
        asyncio.run(LlamaEngine("broken", LlamaOptions(path=str(path))).start())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", [2**28, 2**40])
def test_context_larger_than_the_memory_is_refused(smollm2_path: Path, context: int) -> None:
    engine = LlamaEngine("large", LlamaOptions(path=str(smollm2_path), context=context, layout="as-is"))
    with pytest.raises(ConfigError, match="lower context or slots"):
        asyncio.run(engine.start())


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

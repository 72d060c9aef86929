"""What goes wrong with a model, and what its engine says of itself."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.core.request import Sampling
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import ABORTED, Model
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.pace import Pace
from tests.engines.running import (
    GREEDY,
    Collected,
    Run,
    collect,
    completion,
    idle,
    reading,
)


def test_a_decode_that_fails_fails_only_the_jobs_concerned(with_engine: Run) -> None:
    poison = 4321

    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
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
        await idle(engine)

    with_engine(test)


def test_a_decode_for_nobody_is_broken_off(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
        decode, codes = context.decode, []

        def noting(tokens: Sequence[int], *rest: Any) -> int:
            codes.append(decode(tokens, *rest))
            return codes[-1]

        expected = await collect(engine, completion())
        context.decode = noting  # type: ignore[method-assign,assignment]
        engine.loaded.runner.alone = Pace(60, least=512, most=512)
        prefilling = asyncio.create_task(collect(engine, completion(tuple(range(100, 600)))))
        async with asyncio.timeout(60):
            while engine.loaded.runner.sole is None:  # noqa: ASYNC110  (it becomes so in another thread)
                await asyncio.sleep(0.001)
        prefilling.cancel()
        await idle(engine)
        assert codes == [ABORTED]
        assert (await collect(engine, completion())).tokens == expected.tokens

    with_engine(test, context=1024)


def test_a_decode_that_was_broken_off_by_mistake_is_done_again(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
        decode, seen = context.decode, 0

        def aborting(tokens: Sequence[int], *rest: Any) -> int:
            nonlocal seen
            seen += 1
            return ABORTED if seen % 2 else decode(tokens, *rest)

        expected = await collect(engine, completion())
        context.decode = aborting  # type: ignore[method-assign,assignment]
        assert (await collect(engine, completion())).tokens == expected.tokens

    with_engine(test)


def test_a_job_whose_rows_cannot_be_taken_back_fails_alone(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
        decode, trim = context.decode, context.trim

        def failing(tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], *rest: Any) -> int:
            return 1 if len(set(sequences)) > 1 else decode(tokens, positions, sequences, *rest)

        context.decode = failing  # type: ignore[method-assign,assignment]
        context.trim = lambda sequence, length: sequence == 0 and trim(sequence, length)  # type: ignore[method-assign]
        first = asyncio.create_task(collect(engine, completion(max_tokens=40, ignore_eos=True)))
        await reading(engine)
        second = asyncio.create_task(collect(engine, completion("Once upon a time")))
        good, bad = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(good, Collected)
        assert len(good.tokens) == 40
        assert isinstance(bad, EngineFailed)
        assert "code 1" in bad.message
        await idle(engine)

    with_engine(test)


def test_output_that_is_not_a_number_fails_the_request_alone(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
        logits = context.logits

        def spoilt(row: int) -> Any:
            found = logits(row)
            found[17] = math.nan
            return found

        for sampling in (GREEDY, Sampling()):
            context.logits = spoilt  # type: ignore[method-assign]
            with pytest.raises(EngineFailed, match="not numbers"):
                await collect(engine, completion(sampling=sampling))
            context.logits = logits  # type: ignore[method-assign]
            assert (await collect(engine, completion())).text.startswith(" Paris")

    with_engine(test)


def test_an_unknown_failure_fails_the_jobs_at_hand_and_the_engine_goes_on(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        context = engine.loaded.runner.context
        decode = context.decode

        def broken(*_: object) -> int:
            raise MemoryError("no more")

        context.decode = broken  # type: ignore[method-assign,assignment]
        answers = await asyncio.gather(*(collect(engine, completion()) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [EngineFailed] * 3
        context.decode = decode  # type: ignore[method-assign]
        assert (await collect(engine, completion())).text.startswith(" Paris")

    with_engine(test)


def test_a_scheduler_that_is_in_disorder_is_replaced(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        scheduler = engine.loaded.runner.scheduler

        def lost(*_: object) -> None:
            raise KeyError("nobody foresaw it")

        scheduler.end = lost  # type: ignore[method-assign,assignment]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(collect(engine, completion()) for _ in range(2)), return_exceptions=True)
            assert EngineFailed in [type(answer) for answer in answers]
            assert (await collect(engine, completion())).text.startswith(" Paris")
        assert engine.loaded.runner.scheduler is not scheduler

    with_engine(test)


def test_stopping_fails_what_is_running(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        running = asyncio.create_task(collect(engine, completion(max_tokens=None, ignore_eos=True)))
        await asyncio.sleep(0.2)
        await engine.stop()
        with pytest.raises(EngineFailed, match="stopped"):
            await running
        with pytest.raises(EngineFailed, match="not running"):
            await collect(engine, completion())

    with_engine(test)


@pytest.mark.parametrize("content", [b"", b"this is not a model", b"GGUF\x03\x00\x00\x00" + bytes(64)])
def test_a_file_that_is_no_model_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.gguf") as caught:
        asyncio.run(LlamaEngine("broken", LlamaOptions(path=str(path))).start())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("context", [2**28, 2**40])
def test_a_context_that_does_not_fit_is_refused(smollm2_path: Path, context: int) -> None:
    engine = LlamaEngine("large", LlamaOptions(path=str(smollm2_path), context=context, layout="as-is"))
    with pytest.raises(ConfigError, match="lower context or slots"):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    ("limit", "fits"), [("1000000\n", False), ("max\n", True), ("", True), (f"{2**62}\n", True), (None, True)]
)
def test_a_containers_limit_is_the_memory_there_is(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, fits: bool
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(hardware, "GROUPS", tmp_path)
    engine = LlamaEngine("small", LlamaOptions(path=str(smollm2_path), context=64, slots=1, layout="as-is"))

    async def start() -> None:
        await engine.start()
        await engine.stop()

    if fits:
        asyncio.run(start())
    else:
        with pytest.raises(ConfigError, match="lower context or slots"):
            asyncio.run(start())


def test_a_path_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model file"):
        asyncio.run(LlamaEngine("none", LlamaOptions(path=str(tmp_path / "none.gguf"))).start())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"slots": 0}, {"slots": 257}, {"context": 0}, {"threads": 0}, {"batch": 0}, {"batch": 65537}),
        *({"gap_ms": 0}, {"cache_sequences": -1}, {"cache_sequences": 257}),
    ],
)
def test_options_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
        msgspec.convert({"path": "x", **wrong}, LlamaOptions)


def test_long_text_is_tokenised_in_parts_as_if_it_were_not(smollm2_path: Path) -> None:
    model = Model(smollm2_path)
    text = "".join(f"<|im_start|>user\nQuestion {at} <|im_<|im_end|>{'x' * (at % 50)}\n" for at in range(600))
    assert model.tokenize(text, special=True) == model._tokenize(text, special=True)
    model.close()


def test_what_the_engine_says_of_itself(with_engine: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        assert engine.slots == 2
        assert [(model.name, model.context) for model in engine.models()] == [("smollm2", 300)]
        assert {"chat", "completion", "token_prompt", "prompt_logprobs", "top_k"} <= engine.supports()
        assert "infill" not in engine.supports()
        assert LlamaEngine.needs_worker(engine.options)

    with_engine(test, context=300)

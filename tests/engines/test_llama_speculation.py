"""Replies with and without drafts.

With fake logits, which depend only on a row's token, replies must be identical: rounding cannot hide a token that was
picked from the wrong row, mask or random number. With real logits, replies must be equal up to rounding, as explained
in `test_llama_reuse`, which shows that the memory is correct.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.request import GenerationRequest, Logprobs, Regex, Sampling, Thinking
from dragoman.engines.llama.binding import Context, Logits
from dragoman.engines.llama.engine import LlamaEngine
from tests.engines.llama_fixtures import (
    CITY,
    IM_END,
    SEA,
    Collected,
    assert_same,
    builder_of,
    chat,
    clear_memory,
    collect,
    completion,
    runner_of,
    running_engine,
    wait_until_idle,
)

pytestmark = pytest.mark.anyio

PARAGRAPHS = f"{SEA}\n\n{SEA}\n\n{SEA}\n\nThe sea was calm that morning, and the old"
WORDS = range(2000, 2024)


@pytest.fixture
def model_path(halves_path: Path) -> Path:
    return halves_path


async def collect_twice(engine: LlamaEngine, requests: Sequence[GenerationRequest]) -> list[list[Collected]]:
    """Return the replies without drafts and those with drafts, even for requests with a seed."""
    replies, drafted = [], runner_of(engine).drafted
    for is_drafting in (False, True):
        await clear_memory(engine)
        builder_of(engine).uses_drafts = lambda request, uses=is_drafting: uses  # type: ignore[misc,method-assign]
        replies.append(list(await asyncio.gather(*(collect(engine, request) for request in requests))))
        assert (runner_of(engine).drafted > drafted) == is_drafting
    return replies


def make_rows_free(engine: LlamaEngine) -> None:
    """Make the engine draft as much as possible, so that many drafts are wrong."""
    cost = runner_of(engine).cost
    cost.fixed, cost.row = 1.0, 1e-9
    cost.record = lambda rows, drafted, seconds: None  # type: ignore[method-assign]


@cache
def fake_logits(token: int, size: int) -> Logits:
    """Return logits with which four words are likely to follow a token."""
    rng = random.Random(token)
    logits = np.full(size, -30, dtype=np.float32)
    logits[rng.sample(WORDS, 4)] = [4, 2, 1, 0]
    logits[IM_END] = -4
    return logits


def use_fake_logits(context: Context) -> None:
    decode = context.decode

    def decode_with_fake_logits(tokens: Sequence[int], positions: Any, sequences: Any, outputs: Sequence[bool]) -> int:
        code = decode(tokens, positions, sequences, outputs)
        for row in np.flatnonzero(outputs):
            context.logits(int(row))[:] = fake_logits(tokens[int(row)], context.vocab_size)
        return code

    context.decode = decode_with_fake_logits  # type: ignore[method-assign]


def words(seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.choices(WORDS, k=40))


def random_sampling(seed: int, **fields: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed, **fields})


SAMPLING_CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda _: {},
    "random": lambda seed: {"sampling": random_sampling(seed), "ignore_eos": True},
    "ends": lambda seed: {"sampling": random_sampling(seed, temperature=1.3)},
    "top": lambda seed: {"sampling": random_sampling(seed, top_k=3, top_p=0.9, min_p=0.05)},
    "stop tokens": lambda seed: {"sampling": random_sampling(seed), "stop_token_ids": (WORDS[seed % 24],)},
    "log probabilities": lambda seed: {"sampling": random_sampling(seed), "logprobs": Logprobs(top=3)},
    "penalties": lambda seed: {
        "sampling": random_sampling(seed, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2)
    },
    "bias": lambda seed: {"sampling": random_sampling(seed, logit_bias={WORDS[seed % 24]: 3.0, WORDS[0]: -100.0})},
    "few tokens": lambda seed: {"sampling": random_sampling(seed), "max_tokens": 7 + seed, "ignore_eos": True},
    "shape": lambda seed: {"sampling": random_sampling(seed), "constraint": Regex("([^e]*e){0,6}[^e]*")},
}


@pytest.mark.engine_options(slots=4, context=128, gap_ms=100_000)
async def test_replies_are_identical_for_all_sampling_options(engine: LlamaEngine) -> None:
    runner = runner_of(engine)
    use_fake_logits(runner.context)
    make_rows_free(engine)
    requests = [
        completion(words(seed), **{"max_tokens": 24, **fields(seed)})
        for seed, fields in enumerate(SAMPLING_CASES.values(), 1)
    ]
    for plain, drafted in zip(*await collect_twice(engine, requests), strict=True):
        assert plain.deltas == drafted.deltas
        assert plain.finished.reason == drafted.finished.reason
    assert 15 < runner.accepted < runner.drafted
    await wait_until_idle(engine)


@pytest.mark.engine_options(context=256)
async def test_thinking_budget_ends_at_the_same_token(engine: LlamaEngine) -> None:
    runner = runner_of(engine)
    use_fake_logits(runner.context)
    make_rows_free(engine)
    thinking = Thinking(enabled=True, budget_tokens=20)
    request = chat("<think>", thinking=thinking, sampling=random_sampling(3), max_tokens=60)
    (plain,), (drafted,) = await collect_twice(engine, [request])
    assert plain.tokens == drafted.tokens
    assert runner.accepted


def repeating(end: str = "", **fields: Any) -> GenerationRequest:
    given = {"max_tokens": 30, "ignore_eos": True, "logprobs": Logprobs(top=2), **fields}
    return completion(PARAGRAPHS + end, **given)


@pytest.mark.engine_options(context=512)
async def test_repeated_text_is_drafted_with_the_same_reply(engine: LlamaEngine) -> None:
    runner = runner_of(engine)
    make_rows_free(engine)
    requests = [repeating(), repeating(" man told"), completion(CITY, max_tokens=30, logprobs=Logprobs(top=2))]
    replies = await collect_twice(engine, requests)
    assert runner.accepted >= 20
    assert_same(*replies)
    assert SEA.startswith(replies[1][0].text[:60], SEA.index(" man"))
    # Wrong drafts leave no trace in memory: a continuation is the same as without drafts.
    prompt = tuple(await engine.tokenize(PARAGRAPHS, special=True))
    longer = (*prompt, *replies[1][0].tokens, *await engine.tokenize(" But then he", special=False))
    after = completion(longer, logprobs=Logprobs(top=2), max_tokens=12)
    reused = await collect(engine, after)
    assert reused.started.cached_tokens >= len(prompt)
    await clear_memory(engine)
    assert_same([await collect(engine, after)], [reused])


@pytest.mark.engine_options(slots=3, context=512, gap_ms=100_000)
async def test_drafts_for_several_replies_in_one_step(engine: LlamaEngine) -> None:
    make_rows_free(engine)
    requests = [repeating(end, max_tokens=24) for end in ("", " man went down", f"\n{CITY[:40]}")]
    replies = await collect_twice(engine, requests)
    assert runner_of(engine).accepted >= 24
    assert_same(*replies)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_no_drafts_for_requests_with_a_seed(temperature: float, smollm2_path: Path) -> None:
    """With weights of few bits rounding may change the random choice."""
    async with running_engine(smollm2_path) as engine:
        make_rows_free(engine)
        runner = runner_of(engine)
        request = repeating(sampling=Sampling(temperature=temperature, seed=7))
        texts = {(await collect(engine, request)).text for _ in range(2)}
        assert len(texts) == 1
        assert not runner.drafted
        await collect(engine, repeating(sampling=Sampling(temperature=temperature)))
        assert runner.drafted


@pytest.mark.engine_options(context=512, speculation=False)
async def test_no_drafts_with_speculation_disabled(engine: LlamaEngine) -> None:
    await collect(engine, repeating(max_tokens=20))
    assert not runner_of(engine).drafted

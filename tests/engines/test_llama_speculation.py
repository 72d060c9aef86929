"""Replies with and without drafts.

With logits that depend on nothing but a row's token the replies must be the same to the bit, whatever is asked for: no
rounding hides a token that was picked from the wrong row, with the wrong mask or the wrong chance. With the model's own
logits they must be the same up to rounding, as `test_llama_reuse` explains: that shows that nothing wrong is in memory.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from dragoman.core.request import GenerationRequest, Logprobs, Regex, Sampling, Thinking
from dragoman.engines.llama.binding import Context, Logits
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.runner import Runner
from tests.engines.running import IM_END, Collected, Run, chat, collect, completion, idle
from tests.engines.test_llama_reuse import CITY, SEA, assert_same, forget

PARAGRAPHS = f"{SEA}\n\n{SEA}\n\n{SEA}\n\nThe sea was calm that morning, and the old"
WORDS = range(2000, 2024)


def runner_of(engine: LlamaEngine) -> Runner:
    assert engine.loaded is not None
    return engine.loaded.runner


def speculate(engine: LlamaEngine, wanted: bool) -> None:
    """Also where there is a seed, so that chance falls alike with and without."""
    assert engine.loaded is not None
    engine.loaded.intake.drafts = lambda request: wanted  # type: ignore[method-assign]


def make_rows_free(engine: LlamaEngine) -> None:
    """Whatever may be drafted is, so that much of it is wrong."""
    cost = runner_of(engine).cost
    cost.fixed, cost.row = 1.0, 1e-9
    cost.took = lambda rows, drafted, seconds: None  # type: ignore[method-assign]


@cache
def dream(token: int, size: int) -> Logits:
    """A few words may follow a word; everything else is far away."""
    chance = random.Random(token)
    logits = np.full(size, -30, dtype=np.float32)
    logits[chance.sample(WORDS, 4)] = [4, 2, 1, 0]
    logits[IM_END] = -4
    return logits


def let_dream(context: Context) -> None:
    decode = context.decode

    def dreaming(tokens: Sequence[int], positions: Any, sequences: Any, outputs: Sequence[bool]) -> int:
        code = decode(tokens, positions, sequences, outputs)
        for row in np.flatnonzero(outputs):
            context.logits(int(row))[:] = dream(tokens[int(row)], context.vocab_size)
        return code

    context.decode = dreaming  # type: ignore[method-assign]


def words(seed: int) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.choices(WORDS, k=40))


def by_chance(seed: int, **fields: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed, **fields})


DREAMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda _: {},
    "chance": lambda seed: {"sampling": by_chance(seed), "ignore_eos": True},
    "ends": lambda seed: {"sampling": by_chance(seed, temperature=1.3)},
    "top": lambda seed: {"sampling": by_chance(seed, top_k=3, top_p=0.9, min_p=0.05)},
    "stop tokens": lambda seed: {"sampling": by_chance(seed), "stop_token_ids": (WORDS[seed % 24],)},
    "log probabilities": lambda seed: {"sampling": by_chance(seed), "logprobs": Logprobs(top=3)},
    "penalties": lambda seed: {
        "sampling": by_chance(seed, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2)
    },
    "bias": lambda seed: {"sampling": by_chance(seed, logit_bias={WORDS[seed % 24]: 3.0, WORDS[0]: -100.0})},
    "few tokens": lambda seed: {"sampling": by_chance(seed), "max_tokens": 7 + seed, "ignore_eos": True},
    "shape": lambda seed: {"sampling": by_chance(seed), "constraint": Regex("([^e]*e){0,6}[^e]*")},
}


def test_replies_are_the_same_to_the_bit_whatever_is_asked_for(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        runner = runner_of(engine)
        let_dream(runner.context)
        make_rows_free(engine)
        requests = [
            completion(words(seed), **{"max_tokens": 24, **asked(seed)})
            for seed, asked in enumerate(DREAMS.values(), 1)
        ]
        replies: list[list[Collected]] = []
        for wanted in (False, True):
            speculate(engine, wanted)
            replies.append(await asyncio.gather(*(collect(engine, request) for request in requests)))
            assert bool(runner.drafted) == wanted
        for plain, drafted in zip(*replies, strict=True):
            assert plain.deltas == drafted.deltas
            assert plain.finished.reason == drafted.finished.reason
        assert 15 < runner.accepted < runner.drafted
        await idle(engine)

    with_halves(test, slots=4, context=128, gap_ms=100_000)


def test_a_thought_is_closed_at_the_same_token(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        runner = runner_of(engine)
        let_dream(runner.context)
        make_rows_free(engine)
        asked = chat("<think>", thinking=Thinking(enabled=True, budget_tokens=20), sampling=by_chance(3), max_tokens=60)
        texts = []
        for wanted in (False, True):
            speculate(engine, wanted)
            texts.append((await collect(engine, asked)).tokens)
        assert texts[0] == texts[1]
        assert runner.accepted

    with_halves(test, context=256)


def repeating(end: str = "", **fields: Any) -> GenerationRequest:
    given = {"max_tokens": 30, "ignore_eos": True, "logprobs": Logprobs(top=2), **fields}
    return completion(PARAGRAPHS + end, **given)


def test_what_a_model_repeats_is_drafted_and_the_same(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        runner = runner_of(engine)
        make_rows_free(engine)
        requests = [repeating(), repeating(" man told"), completion(CITY, max_tokens=30, logprobs=Logprobs(top=2))]
        replies = []
        for wanted in (False, True):
            await forget(engine)
            speculate(engine, wanted)
            replies.append([await collect(engine, request) for request in requests])
        assert runner.accepted >= 20
        assert_same(*replies)
        assert SEA.startswith(replies[1][0].text[:60], SEA.index(" man"))
        # What was drafted wrongly is nowhere: a reply that goes on from there is as it would be.
        prompt = tuple(await engine.tokenize(PARAGRAPHS, special=True))
        longer = (*prompt, *replies[1][0].tokens, *await engine.tokenize(" But then he", special=False))
        after = completion(longer, logprobs=Logprobs(top=2), max_tokens=12)
        reused = await collect(engine, after)
        assert reused.started.cached_tokens >= len(prompt)
        await forget(engine)
        assert_same([await collect(engine, after)], [reused])

    with_halves(test, context=512)


def test_several_replies_are_drafted_together(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        make_rows_free(engine)
        requests = [repeating(end, max_tokens=24) for end in ("", " man went down", f"\n{CITY[:40]}")]
        replies = []
        for wanted in (False, True):
            await forget(engine)
            speculate(engine, wanted)
            replies.append(list(await asyncio.gather(*(collect(engine, request) for request in requests))))
        assert runner_of(engine).accepted >= 24
        assert_same(*replies)

    with_halves(test, slots=3, context=512, gap_ms=100_000)


def test_a_seed_gives_the_same_reply(with_halves: Run) -> None:
    """At this temperature the repeated text is nearly certain, so that rounding does not reach the chance."""

    async def test(engine: LlamaEngine) -> None:
        texts = []
        for wanted in (False, True):
            speculate(engine, wanted)
            make_rows_free(engine)
            asked = [repeating(sampling=Sampling(temperature=0.4, seed=seed), max_tokens=24) for seed in (1, 2)]
            texts.append([(await collect(engine, request)).text for request in asked])
        assert texts[0] == texts[1]
        assert runner_of(engine).accepted >= 20

    with_halves(test, context=512)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_for_a_seed(temperature: float, with_engine: Run) -> None:
    """With weights of few bits, where rounding reaches the chance."""

    async def test(engine: LlamaEngine) -> None:
        make_rows_free(engine)
        runner = runner_of(engine)
        asked = repeating(sampling=Sampling(temperature=temperature, seed=7))
        texts = {(await collect(engine, asked)).text for _ in range(2)}
        assert len(texts) == 1
        assert not runner.drafted
        await collect(engine, repeating(sampling=Sampling(temperature=temperature)))
        assert runner.drafted

    with_engine(test, context=512)


def test_without_speculation_nothing_is_drafted(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await collect(engine, repeating(max_tokens=20))
        assert not runner_of(engine).drafted

    with_halves(test, context=512, speculation=False)

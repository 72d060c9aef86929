"""Greedy replies of the real model with and without reuse of prefixes.

Texts need not be equal: llama.cpp computes a single row with other kernels than several rows, so log probabilities of
f16 weights differ by up to 0.01. A reply must be the same up to the first token whose two most likely candidates are
closer than TIE. Equal texts are not sufficient either, because a wrong prefix may lead to the same words: log
probabilities up to there may differ by TOLERANCE. The last test shows that one mistake token in a prefix is detected.
"""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from dragoman.core.engine import stream_events
from dragoman.core.request import GenerationRequest, Logprobs
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.sequences import MIN_SHARED_TOKENS
from tests.engines.llama_fixtures import (
    CITY,
    SEA,
    Collected,
    assert_same,
    clear_memory,
    collect,
    completion,
    runner_of,
    short_reply,
    wait_until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def model_path(halves_path: Path) -> Path:
    return halves_path


ENDS = ["He said:", "No one knew why.", "The gulls", "First of all,", "In the evening", "A child asked"]


async def collect_without_reuse(engine: LlamaEngine, requests: list[GenerationRequest]) -> list[Collected]:
    answers = []
    for request in requests:
        await clear_memory(engine)
        answers.append(await collect(engine, request))
        assert answers[-1].started.cached_tokens == 0
    return answers


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.engine_options(slots=3, context=256)
async def test_replies_do_not_depend_on_the_schedule(engine: LlamaEngine, seed: int) -> None:
    rng = random.Random(seed)
    texts = [rng.choice([SEA, CITY])[: rng.randint(200, 320)] + end for end in ENDS[: 3 + seed]]

    async def later(engine: LlamaEngine, request: GenerationRequest, seconds: float) -> Collected:
        await asyncio.sleep(seconds)
        return await collect(engine, request)

    requests = [short_reply(text) for text in texts]
    alone = await collect_without_reuse(engine, requests)
    await clear_memory(engine)
    delays = [rng.choice([0.0, 0.0, 0.1, 0.4]) for _ in requests]
    together = await asyncio.gather(
        *(later(engine, request, delay) for request, delay in zip(requests, delays, strict=True))
    )
    assert sum(answer.started.cached_tokens for answer in together) >= MIN_SHARED_TOKENS
    assert_same(alone, list(together))
    order = rng.sample(range(len(requests)), len(requests))
    again = {at: await collect(engine, requests[at]) for at in order}
    assert all(answer.started.cached_tokens >= MIN_SHARED_TOKENS for answer in again.values())
    assert_same(alone, [again[at] for at in range(len(requests))])


@pytest.mark.engine_options(context=256)
async def test_next_turn_reuses_prompt_and_reply(engine: LlamaEngine) -> None:
    first = await collect(engine, short_reply(SEA))
    prompt = tuple(await engine.tokenize(SEA, special=True))
    longer = short_reply((*prompt, *first.tokens, *await engine.tokenize(" Then he", special=False)))
    second = await collect(engine, longer)
    # The last token of a reply was never decoded.
    assert second.started.cached_tokens == len(prompt) + len(first.tokens) - 1
    assert second.finished.usage is not None
    assert second.finished.usage.cached == second.started.cached_tokens
    assert_same(await collect_without_reuse(engine, [longer]), [second])


@pytest.mark.engine_options(context=256)
async def test_prefix_of_a_running_job_is_reused(engine: LlamaEngine) -> None:
    running = stream_events(engine, completion(SEA, max_tokens=120, ignore_eos=True))
    await anext(running)
    answer = await collect(engine, short_reply(SEA + ENDS[0]))
    assert answer.started.cached_tokens >= 70
    await running.aclose()
    assert_same(await collect_without_reuse(engine, [short_reply(SEA + ENDS[0])]), [answer])


@pytest.mark.engine_options(slots=4, context=256)
async def test_replies_continue_after_a_move_to_another_slot(engine: LlamaEngine) -> None:
    """Four jobs decode in adjacent slots, the second ends, and another job moves into its slot."""
    texts = (SEA, CITY, SEA[20:], CITY[20:])
    requests = [msgspec.structs.replace(short_reply(text), max_tokens=40) for text in texts]

    alone = await collect_without_reuse(engine, [request for at, request in enumerate(requests) if at != 1])
    await clear_memory(engine)
    scheduler = runner_of(engine).scheduler
    occupied = scheduler.sequences.occupied
    others = [asyncio.create_task(collect(engine, requests[0]))]
    await wait_until(lambda: len(occupied) == 1)
    leaving = stream_events(engine, requests[1])
    await anext(leaving)
    others += [asyncio.create_task(collect(engine, request)) for request in requests[2:]]
    await wait_until(lambda: len(occupied) == 4)
    assert [slot.sequence for slot in scheduler.slots.values()] == [0, 1, 2, 3]
    await leaving.aclose()
    seen = []
    while not all(other.done() for other in others):
        seen.append(frozenset(occupied))
        await asyncio.sleep(0.001)
    assert frozenset({0, 1, 2}) in seen
    assert_same(alone, [await other for other in others])


@pytest.mark.engine_options(context=256, isolate=True)
async def test_isolated_principals_share_no_prefixes(engine: LlamaEngine) -> None:
    cached = [
        (await collect(engine, short_reply(SEA, principal=principal))).started.cached_tokens
        for principal in ("ann", "bob", "ann")
    ]
    assert cached[:2] == [0, 0]
    assert cached[2] >= 70


@pytest.mark.engine_options(context=256)
async def test_prompt_logprobs_disable_reuse(engine: LlamaEngine) -> None:
    await collect(engine, short_reply(SEA))
    read = await collect(engine, completion(SEA, max_tokens=1, logprobs=Logprobs(prompt=0)))
    assert read.started.cached_tokens == 0
    assert len(read.started.prompt_logprobs) == read.started.prompt_tokens


@pytest.mark.parametrize("mistake", ["left out", "twice", "another", "the last left out"])
@pytest.mark.engine_options(context=256)
async def test_one_wrong_token_in_a_prefix_is_detected(engine: LlamaEngine, mistake: str) -> None:
    prompt = tuple(await engine.tokenize(SEA, special=True))
    spoilt = {
        "left out": (*prompt[:40], *prompt[41:]),
        "twice": (*prompt[:-9], prompt[-10], *prompt[-9:]),
        "another": (*prompt[:60], 504, *prompt[61:]),
        "the last left out": prompt[:-1],
    }
    replies = await collect_without_reuse(engine, [short_reply(prompt), short_reply(spoilt[mistake])])
    with pytest.raises(AssertionError):
        assert_same(replies[:1], replies[1:])

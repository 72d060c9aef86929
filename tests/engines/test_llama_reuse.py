"""Greedy replies of the real model with and without reuse of prefixes.

Texts need not be equal: llama.cpp computes a single row with other kernels than several rows, so log probabilities of
f16 weights differ by up to 0.01. A reply must be the same up to the first token whose two most likely candidates are
closer than TIE. Equal texts are not sufficient either, because a wrong prefix may lead to the same words: log
probabilities up to there may differ by TOLERANCE. The last test shows that one mistake token in a prefix is detected.
"""

import asyncio
import random

import msgspec
import pytest

from dragoman.core.request import GenerationRequest, Logprobs
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.sequences import MIN_SHARED_TOKENS
from tests.engines.llama_fixtures import Collected, Run, collect, completion, wait_until_idle

TIE = 0.03
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
ENDS = ["He said:", "No one knew why.", "The gulls", "First of all,", "In the evening", "A child asked"]


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
    assert engine.loaded is not None
    runner = engine.loaded.runner
    runner.scheduler = runner.schedule()
    runner.context.clear_all()


async def collect_without_reuse(engine: LlamaEngine, requests: list[GenerationRequest]) -> list[Collected]:
    answers = []
    for request in requests:
        await clear_memory(engine)
        answers.append(await collect(engine, request))
        assert answers[-1].started.cached_tokens == 0
    return answers


@pytest.mark.parametrize("seed", range(2))
def test_replies_do_not_depend_on_the_schedule(with_halves: Run, seed: int) -> None:
    rng = random.Random(seed)
    texts = [rng.choice([SEA, CITY])[: rng.randint(200, 320)] + end for end in ENDS[: 3 + seed]]

    async def later(engine: LlamaEngine, request: GenerationRequest, seconds: float) -> Collected:
        await asyncio.sleep(seconds)
        return await collect(engine, request)

    async def test(engine: LlamaEngine) -> None:
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

    with_halves(test, slots=3, context=256)


def test_next_turn_reuses_prompt_and_reply(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        first = await collect(engine, short_reply(SEA))
        prompt = tuple(await engine.tokenize(SEA, special=True))
        longer = short_reply((*prompt, *first.tokens, *await engine.tokenize(" Then he", special=False)))
        second = await collect(engine, longer)
        # The last token of a reply was never decoded.
        assert second.started.cached_tokens == len(prompt) + len(first.tokens) - 1
        assert second.finished.usage is not None
        assert second.finished.usage.cached == second.started.cached_tokens
        assert_same(await collect_without_reuse(engine, [longer]), [second])

    with_halves(test, context=256)


def test_prefix_of_a_running_job_is_reused(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        running = engine.generate(completion(SEA, max_tokens=120, ignore_eos=True))
        await anext(running)
        answer = await collect(engine, short_reply(SEA + ENDS[0]))
        assert answer.started.cached_tokens >= 70
        await running.aclose()
        assert_same(await collect_without_reuse(engine, [short_reply(SEA + ENDS[0])]), [answer])

    with_halves(test, context=256)


def test_replies_continue_after_a_move_to_another_slot(with_halves: Run) -> None:
    """Four jobs decode in adjacent slots, the second ends, and another job moves into its slot."""
    texts = (SEA, CITY, SEA[20:], CITY[20:])
    requests = [msgspec.structs.replace(short_reply(text), max_tokens=40) for text in texts]

    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        alone = await collect_without_reuse(engine, [request for at, request in enumerate(requests) if at != 1])
        await clear_memory(engine)
        scheduler = engine.loaded.runner.scheduler
        occupied = scheduler.sequences.occupied
        others = [asyncio.create_task(collect(engine, requests[0]))]
        while not occupied:  # noqa: ASYNC110  (changes in another thread)
            await asyncio.sleep(0)
        leaving = engine.generate(requests[1])
        await anext(leaving)
        others += [asyncio.create_task(collect(engine, request)) for request in requests[2:]]
        while len(occupied) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [slot.sequence for slot in scheduler.slots.values()] == [0, 1, 2, 3]
        await leaving.aclose()
        seen = []
        while not all(other.done() for other in others):
            seen.append(frozenset(occupied))
            await asyncio.sleep(0.001)
        assert frozenset({0, 1, 2}) in seen
        assert_same(alone, [await other for other in others])

    with_halves(test, slots=4, context=256)


def test_isolated_principals_share_no_prefixes(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        cached = [
            (await collect(engine, short_reply(SEA, principal=principal))).started.cached_tokens
            for principal in ("ann", "bob", "ann")
        ]
        assert cached[:2] == [0, 0]
        assert cached[2] >= 70

    with_halves(test, context=256, isolate=True)


def test_prompt_logprobs_disable_reuse(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await collect(engine, short_reply(SEA))
        read = await collect(engine, completion(SEA, max_tokens=1, logprobs=Logprobs(prompt=True)))
        assert read.started.cached_tokens == 0
        assert len(read.started.prompt_logprobs) == read.started.prompt_tokens

    with_halves(test, context=256)


@pytest.mark.parametrize("mistake", ["left out", "twice", "another", "the last left out"])
def test_one_wrong_token_in_a_prefix_is_detected(with_halves: Run, mistake: str) -> None:
    async def test(engine: LlamaEngine) -> None:
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

    with_halves(test, context=256)

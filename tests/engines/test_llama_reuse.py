"""Greedy replies with and without reuse of what others computed, on the real model.

Equal texts are too strong a demand: a row that is computed alone takes another way through llama.cpp's kernels than one
among others, and its sums come out a little different; with weights in half floats (`halves` says why those), by up to
0.01 in the logarithm of a probability. So a reply must be the same up to the first token whose two likeliest candidates
are closer than TIE. Equal texts are also too weak, since a wrong prefix can lead to the same words: log probabilities
up to there may differ by TOLERANCE. The last test shows that one wrong token in a prefix is seen.
"""

import asyncio
import random

import msgspec
import pytest

from dragoman.core.request import GenerationRequest, Logprobs
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.sequences import WORTH
from tests.engines.running import Collected, Run, collect, completion, idle

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
ENDS = ["He said:", "Nobody knew why.", "The gulls", "First of all,", "In the evening", "A child asked"]


def asked(prompt: str | tuple[int, ...], **fields: object) -> GenerationRequest:
    return completion(prompt, max_tokens=10, ignore_eos=True, logprobs=Logprobs(top=2), **fields)


def differences(one: Collected, other: Collected) -> list[float]:
    """Of the log probabilities up to where the replies may part; they must not part before."""
    found = []
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        if left.token != right.token:
            gap = abs((left.top[0].logprob or 0) - (left.top[1].logprob or 0))
            assert gap < TIE, f"{one.text!r} and {other.text!r} part without a tie"
            break
        found.append(abs((left.logprob or 0) - (right.logprob or 0)))
    return found


def assert_same(ones: list[Collected], others: list[Collected]) -> None:
    found = [value for one, other in zip(ones, others, strict=True) for value in differences(one, other)]
    assert max(found, default=0) < TOLERANCE


async def forget(engine: LlamaEngine) -> None:
    """As if nothing had been computed before; the engine is idle."""
    await idle(engine)
    assert engine.loaded is not None
    runner = engine.loaded.runner
    runner.scheduler = runner.schedule()
    runner.context.clear_all()


async def fresh(engine: LlamaEngine, requests: list[GenerationRequest]) -> list[Collected]:
    answers = []
    for request in requests:
        await forget(engine)
        answers.append(await collect(engine, request))
        assert answers[-1].started.cached_tokens == 0
    return answers


@pytest.mark.parametrize("seed", range(2))
def test_replies_are_the_same_in_any_schedule(with_halves: Run, seed: int) -> None:
    chance = random.Random(seed)
    texts = [chance.choice([SEA, CITY])[: chance.randint(200, 320)] + end for end in ENDS[: 3 + seed]]

    async def later(engine: LlamaEngine, request: GenerationRequest, seconds: float) -> Collected:
        await asyncio.sleep(seconds)
        return await collect(engine, request)

    async def test(engine: LlamaEngine) -> None:
        requests = [asked(text) for text in texts]
        alone = await fresh(engine, requests)
        await forget(engine)
        delays = [chance.choice([0.0, 0.0, 0.1, 0.4]) for _ in requests]
        together = await asyncio.gather(
            *(later(engine, request, delay) for request, delay in zip(requests, delays, strict=True))
        )
        assert sum(answer.started.cached_tokens for answer in together) >= WORTH
        assert_same(alone, list(together))
        order = chance.sample(range(len(requests)), len(requests))
        again = {at: await collect(engine, requests[at]) for at in order}
        assert all(answer.started.cached_tokens >= WORTH for answer in again.values())
        assert_same(alone, [again[at] for at in range(len(requests))])

    with_halves(test, slots=3, context=256)


def test_the_next_turn_finds_prompt_and_reply(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        first = await collect(engine, asked(SEA))
        prompt = tuple(await engine.tokenize(SEA, special=True))
        longer = asked((*prompt, *first.tokens, *await engine.tokenize(" Then he", special=False)))
        second = await collect(engine, longer)
        # The last token of a reply was never decoded.
        assert second.started.cached_tokens == len(prompt) + len(first.tokens) - 1
        assert second.finished.usage is not None
        assert second.finished.usage.cached == second.started.cached_tokens
        assert_same(await fresh(engine, [longer]), [second])

    with_halves(test, context=256)


def test_a_prefix_is_taken_from_a_job_that_is_still_running(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        running = engine.generate(completion(SEA, max_tokens=120, ignore_eos=True))
        await anext(running)
        answer = await collect(engine, asked(SEA + ENDS[0]))
        assert answer.started.cached_tokens >= 70
        await running.aclose()
        assert_same(await fresh(engine, [asked(SEA + ENDS[0])]), [answer])

    with_halves(test, context=256)


def test_replies_go_on_where_their_texts_were_moved_to(with_halves: Run) -> None:
    """Four decode side by side, the second leaves, and another one moves into its place."""
    texts = (SEA, CITY, SEA[20:], CITY[20:])
    requests = [msgspec.structs.replace(asked(text), max_tokens=40) for text in texts]

    async def test(engine: LlamaEngine) -> None:
        assert engine.loaded is not None
        alone = await fresh(engine, [request for at, request in enumerate(requests) if at != 1])
        await forget(engine)
        scheduler = engine.loaded.runner.scheduler
        taken = scheduler.sequences.taken
        others = [asyncio.create_task(collect(engine, requests[0]))]
        while not taken:  # noqa: ASYNC110  (it fills in another thread)
            await asyncio.sleep(0)
        leaving = engine.generate(requests[1])
        await anext(leaving)
        others += [asyncio.create_task(collect(engine, request)) for request in requests[2:]]
        while len(taken) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [slot.sequence for slot in scheduler.slots.values()] == [0, 1, 2, 3]
        await leaving.aclose()
        seen = []
        while not all(other.done() for other in others):
            seen.append(frozenset(taken))
            await asyncio.sleep(0.001)
        assert frozenset({0, 1, 2}) in seen
        assert_same(alone, [await other for other in others])

    with_halves(test, slots=4, context=256)


def test_principals_may_be_kept_apart(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        cached = [
            (await collect(engine, asked(SEA, principal=principal))).started.cached_tokens
            for principal in ("ann", "bob", "ann")
        ]
        assert cached[:2] == [0, 0]
        assert cached[2] >= 70

    with_halves(test, context=256, isolate=True)


def test_prompt_log_probabilities_are_all_computed(with_halves: Run) -> None:
    async def test(engine: LlamaEngine) -> None:
        await collect(engine, asked(SEA))
        read = await collect(engine, completion(SEA, max_tokens=1, logprobs=Logprobs(prompt=True)))
        assert read.started.cached_tokens == 0
        assert len(read.started.prompt_logprobs) == read.started.prompt_tokens

    with_halves(test, context=256)


@pytest.mark.parametrize("wrong", ["left out", "twice", "another", "the last left out"])
def test_one_wrong_token_in_a_prefix_would_be_seen(with_halves: Run, wrong: str) -> None:
    async def test(engine: LlamaEngine) -> None:
        prompt = tuple(await engine.tokenize(SEA, special=True))
        spoilt = {
            "left out": (*prompt[:40], *prompt[41:]),
            "twice": (*prompt[:-9], prompt[-10], *prompt[-9:]),
            "another": (*prompt[:60], 504, *prompt[61:]),
            "the last left out": prompt[:-1],
        }
        replies = await fresh(engine, [asked(prompt), asked(spoilt[wrong])])
        with pytest.raises(AssertionError):
            assert_same(replies[:1], replies[1:])

    with_halves(test, context=256)

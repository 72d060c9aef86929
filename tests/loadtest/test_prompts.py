import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.loadtest.prompts import HEAD, WORDS, Prompts, measure


@pytest.mark.parametrize(("fixed", "per_word"), [(0, 1.0), (31, 1.0), (12, 1.3), (5, 3.7)])
@pytest.mark.parametrize("tokens", [64, 256, 4000])
def test_words_for_a_number_of_tokens(fixed: int, per_word: float, tokens: int) -> None:
    async def count(text: str) -> int:
        return fixed + round(per_word * len(text.removeprefix(HEAD).split()))

    found = asyncio.run(measure(count, tokens, seed=1))
    assert found is not None
    got = fixed + round(per_word * found.words(tokens))
    assert got == pytest.approx(tokens, rel=0.05, abs=2)


@pytest.mark.parametrize(("fixed", "per_word", "tokens"), [(48, 1.0, 55), (48, 1.2, 60), (3, 1.0, 5)])
def test_counted_texts_are_not_longer_than_the_prompt(fixed: int, per_word: float, tokens: int) -> None:
    counted = []

    async def count(text: str) -> int:
        counted.append(fixed + round(per_word * len(text.removeprefix(HEAD).split())))
        return counted[-1]

    assert asyncio.run(measure(count, tokens, seed=1)) is not None
    assert max(counted) <= tokens


def test_server_without_token_counts() -> None:
    async def count(text: str) -> int:
        return 0

    assert asyncio.run(measure(count, 100, seed=1)) is None


@given(st.integers(0, 999), st.integers(1, 300), st.floats(0, 1))
def test_prompts_share_exactly_the_common_words(seed: int, words: int, shared: float) -> None:
    prompts = Prompts(seed, words, shared)
    texts = [prompts.text(number).removeprefix(HEAD).split() for number in range(1, 5)]
    common = round(words * shared)
    for at, one in enumerate(texts):
        assert len(one) == words
        for other in texts[:at]:
            assert one[:common] == other[:common]
            assert common == words or one[common] != other[common]


def test_seed_determines_prompts() -> None:
    assert Prompts(1, 50, 0.5).text(3) == Prompts(1, 50, 0.5).text(3)
    assert Prompts(1, 50, 0.5).text(3) != Prompts(2, 50, 0.5).text(3)


def test_words_are_unique() -> None:
    assert len(set(WORDS)) == len(WORDS)

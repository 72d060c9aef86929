import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import EngineFailed
from dragoman.core.request import Sampling
from dragoman.engines.llama import sampling
from dragoman.engines.llama.binding import Logits
from dragoman.engines.llama.sampling import Penalties, Recipe


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def name(token: int) -> bytes:
    return b"t%d" % token


def test_defaults_come_from_the_model_file_then_from_us() -> None:
    metadata = {
        "general.sampling.temp": "0.600000",
        "general.sampling.top_k": "20",
        "general.sampling.top_p": "high",
        "general.name": "x",
    }
    found = sampling.defaults(metadata)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert sampling.defaults({}) == Recipe(temperature=1.0, top_p=0.95, top_k=64)


@pytest.mark.parametrize("value", ["0", "1e-40", "-1", "nan", "inf", "1e308"])
def test_values_out_of_bounds_in_a_model_file_are_ignored(value: str) -> None:
    keys = sampling.METADATA_KEYS.values()
    found = sampling.defaults(dict.fromkeys(keys, value))
    assert found.repetition_penalty == 1
    assert 0 <= found.temperature <= 100
    assert 0 <= found.top_p <= 1
    assert 0 <= found.min_p <= 1
    assert found.top_k >= 0


def test_a_request_overrides_the_model_and_an_explicit_zero_counts() -> None:
    model = Recipe(temperature=0.6, top_k=20)
    asked = sampling.recipe(Sampling(temperature=0, presence_penalty=0.5, logit_bias={3: 1.0}), model, suppressed=(9,))
    assert (asked.temperature, asked.top_k, asked.presence_penalty) == (0, 20, 0.5)
    assert asked.logit_bias == {3: 1.0, 9: -math.inf}


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, 0xFFFFFFFF])
def test_every_seed_is_one_that_c_takes_literally(seed: int) -> None:
    found = sampling.recipe(Sampling(seed=seed), Recipe()).seed
    assert 0 <= found < 0xFFFFFFFF
    assert found == sampling.recipe(Sampling(seed=seed), Recipe()).seed


def test_requests_without_a_seed_differ() -> None:
    assert len({sampling.recipe(Sampling(), Recipe()).seed for _ in range(8)}) > 1


def penalised(logits: Logits, recipe: Recipe, prompt: Sequence[int], reply: Sequence[int]) -> list[float]:
    penalties = Penalties(recipe, prompt)
    for token in reply:
        penalties.count(token)
    penalties.apply(logits)
    return [float(value) for value in logits]


def test_presence_and_frequency_count_the_reply() -> None:
    recipe = Recipe(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalised(logits_of(1, 1, 1, 1), recipe, [0, 3], [2, 1, 2, 2, 2]) == [1, 0.25, -0.5, 1]


def test_repetition_concerns_prompt_and_reply_alike() -> None:
    assert penalised(logits_of(2, -2, 2, -2), Recipe(repetition_penalty=2.0), [1, 1], [0, 0, 0]) == [1, -4, 2, -2]


TOKENS = st.lists(st.integers(0, 199), max_size=300)


@given(TOKENS, TOKENS, st.sampled_from([0.5, 1.0, 1.5]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25]))
def test_penalties_are_what_their_inventors_say(
    prompt: list[int], reply: list[int], repetition: float, presence: float, frequency: float
) -> None:
    recipe = Recipe(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    logits = np.linspace(-2, 2, 200, dtype=np.float32)
    expected = []
    for token, value in enumerate(logits.tolist()):
        if token in {*prompt, *reply}:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - frequency * reply.count(token) - presence * (token in reply))
    assert penalised(logits, recipe, prompt, reply) == pytest.approx(expected, abs=1e-5)


def test_the_arrays_of_the_penalties_are_kept() -> None:
    penalties = Penalties(Recipe(repetition_penalty=1.1), range(1000))
    arrays = {id(penalties.tokens): penalties.tokens}
    for token in range(20_000):
        penalties.count(token)
        arrays[id(penalties.tokens)] = penalties.tokens
    assert len(arrays) < 10
    assert len(penalties.places) == 20_000


def test_log_probabilities_add_up_and_the_likeliest_come_first() -> None:
    logits = logits_of(0, 3, 1, 2)
    found = sampling.token_logprob(logits, 2, 4, name)
    assert [rival.token for rival in found.top] == [1, 3, 2, 0]
    assert sum(math.exp(rival.logprob or 0) for rival in found.top) == pytest.approx(1)
    assert found.logprob == pytest.approx(found.top[2].logprob)
    assert (found.text, found.top[0].text) == (b"t2", b"t1")


def test_more_rivals_than_tokens_are_all_tokens() -> None:
    assert len(sampling.token_logprob(logits_of(0, 1), 0, 20, name).top) == 2


def test_an_impossible_token_has_a_number_that_json_can_say() -> None:
    assert sampling.token_logprob(logits_of(0, -math.inf), 1, 0, name).logprob == -9999.0


@pytest.mark.parametrize("values", [(math.nan, 1), (-math.inf, -math.inf), (math.inf, 0)])
def test_logits_that_are_not_numbers_fail_the_request(values: tuple[float, ...]) -> None:
    with pytest.raises(EngineFailed, match="not numbers"):
        sampling.token_logprob(logits_of(*values), 0, 0, name)

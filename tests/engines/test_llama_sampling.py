import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import EngineFailed
from dragoman.core.request import Sampling
from dragoman.engines.llama import sampling
from dragoman.engines.llama.binding import Logits
from dragoman.engines.llama.sampling import Penalties, SamplingParams, complete_sampling, default_sampling


def logits_of(*values: float) -> Logits:
    return np.array(values, dtype=np.float32)


def name(token: int) -> bytes:
    return b"t%d" % token


def test_defaults_come_from_the_model_file_first() -> None:
    metadata = {
        "general.sampling.temp": "0.600000",
        "general.sampling.top_k": "20",
        "general.sampling.top_p": "high",
        "general.name": "x",
    }
    found = default_sampling(metadata)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert default_sampling({}) == SamplingParams(temperature=1.0, top_p=0.95, top_k=64)


@pytest.mark.parametrize("value", ["0", "1e-40", "-1", "nan", "inf", "1e308"])
def test_invalid_values_in_a_model_file_are_ignored(value: str) -> None:
    keys = sampling.METADATA_KEYS.values()
    found = default_sampling(dict.fromkeys(keys, value))
    assert found.repetition_penalty == 1
    assert 0 <= found.temperature <= 100
    assert 0 <= found.top_p <= 1
    assert 0 <= found.min_p <= 1
    assert found.top_k >= 0


def test_request_overrides_the_model_even_with_zero() -> None:
    model = SamplingParams(temperature=0.6, top_k=20)
    request = Sampling(temperature=0, presence_penalty=0.5, logit_bias={3: 1.0})
    found = complete_sampling(request, model, suppressed=(9,))
    assert (found.temperature, found.top_k, found.presence_penalty) == (0, 20, 0.5)
    assert found.logit_bias == {3: 1.0, 9: -math.inf}


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, 0xFFFFFFFF])
def test_seeds_are_mapped_below_the_random_marker(seed: int) -> None:
    first, second = (complete_sampling(Sampling(seed=seed), SamplingParams()).seed for _ in range(2))
    assert 0 <= first == second < 0xFFFFFFFF


def test_requests_without_a_seed_differ() -> None:
    assert len({complete_sampling(Sampling(), SamplingParams()).seed for _ in range(8)}) > 1


TOKENS = st.lists(st.integers(0, 199), max_size=300)


@given(TOKENS, TOKENS, st.sampled_from([0.5, 1.0, 1.5]), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 0.25]))
def test_penalties_match_their_definitions(
    prompt: list[int], reply: list[int], repetition: float, presence: float, frequency: float
) -> None:
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    logits = np.linspace(-2, 2, 200, dtype=np.float32)
    expected = []
    for token, value in enumerate(logits.tolist()):
        if token in {*prompt, *reply}:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - frequency * reply.count(token) - presence * (token in reply))
    penalties = Penalties(params, prompt, len(logits))
    for token in reply:
        penalties.count(token)
    penalties.apply(logits)
    assert logits.tolist() == pytest.approx(expected, abs=1e-5)


def test_logprobs_add_up_and_are_sorted() -> None:
    logits = logits_of(0, 3, 1, 2)
    found = sampling.token_logprob(logits, 2, 4, name)
    assert [other.token for other in found.top] == [1, 3, 2, 0]
    assert sum(math.exp(other.logprob or 0) for other in found.top) == pytest.approx(1)
    assert found.logprob == pytest.approx(found.top[2].logprob)
    assert (found.text, found.top[0].text) == (b"t2", b"t1")


def test_more_top_logprobs_than_tokens() -> None:
    assert len(sampling.token_logprob(logits_of(0, 1), 0, 20, name).top) == 2


def test_impossible_token_has_a_finite_logprob() -> None:
    assert sampling.token_logprob(logits_of(0, -math.inf), 1, 0, name).logprob == -9999.0


@pytest.mark.parametrize("values", [(math.nan, 1), (-math.inf, -math.inf), (math.inf, 0)])
def test_non_finite_logits_fail_the_request(values: tuple[float, ...]) -> None:
    with pytest.raises(EngineFailed, match="NaN or infinity"):
        sampling.token_logprob(logits_of(*values), 0, 0, name)

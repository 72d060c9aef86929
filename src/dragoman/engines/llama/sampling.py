"""Picks tokens from logits and computes log probabilities.

    logits ──bias──> ──penalties──> ──mask──> ──top_k, top_p, min_p, temperature──> random choice from the seed
                                            └──temperature 0──> most likely token

Bias and penalties concern few tokens and are written into the logits here. The other steps visit the whole vocabulary
and run in C. The grammar's mask comes after the bias, so a bias cannot select a token that the grammar forbids.

Rules
1. Parameters that a request omits come from the model file (`general.sampling.*`), then from DEFAULTS.
2. The presence and frequency penalties count the tokens of the reply, as defined by OpenAI. The repetition penalty
   applies to every token of prompt and reply, however often it occurs, as in the CTRL paper.
3. The same seed and the same logits give the same tokens. A request without a seed gets a random one.
4. Log probabilities are those of the model, before bias, penalties, mask and sampling.
5. NaN or infinite logits fail the request. C code never sees them because it would abort the process.
"""

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import EngineFailed
from dragoman.core.events import TokenLogprob
from dragoman.core.request import RepetitionPenalty, Sampling
from dragoman.engines.llama.binding import Context, Logits
from dragoman.engines.llama.library import library
from dragoman.engines.token_engine import MIN_LOGPROB

TokenMask = NDArray[np.bool_]
"""For each token whether it is allowed next."""

SEED_LIMIT = 0xFFFFFFFF
"""Seeds are smaller. llama.cpp takes this value as "random"."""

MIN_TEMPERATURE = 1e-4
"""Below this the most likely token is picked, because dividing the logits would overflow."""

MAX_BIAS = 1e30
MAX_TOP_K = 2**31 - 1

NOT_FINITE = "the model's output contains NaN or infinity"


class SamplingParams(msgspec.Struct, frozen=True):
    """Complete sampling parameters. The bounds apply to values from a model file; requests are checked earlier."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.95
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 64
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = {}

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


DEFAULTS = SamplingParams()
METADATA_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def default_sampling(metadata: Mapping[str, str]) -> SamplingParams:
    """Return the defaults of the model file. Invalid values are ignored."""
    params = DEFAULTS
    for field, key in METADATA_KEYS.items():
        with contextlib.suppress(KeyError, msgspec.ValidationError):
            fields = {**msgspec.structs.asdict(params), field: metadata[key]}
            params = msgspec.convert(fields, SamplingParams, strict=False)
    return params


def complete_sampling(sampling: Sampling, defaults: SamplingParams, suppressed: Sequence[int] = ()) -> SamplingParams:
    """Complete the request's sampling with the model's defaults. The `suppressed` tokens are never sampled."""
    given = {field: value for field, value in msgspec.structs.asdict(sampling).items() if value is not None}
    seed = random.randrange(SEED_LIMIT) if sampling.seed is None else sampling.seed % SEED_LIMIT
    bias = {**sampling.logit_bias, **dict.fromkeys(suppressed, -math.inf)}
    return SamplingParams(**{**msgspec.structs.asdict(defaults), **given, "seed": seed, "logit_bias": bias})


class TokenSampler:
    """Picks the tokens of one reply."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.penalties = Penalties(params, prompt, vocab_size) if params.has_penalties else None
        self.bias_tokens = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        values = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        self.bias_values = values.clip(-MAX_BIAS, MAX_BIAS).astype(np.float32)
        self.library = library()
        self.sampler = None if params.temperature < MIN_TEMPERATURE else _create_sampler(params)

    def pick(self, context: Context, row: int, allowed: TokenMask | None = None) -> int:
        logits = context.logits(row)
        if len(self.bias_tokens):
            logits[self.bias_tokens] += self.bias_values
        if self.penalties is not None:
            self.penalties.apply(logits)
        if not math.isfinite(logits.max()):
            raise EngineFailed(NOT_FINITE)
        if allowed is not None:
            np.copyto(logits, -np.inf, where=~allowed)
        if self.sampler is None:
            token = int(logits.argmax())
        else:
            token = self.library.llama_sampler_sample(self.sampler, context.handle, row)
        if token < 0:
            raise EngineFailed("no token could be sampled")
        if allowed is not None and not allowed[token]:
            # Rounding in the random choice may select a token of probability 0.
            token = int(context.logits(row).argmax())
        self.count(token)
        return token

    def count(self, token: int) -> None:
        """Record a token of the reply, whether it was picked or forced."""
        if self.penalties is not None:
            self.penalties.count(token)

    def close(self) -> None:
        if self.sampler is not None:
            self.library.llama_sampler_free(self.sampler)
            self.sampler = None


def _create_sampler(params: SamplingParams) -> int:
    """Return a chain of llama.cpp samplers: top_k, top_p, min_p, temperature, then a random choice."""
    c = library()
    chain: int = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    for sampler in (
        c.llama_sampler_init_top_k(min(params.top_k, MAX_TOP_K)),
        c.llama_sampler_init_top_p(params.top_p, 1),
        c.llama_sampler_init_min_p(params.min_p, 1),
        c.llama_sampler_init_temp(params.temperature),
        c.llama_sampler_init_dist(params.seed),
    ):
        c.llama_sampler_chain_add(chain, sampler)
    return chain


class Penalties:
    """Penalties of the tokens of prompt and reply, in arrays with an entry for each token of the vocabulary."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.factor = np.float32(params.repetition_penalty)
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.occurrences: Counter[int] = Counter()
        self.costs = np.zeros(vocab_size, dtype=np.float32)
        self.is_used = np.zeros(vocab_size, dtype=np.bool_)
        self.is_used[list(prompt)] = True

    def count(self, token: int) -> None:
        """Record a token of the reply."""
        self.occurrences[token] += 1
        self.costs[token] = self.presence + self.frequency * self.occurrences[token]
        self.is_used[token] = True

    def apply(self, logits: Logits) -> None:
        if self.factor != 1:
            values = logits[self.is_used]
            logits[self.is_used] = np.where(values > 0, values / self.factor, values * self.factor)
        logits -= self.costs


def token_logprob(logits: Logits, token: int, top: int, text: Callable[[int], bytes]) -> TokenLogprob:
    """Return the token's log probability, with those of the `top` most likely tokens, best first."""
    peak = logits.max()
    if not math.isfinite(peak):
        raise EngineFailed(NOT_FINITE)
    total = float(peak) + math.log(float(np.exp(logits - peak).sum()))

    def logprob(token: int) -> float:
        return max(float(logits[token]) - total, MIN_LOGPROB)

    alternatives = (TokenLogprob(other, text(other), logprob(other)) for other in _most_likely(logits, top))
    return TokenLogprob(token, text(token), logprob(token), tuple(alternatives))


def _most_likely(logits: Logits, top: int) -> list[int]:
    top = min(top, len(logits))
    if top <= 0:
        return []
    tokens = np.argpartition(logits, -top)[-top:]
    return [int(token) for token in tokens[np.argsort(-logits[tokens], kind="stable")]]

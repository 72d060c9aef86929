"""From logits to a token: what a request and a model file say about sampling, and log probabilities.

    logits ──bias──> ──penalties──> ──mask──> ──top_k, top_p, min_p, temperature──> drawn by chance from the seed
                                            └──temperature 0──> the likeliest

Bias and penalties concern few tokens, so they are written into the logits here; the rest walks the whole vocabulary
and is done in C. The mask of a grammar comes last: whatever a caller biases, nothing else is ever picked.

Rules
1. What a request leaves open comes from the model file (`general.sampling.*`), then from DEFAULTS.
2. The presence and frequency penalties count the tokens of the reply, as OpenAI defines them. The repetition penalty
   concerns every token of prompt and reply, however often it occurs, as its inventors define it.
3. The same seed over the same logits gives the same tokens. A request without a seed gets a random one.
4. Log probabilities are those of the model, before bias, penalties, mask and sampling.
5. Logits that are not numbers fail the request; C code never sees them, because it would end the process.
"""

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
from dragoman.engines.llama.binding import Context, Logits, Sampler

Allowed = NDArray[np.bool_]
"""For each token whether it may come next."""

SEEDS = 0xFFFFFFFF
"""Seeds lie below it; llama.cpp takes this one for "any"."""

LEAST_TEMPERATURE = 1e-4
"""Below it the likeliest token is taken: dividing logits by less leaves no numbers."""

GREATEST_BIAS = 1e30
GREATEST_TOP_K = 2**31 - 1

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

LEAST_GROWTH = 64

NOT_NUMBERS = "the model's output has values that are not numbers"


class Recipe(msgspec.Struct, frozen=True):
    """Sampling with nothing left open. The bounds apply to values of a model file; requests are checked earlier."""

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
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


DEFAULTS = Recipe()
METADATA_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def defaults(metadata: Mapping[str, str]) -> Recipe:
    """What the model's makers recommend. A value that is not a number, or out of bounds, is ignored."""
    found = {field: metadata[key] for field, key in METADATA_KEYS.items() if key in metadata}
    recipe = DEFAULTS
    for field, value in found.items():
        try:
            recipe = msgspec.convert({**msgspec.structs.asdict(recipe), field: value}, Recipe, strict=False)
        except msgspec.ValidationError:
            continue
    return recipe


def recipe(sampling: Sampling, model: Recipe, suppressed: Sequence[int] = ()) -> Recipe:
    """The request's sampling, completed by the model's; the tokens in `suppressed` are never sampled."""
    asked = msgspec.structs.asdict(sampling)
    given = {field: value for field, value in asked.items() if value is not None}
    seed = random.randrange(SEEDS) if sampling.seed is None else sampling.seed % SEEDS
    bias = {**sampling.logit_bias, **dict.fromkeys(suppressed, -math.inf)}
    return Recipe(**{**msgspec.structs.asdict(model), **given, "seed": seed, "logit_bias": bias})


class Picker:
    """Picks the tokens of one reply."""

    def __init__(self, recipe: Recipe, prompt: Sequence[int]) -> None:
        self.penalties = Penalties(recipe, prompt) if recipe.penalises else None
        self.bias_tokens = np.fromiter(recipe.logit_bias.keys(), dtype=np.int64)
        values = np.fromiter(recipe.logit_bias.values(), dtype=np.float64)
        self.bias_values = values.clip(-GREATEST_BIAS, GREATEST_BIAS).astype(np.float32)
        self.sampler = None if recipe.temperature < LEAST_TEMPERATURE else _sampler(recipe)

    def pick(self, context: Context, row: int, allowed: Allowed | None = None) -> int:
        logits = context.logits(row)
        self._shape(logits)
        if not math.isfinite(logits.max()):
            raise EngineFailed(NOT_NUMBERS)
        if allowed is not None:
            np.copyto(logits, -np.inf, where=~allowed)
        token = int(logits.argmax()) if self.sampler is None else self.sampler.draw(context, row)
        if token < 0:
            raise EngineFailed("no token could be sampled")
        if allowed is not None and not allowed[token]:
            # Chance may fall on the very edge of what is possible.
            token = int(context.logits(row).argmax())
        self.count(token)
        return token

    def count(self, token: int) -> None:
        """The reply goes on with a token, picked or not."""
        if self.penalties is not None:
            self.penalties.count(token)

    def close(self) -> None:
        if self.sampler is not None:
            self.sampler.close()

    def _shape(self, logits: Logits) -> None:
        if len(self.bias_tokens):
            logits[self.bias_tokens] += self.bias_values
        if self.penalties is not None:
            self.penalties.apply(logits)


class Penalties:
    """What the tokens of prompt and reply lose. The arrays grow with the distinct tokens and are never built anew: a
    token that is counted costs the same however long the reply is."""

    def __init__(self, recipe: Recipe, prompt: Sequence[int]) -> None:
        self.factor = np.float32(recipe.repetition_penalty)
        self.presence = recipe.presence_penalty
        self.frequency = recipe.frequency_penalty
        known = dict.fromkeys(prompt if self.factor != 1 else ())
        self.times: Counter[int] = Counter()
        self.places = {token: place for place, token in enumerate(known)}
        self.tokens = np.fromiter(known, dtype=np.int64, count=len(known))
        self.costs = np.zeros(len(known), dtype=np.float32)

    def count(self, token: int) -> None:
        """The reply goes on with `token`."""
        place = self.places.setdefault(token, len(self.places))
        if place == len(self.tokens):
            self._grow()
        self.times[token] += 1
        self.tokens[place] = token
        self.costs[place] = self.presence + self.frequency * self.times[token]

    def apply(self, logits: Logits) -> None:
        tokens = self.tokens[: len(self.places)]
        values = logits[tokens]
        if self.factor != 1:
            values = np.where(values > 0, values / self.factor, values * self.factor)
        logits[tokens] = values - self.costs[: len(self.places)]

    def _grow(self) -> None:
        more = max(len(self.tokens), LEAST_GROWTH)
        self.tokens = np.concatenate([self.tokens, np.zeros(more, dtype=np.int64)])
        self.costs = np.concatenate([self.costs, np.zeros(more, dtype=np.float32)])


def _sampler(recipe: Recipe) -> Sampler:
    return Sampler(
        top_k=min(recipe.top_k, GREATEST_TOP_K),
        top_p=recipe.top_p,
        min_p=recipe.min_p,
        temperature=recipe.temperature,
        seed=recipe.seed,
    )


def token_logprob(logits: Logits, token: int, top: int, text: Callable[[int], bytes]) -> TokenLogprob:
    """The token's log probability under the logits, with those of the `top` likeliest tokens, best first."""
    peak = logits.max()
    if not math.isfinite(peak):
        raise EngineFailed(NOT_NUMBERS)
    total = float(peak) + math.log(float(np.exp(logits - peak).sum()))
    rivals = tuple(
        TokenLogprob(rival, text(rival), max(float(logits[rival]) - total, LEAST_LOGPROB))
        for rival in _likeliest(logits, top)
    )
    return TokenLogprob(token, text(token), max(float(logits[token]) - total, LEAST_LOGPROB), rivals)


def _likeliest(logits: Logits, top: int) -> list[int]:
    top = min(top, len(logits))
    if top <= 0:
        return []
    found = np.argpartition(logits, -top)[-top:]
    return [int(token) for token in found[np.argsort(-logits[found], kind="stable")]]

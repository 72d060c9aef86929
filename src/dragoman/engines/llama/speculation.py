"""Drafts tokens that repeat earlier text, so that one decode may confirm several. No model, no clock.

    … a b c d e f … a b c        the last three tokens occurred before, followed by d: draft d, then e, then f
            ^ match

A drafted token costs a row of the next decode, and rows are not free: on a CPU a second row takes nearly as long as the
first. So tokens are drafted only if that is expected to pay, given the hit rate of guesses and the cost of rows.

Rules
1. The text is indexed as it grows, at a constant cost per token.
2. Every guess is compared with the actual token, whether it was drafted or not. So the hit rate is known before
   anything is drafted, and text that begins to repeat is noticed at once.
3. Guesses that continue a confirmed match have a hit rate of their own.
4. The drafts are those with the most expected tokens per second over all jobs that decode. No job may fall below
   MIN_JOB_SPEED of its speed without drafts. With several jobs, a step takes no longer than the target gap, or a
   step without drafts divided by MIN_JOB_SPEED if that is longer.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

GRAM = 3
"""Tokens that must match. Two tokens match too often by accident."""
MAX_AHEAD = 7
"""Drafted tokens of one job. llama.cpp's kernels gain nothing from more rows of one sequence."""
MAX_DRAFTED = 32
"""Drafted tokens of one step. Kernels for 64 rows and more round differently."""
CONFIRMED_TOKENS = 4
"""Tokens after which a match counts as confirmed."""
HISTORY_WEIGHT = 0.95
"""Weight of earlier guesses in a hit rate after each new one."""
MIN_GAIN = 1.05
"""A smaller gain is within the error of measurement."""
MIN_JOB_SPEED = 0.8
LEARNING_RATE, FORGETTING_RATE = 0.25, 0.01
TOKEN_BITS = 24
GRAM_MASK = (1 << GRAM * TOKEN_BITS) - 1
NO_MATCH = -1


class HitRate:
    """Estimated probability that a guess is right. Recent guesses count most."""

    def __init__(self, expected: float, weight: float) -> None:
        self.hits, self.total = expected * weight, weight

    @property
    def value(self) -> float:
        return self.hits / self.total

    def learn(self, hit: bool) -> None:
        self.hits = self.hits * HISTORY_WEIGHT + hit
        self.total = self.total * HISTORY_WEIGHT + 1


class DraftLookup:
    """Indexes one text and guesses its next tokens."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.positions: dict[int, int] = {}
        """For each gram the position after its last occurrence."""
        self.gram = 0
        self.match = NO_MATCH
        """Position of the guessed next token."""
        self.confirmed = 0
        self.new_match_rate, self.confirmed_rate = HitRate(0.4, 4), HitRate(0.9, 4)
        for token in prompt:
            self._add(token)
        self._find_match()

    def append(self, token: int) -> None:
        """Add a token of the reply and compare it with the guess."""
        match, hit = self.match, self.match != NO_MATCH and self.tokens[self.match] == token
        if match != NO_MATCH:
            self._rate(self.confirmed).learn(hit)
        self._add(token)
        if hit:
            self.match, self.confirmed = match + 1, self.confirmed + 1
        else:
            self._find_match()

    def draft_chances(self, most: int) -> list[float]:
        """Return the probabilities that the first, the first two, the first three … guessed tokens are right."""
        if self.match == NO_MATCH:
            return []
        rates = (self._rate(self.confirmed + ahead).value for ahead in range(min(most, MAX_AHEAD)))
        return list(itertools.accumulate(rates, lambda before, value: before * value))

    def guess(self, count: int) -> tuple[int, ...]:
        """Return the guessed next tokens. A match that reaches the end of the text is assumed to repeat."""
        period = len(self.tokens) - self.match
        return tuple(self.tokens[self.match + ahead % period] for ahead in range(count))

    def _rate(self, confirmed: int) -> HitRate:
        return self.confirmed_rate if confirmed >= CONFIRMED_TOKENS else self.new_match_rate

    def _add(self, token: int) -> None:
        if len(self.tokens) >= GRAM:
            self.positions[self.gram] = len(self.tokens)
        self.tokens.append(token)
        self.gram = (self.gram << TOKEN_BITS | token) & GRAM_MASK

    def _find_match(self) -> None:
        self.match = self.positions.get(self.gram, NO_MATCH) if len(self.tokens) >= GRAM else NO_MATCH
        self.confirmed = 0


class StepCost:
    """Estimates the duration of a step as `fixed + row * rows` seconds."""

    def __init__(self) -> None:
        self.fixed = self.row = 0.0

    def seconds(self, rows: int) -> float:
        return self.fixed + self.row * rows

    def record(self, rows: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step with `rows` rows, `drafted` of which were drafted."""
        expected = self.seconds(rows)
        if not expected:
            # Start between a CPU, where a row costs more than the fixed part, and a GPU, where it costs very little.
            self.fixed = self.row = seconds / (1 + rows)
            return
        # Limit the influence of one step: a slow one may only mean that the machine was busy.
        error = LEARNING_RATE * min(max(seconds - expected, -expected / 2), expected / 2)
        if drafted:
            step = error / (1 + rows * rows)
            self.fixed = max(self.fixed + step, 0.0)
            self.row = max(self.row + step * rows, 0.0)
        else:
            # Steps without drafts do not show what a row costs. So scale both parts and move them slowly towards each
            # other, so that drafts are tried again later.
            factor, even = 1 + error / expected, expected / (1 + rows)
            self.fixed = (self.fixed + FORGETTING_RATE * (even - self.fixed)) * factor
            self.row = (self.row + FORGETTING_RATE * (even - self.row)) * factor


def choose_draft_counts(
    cost: StepCost, draft_chances: Mapping[int, Sequence[float]], gap: float, most: int = MAX_DRAFTED
) -> dict[int, int]:
    """Return how many tokens to draft for each job, given the probabilities from `DraftLookup`. Omits zeros."""
    plain = cost.seconds(len(draft_chances))
    if not plain:
        return {}
    longest = max(gap, plain / MIN_JOB_SPEED) if len(draft_chances) > 1 else math.inf
    best, chosen = MIN_GAIN * len(draft_chances) / plain, 0
    # The probabilities of one job decrease, so a guess never precedes the guess that it depends on.
    order = sorted(
        ((chance, job) for job, chances in draft_chances.items() for chance in chances), key=lambda item: -item[0]
    )
    expected = dict.fromkeys(draft_chances, 1.0)
    for count, (chance, job) in enumerate(order[:most], 1):
        seconds = plain + cost.row * count
        expected[job] += chance
        rate = sum(expected.values()) / seconds
        if seconds > longest:
            break
        if rate > best and min(expected.values()) / seconds >= MIN_JOB_SPEED / plain:
            best, chosen = rate, count
    return dict(Counter(job for _, job in order[:chosen]))

"""Tokens that are guessed, so that one decode may confirm several of them. Pure: no model, no clock.

    … a b c d e f … a b c        the last three tokens came before, followed by d: so guess d, then e, then f
            ^ at

A guess costs a row of the next decode, and rows are not free: on a CPU a second row takes nearly as long as the first.
So a guess is made a draft only where it is expected to pay, by what guesses came to and what rows cost until now.

Rules
1. A text is indexed as it grows: a token costs the same however long the text is.
2. What was guessed is compared with what came whether it was a draft or not. Being wrong costs nothing while nothing is
   drafted, and a reply that begins to repeat something is seen at once.
3. A guess that has come true for a while is another matter than one that has just been found: each kind has its own
   chance.
4. Drafts are those that make the most tokens per second, over everybody who is decoding. Nobody gets fewer than
   LEAST_SHARE of the tokens per second that there would be without drafts, so that one that repeats does not slow down
   another that does not; and a step with others in it is expected to take no longer than the gap that is wanted, or
   hardly longer than without drafts where that is more.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

GRAM = 3
"""Tokens that must have come before in this order. Two are found again everywhere, and mostly mean nothing."""
MOST_AHEAD = 7
"""Of one text: from there on llama.cpp's kernels gain nothing by more rows of one sequence."""
MOST_DRAFTED = 32
"""In one step: its kernels for 64 rows and more round in another way."""
PROVEN = 4
MEMORY = 0.95
"""How much of what is known of a chance is left after one more guess."""
LEAST_GAIN = 1.05
"""Less is within what the measuring is wrong by."""
LEAST_SHARE = 0.8
LEARNING, FORGETTING = 0.25, 0.01
TOKEN_BITS = 24
GRAM_MASK = (1 << GRAM * TOKEN_BITS) - 1
NOWHERE = -1


class Chance:
    """How likely it is that a guess comes true; recent ones count most."""

    def __init__(self, expected: float, weight: float) -> None:
        self.true, self.all = expected * weight, weight

    @property
    def value(self) -> float:
        return self.true / self.all

    def learn(self, true: bool) -> None:
        self.true = self.true * MEMORY + true
        self.all = self.all * MEMORY + 1


class Lookup:
    """One text, what its end suggests to come next, and how often that was right."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, int] = {}
        """Where the token lies that came last after a gram."""
        self.gram = 0
        self.at = NOWHERE
        self.confirmed = 0
        self.found, self.proven = Chance(0.4, 4), Chance(0.9, 4)
        for token in prompt:
            self._put(token)
        self._look()

    def append(self, token: int) -> None:
        """The reply goes on with `token`."""
        at, right = self.at, self.at != NOWHERE and self.tokens[self.at] == token
        if at != NOWHERE:
            self._chance(self.confirmed).learn(right)
        self._put(token)
        if right:
            self.at, self.confirmed = at + 1, self.confirmed + 1
        else:
            self._look()

    def hopes(self, most: int) -> list[float]:
        """How likely it is that the first, the first two, the first three … of the next tokens come as guessed."""
        if self.at == NOWHERE:
            return []
        alone = (self._chance(self.confirmed + ahead).value for ahead in range(min(most, MOST_AHEAD)))
        return list(itertools.accumulate(alone, lambda before, value: before * value))

    def guess(self, count: int) -> tuple[int, ...]:
        """The next tokens. A text that repeats its very end is taken to go on doing so."""
        period = len(self.tokens) - self.at
        return tuple(self.tokens[self.at + ahead % period] for ahead in range(count))

    def _chance(self, confirmed: int) -> Chance:
        return self.proven if confirmed >= PROVEN else self.found

    def _put(self, token: int) -> None:
        if len(self.tokens) >= GRAM:
            self.places[self.gram] = len(self.tokens)
        self.tokens.append(token)
        self.gram = (self.gram << TOKEN_BITS | token) & GRAM_MASK

    def _look(self) -> None:
        self.at = self.places.get(self.gram, NOWHERE) if len(self.tokens) >= GRAM else NOWHERE
        self.confirmed = 0


class Cost:
    """What a step takes: `fixed + row * rows` seconds, learnt from steps as they come."""

    def __init__(self) -> None:
        self.fixed = self.row = 0.0

    def seconds(self, rows: int) -> float:
        return self.fixed + self.row * rows

    def took(self, rows: int, drafted: int, seconds: float) -> None:
        """A step with so many rows, of which some were drafted, lasted so long."""
        expected = self.seconds(rows)
        if not expected:
            # Half of a first row is a guess between a CPU, where it is more, and a GPU, where it is nearly nothing.
            self.fixed = self.row = seconds / (1 + rows)
            return
        # A slow step may only mean that the machine was busy, so no step says too much.
        surprise = LEARNING * min(max(seconds - expected, -expected / 2), expected / 2)
        if drafted:
            step = surprise / (1 + rows * rows)
            self.fixed = max(self.fixed + step, 0.0)
            self.row = max(self.row + step * rows, 0.0)
        else:
            self._scale(1 + surprise / expected, expected / (1 + rows))

    def _scale(self, factor: float, even: float) -> None:
        """What a row costs is not seen without drafts, and forgotten slowly: it is found out again now and then."""
        self.fixed = (self.fixed + FORGETTING * (even - self.fixed)) * factor
        self.row = (self.row + FORGETTING * (even - self.row)) * factor


def worthwhile(
    cost: Cost, hopes: Mapping[int, Sequence[float]], gap: float, most: int = MOST_DRAFTED
) -> dict[int, int]:
    """How many tokens to draft for each of those that decode, by their chances; those with none are left out."""
    plain = cost.seconds(len(hopes))
    if not plain:
        return {}
    longest = max(gap, plain / LEAST_SHARE) if len(hopes) > 1 else math.inf
    best, chosen = LEAST_GAIN * len(hopes) / plain, 0
    # The chances of one text fall, so that this order never has a guess before the one that it depends on.
    order = sorted(((chance, job) for job, chances in hopes.items() for chance in chances), key=lambda item: -item[0])
    expected = dict.fromkeys(hopes, 1.0)
    for count, (chance, job) in enumerate(order[:most], 1):
        seconds = plain + cost.row * count
        expected[job] += chance
        rate = sum(expected.values()) / seconds
        if seconds > longest:
            break
        if rate > best and min(expected.values()) / seconds >= LEAST_SHARE / plain:
            best, chosen = rate, count
    return _counts(job for _, job in order[:chosen])


def _counts(jobs: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for job in jobs:
        found[job] = found.get(job, 0) + 1
    return found

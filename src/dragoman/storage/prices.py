"""Prices of models: what the tokens of a request cost.

Rules
1. The exact name of a model decides, otherwise the pattern that matches it with the most characters besides `*` and
   `?`. Without either, its tokens cost nothing.
2. Costs are whole nano-units. Only the cost of a whole request is rounded.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from dragoman.config.aliases import AliasTable
from dragoman.config.quantities import to_nano_units
from dragoman.config.sections import Price

MILLION = 10**6
CACHE_SIZE = 1024
MAX_COST = 10**15
"""Of one request, in nano-units: sums of costs must fit into 64 bits."""


class TokenPrice(NamedTuple):
    """Nano-units for a million tokens."""

    input: int
    cached_input: int
    output: int

    def cost(self, prompt: int, cached: int, completion: int) -> int:
        """`cached` is a part of the prompt."""
        if self is FREE:
            return 0
        cached = min(cached, prompt)
        total = (prompt - cached) * self.input + cached * self.cached_input + completion * self.output
        return min((total + MILLION // 2) // MILLION, MAX_COST)


FREE = TokenPrice(0, 0, 0)


class PriceTable:
    def __init__(self, prices: Mapping[str, Price]) -> None:
        self._patterns = AliasTable({pattern: pattern.lower() for pattern in prices})
        self._prices = {pattern.lower(): _in_nano_units(price) for pattern, price in prices.items()}
        self.price_of = lru_cache(CACHE_SIZE)(self._find)
        """Returns the price of a model by its name."""

    def _find(self, model: str) -> TokenPrice:
        pattern = self._patterns.resolve(model.lower())
        return FREE if pattern is None else self._prices[pattern]


def _in_nano_units(price: Price) -> TokenPrice:
    cached = price.input if price.cached_input is None else price.cached_input
    return TokenPrice(*map(to_nano_units, (price.input, cached, price.output)))

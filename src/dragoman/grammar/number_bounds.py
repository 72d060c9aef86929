"""Bounds of numbers that an automaton over digits cannot follow."""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

GREATEST_DIVISOR = 10_000
"""Of all `multipleOf` in a document, their digits taken as whole numbers and multiplied: an automaton that has to keep
all of them in mind has that many states."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

GREATEST_EXACT = 2**53
"""llguidance reads every number as a double and converts it to a 64-bit integer. Beyond this value it enforces a
different number than the given one. If both bounds of an integer are -2**63 + 512 or less, it recurses until it
crashes."""


def is_exact(value: Any) -> bool:
    """Whether all numbers in a JSON value are read as they are written."""
    if isinstance(value, Mapping):
        return all(map(is_exact, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_exact, value))
    return not isinstance(value, int | float) or abs(value) <= GREATEST_EXACT


class Bounds:
    """The bounds of one document."""

    def __init__(self) -> None:
        self.divisors: set[int] = set()

    def unenforceable(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Those of a schema's bounds that have to be left out so that the others can be kept."""
        given = schema.get("type", ("integer", "number"))
        types = (given,) if isinstance(given, str) else given
        given_bounds = [(keyword, schema[keyword]) for keyword in BOUNDS if keyword in schema]
        too_large = tuple(keyword for keyword, value in given_bounds if not is_exact(value))
        bounds = tuple(bound for bound in given_bounds if bound[0] not in too_large)
        left_out = too_large + _unenforceable(bounds, tuple(kind for kind in ("integer", "number") if kind in types))
        if "multipleOf" in schema and not self._divides(schema["multipleOf"]):
            return (*left_out, "multipleOf")
        return left_out

    def _divides(self, value: float) -> bool:
        digits = Decimal(str(value)).normalize().as_tuple()
        exponent = int(digits.exponent)
        if not -9 <= exponent <= 9:
            return False
        whole = int("".join(map(str, digits.digits))) * 10 ** max(exponent, 0)
        if not 0 < math.prod({*self.divisors, whole}) <= GREATEST_DIVISOR:
            return False
        self.divisors.add(whole)
        return True


@lru_cache(1024)
def _unenforceable(bounds: tuple[tuple[str, Any], ...], types: tuple[str, ...]) -> tuple[str, ...]:
    if all(_takes(dict(bounds), kind) for kind in types):
        return ()
    return tuple(keyword for keyword, value in bounds if not all(_takes({keyword: value}, kind) for kind in types))


def _takes(bounds: Mapping[str, Any], kind: str) -> bool:
    """Whether it compiles, or at least fails for a reason that is the caller's."""
    if not bounds:
        return True
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({"type": kind, **bounds})))
    return not error or "Unsatisfiable" in error

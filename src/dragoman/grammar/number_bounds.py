"""Finds number bounds that llguidance cannot enforce."""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

MAX_DIVISOR_PRODUCT = 10_000
"""Limit on the product of all `multipleOf` of a document, as whole numbers: the automaton has that many states."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

MAX_EXACT = 2**53
"""llguidance reads numbers as doubles and converts them to 64-bit integers. Beyond this value it enforces a different
number. If both bounds of an integer are -2**63 + 512 or less, it recurses until it crashes."""


def is_exact(value: Any) -> bool:
    """Whether llguidance reads all numbers in a JSON value exactly."""
    if isinstance(value, Mapping):
        return all(map(is_exact, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_exact, value))
    return not isinstance(value, int | float) or abs(value) <= MAX_EXACT


class NumberBounds:
    """The number bounds of one document."""

    def __init__(self) -> None:
        self.divisors: set[int] = set()

    def find_unenforceable(self, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the bounds of a schema that must be dropped so that the others can be enforced."""
        declared = schema.get("type", ("integer", "number"))
        types = (declared,) if isinstance(declared, str) else declared
        bounds_set = [(keyword, schema[keyword]) for keyword in BOUNDS if keyword in schema]
        too_large = tuple(keyword for keyword, value in bounds_set if not is_exact(value))
        bounds = tuple(bound for bound in bounds_set if bound[0] not in too_large)
        dropped = too_large + _unenforceable(bounds, tuple(kind for kind in ("integer", "number") if kind in types))
        if "multipleOf" in schema and not self._accept_divisor(schema["multipleOf"]):
            return (*dropped, "multipleOf")
        return dropped

    def _accept_divisor(self, value: float) -> bool:
        digits = Decimal(str(value)).normalize().as_tuple()
        exponent = int(digits.exponent)
        if not -9 <= exponent <= 9:
            return False
        whole = int("".join(map(str, digits.digits))) * 10 ** max(exponent, 0)
        if not 0 < math.prod({*self.divisors, whole}) <= MAX_DIVISOR_PRODUCT:
            return False
        self.divisors.add(whole)
        return True


@lru_cache(1024)
def _unenforceable(bounds: tuple[tuple[str, Any], ...], types: tuple[str, ...]) -> tuple[str, ...]:
    if all(_compiles(dict(bounds), kind) for kind in types):
        return ()
    return tuple(keyword for keyword, value in bounds if not all(_compiles({keyword: value}, kind) for kind in types))


def _compiles(bounds: Mapping[str, Any], kind: str) -> bool:
    """Whether the bounds compile, or fail only because the caller's bounds contradict each other."""
    if not bounds:
        return True
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps({"type": kind, **bounds})))
    return not error or "Unsatisfiable" in error

"""Decides which patterns and numbers of schemas llguidance can enforce.

Rules
1. A pattern that llguidance supports is enforced. One that needs backtracking (look-around, back-references, word
   boundaries) is relaxed. A malformed one is an error.
2. Nested repetition counts multiply. More than MAX_REPEATS repetitions or MAX_PATTERN characters are an error because
   they would slow down every token.
3. Numbers beyond MAX_EXACT are relaxed.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import regex
from llguidance import LLMatcher

MAX_PATTERN = 4096
MAX_REPEATS = 10_000
MAX_EXACT = 2**53
"""llguidance reads numbers as doubles and converts them to 64-bit integers. Beyond this value it enforces a different
number. If both bounds of an integer are -2**63 + 512 or less, it recurses until it crashes."""
MAX_DIVISOR_PRODUCT = 10_000
"""Limit on the product of all `multipleOf` of a document, as whole numbers: the automaton has that many states."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|[()]|.", re.DOTALL)
_LARK_COUNT = re.compile(r"(?:\{\s*|,\s*|~\s*|\.\.\s*)(\d+)")


@lru_cache(1024)
def is_enforceable(pattern: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(grammar)


def find_pattern_error(pattern: str) -> str | None:
    if len(pattern) > MAX_PATTERN:
        return f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are allowed"
    if count_repeats(pattern) > MAX_REPEATS:
        return f"the pattern has more than {MAX_REPEATS} repetitions"
    if is_enforceable(pattern):
        return None
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as problem:
        return f"not a regular expression: {problem}"
    return None


def count_repeats(pattern: str) -> int:
    """Return the number of repetitions of the innermost piece, as required by the counts around it."""
    outer: list[int] = []
    most = piece = 1
    for found in _PIECE.finditer(pattern):
        if found[1] is not None:
            piece *= max(int(found[1][:9]), int((found[2] or "0")[:9]), 1)
            most = max(most, piece)
        elif found[0] == "(":
            outer.append(most)
            most = piece = 1
        elif found[0] == ")" and outer:
            piece, most = most, max(most, outer.pop())
        else:
            piece = 1
    return max(most, *outer, 1)


def max_repeat_count(grammar: str) -> int:
    """Return the largest repetition count in a Lark grammar."""
    return max((int(number[:9]) for number in _LARK_COUNT.findall(grammar)), default=0)


def is_exact(value: Any) -> bool:
    """Whether llguidance reads all numbers in a JSON value exactly."""
    if isinstance(value, Mapping):
        return all(map(is_exact, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_exact, value))
    return not isinstance(value, int | float) or abs(value) <= MAX_EXACT


class DivisorLimit:
    """Limits all `multipleOf` of one document together."""

    def __init__(self) -> None:
        self._divisors: set[int] = set()

    def accept(self, value: float) -> bool:
        """Count a divisor. False if it cannot be enforced in addition to the others."""
        digits = Decimal(str(value)).normalize().as_tuple()
        exponent = int(digits.exponent)
        if not -9 <= exponent <= 9:
            return False
        whole = int("".join(map(str, digits.digits))) * 10 ** max(exponent, 0)
        if not 0 < math.prod({*self._divisors, whole}) <= MAX_DIVISOR_PRODUCT:
            return False
        self._divisors.add(whole)
        return True

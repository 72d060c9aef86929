"""Decides which regular expressions of schemas can be enforced.

Rules
1. A pattern that llguidance supports is enforced. One that needs backtracking (look-around, back-references, word
   boundaries) is relaxed. A malformed one is an error.
2. Nested repetition counts multiply. More than MAX_REPEATS repetitions or MAX_PATTERN characters are an error because
   they would slow down every token.
"""

import json
import re
from functools import lru_cache

import regex
from llguidance import LLMatcher

MAX_PATTERN = 4096
MAX_REPEATS = 10_000

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|[()]|.", re.DOTALL)


class MalformedPattern(Exception):
    pass


@lru_cache(1024)
def is_enforceable(pattern: str) -> bool:
    """Whether the pattern can be enforced. Raises MalformedPattern if it is invalid or too large."""
    if len(pattern) > MAX_PATTERN:
        raise MalformedPattern(f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are allowed")
    if count_repeats(pattern) > MAX_REPEATS:
        raise MalformedPattern(f"the pattern has more than {MAX_REPEATS} repetitions")
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    error = LLMatcher.validate_grammar(grammar)
    if not error:
        return True
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as problem:
        raise MalformedPattern(f"not a regular expression: {problem}") from problem
    return False


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
    return max((int(number[:9]) for number in _COUNT.findall(grammar)), default=0)


_COUNT = re.compile(r"(?:\{\s*|,\s*|~\s*|\.\.\s*)(\d+)")

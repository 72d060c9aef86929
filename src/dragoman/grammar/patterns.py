"""Regular expressions of schemas: which of them an automaton can follow while the model writes.

Rules
1. What llguidance takes is kept. What only a backtracking engine could do (looking ahead or behind, references back,
   word boundaries) is relaxed. What is no pattern at all is an error.
2. Counted repetitions multiply; more than MOST_REPEATS of them are an error, and so is a pattern of more than
   LONGEST characters: each would cost time at every token.
"""

import json
import re
from functools import lru_cache

import regex
from llguidance import LLMatcher

LONGEST = 4096
MOST_REPEATS = 10_000

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|[()]|.", re.DOTALL)


class MalformedPattern(Exception):
    pass


@lru_cache(1024)
def enforceable(pattern: str) -> bool:
    """Whether it can be kept to; MalformedPattern where it is none, or one that nobody should have to follow."""
    if len(pattern) > LONGEST:
        raise MalformedPattern(f"a pattern may have {LONGEST} characters, not {len(pattern)}")
    if repeats(pattern) > MOST_REPEATS:
        raise MalformedPattern(f"a pattern may repeat {MOST_REPEATS} times, not more")
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    error = LLMatcher.validate_grammar(grammar)
    if not error:
        return True
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as problem:
        raise MalformedPattern(f"not a regular expression: {problem}") from problem
    return False


def repeats(pattern: str) -> int:
    """How often the innermost piece of it may have to be repeated, counting what is asked for in numbers."""
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


def counted(grammar: str) -> int:
    """The greatest number of repetitions that a grammar asks for at one place."""
    return max((int(number[:9]) for number in _COUNT.findall(grammar)), default=0)


_COUNT = re.compile(r"(?:\{\s*|,\s*|~\s*|\.\.\s*)(\d+)")

"""Compiles grammars over a model's vocabulary and computes token masks.

Rules
1. A vocabulary is built once per model. A grammar is compiled once and cached with its first mask. Each reply has its
   own matcher.
2. Compiling and masking release the GIL. They must not run in the event loop.
3. A grammar is compiled here only after a trial (`trial_server`) has compiled it within its limits.
4. A reply fails if one mask needs too much work or if all its masks together take too long, because other replies
   decode in the same step. The error is InvalidSchema because the caller sent the grammar.
5. Replies with the same grammar share its lexer, whose number of states is limited. After a reply has failed, the
   grammar is compiled again for the next one.
6. Where the grammar leaves no choice, llguidance tokenizes the required text and allows only its first token. The
   tokens must spell exactly that text. If the vocabulary lacks one of its bytes, the reply fails there.
"""

import re
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from dragoman.core.errors import DragomanError, EngineFailed, InvalidSchema
from dragoman.grammar.lru_cache import LruCache

Mask = NDArray[np.int32]
Tokenize = Callable[[str], Sequence[int]]

MAX_GRAMMARS = 32
MAX_BYTES = 256 * 1024 * 1024
"""Memory of all cached grammars, as measured in their trials."""

MAX_STATES = 50_000
"""Lexer states of one grammar: about 25 MB."""
MAX_SYMBOLS = 200_000
"""Symbols of one grammar."""
MAX_ITEMS = 20_000
"""Parser items for one mask: about 25 ms."""

BASE_SECONDS, TOKEN_SECONDS = 1.0, 0.002
"""CPU seconds for the tokens and masks of one reply: a fixed allowance, plus an addition per token."""

MAX_SHOWN = 160
"""Characters of an invalid expression that are quoted in an error."""
_INVALID_REGEX = re.compile(r'invalid regex ".*"(?= \(in regex\))')
_ERROR_LINE = re.compile(r"^error: (.+)$", re.MULTILINE)

EXCEEDED_LIMITS = {
    "items": "too complex: too many rules fit the text; use fewer alternatives and optional parts, or left recursion "
    "(`list: item | list item`)",
    "too many states": "too complex: the expressions need too much memory; use fewer and smaller repetitions in them",
    "fuel": "too complex: the expressions take too much time; use fewer and smaller repetitions in them",
    "too big": "too complex: too large; use fewer and shorter rules and expressions",
}
"""What to do about an exceeded limit, by a part of llguidance's message, which describes its own structures."""
TOO_SLOW = "too complex: it takes too much time; use fewer alternatives and optional parts"

REJECTED = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that does not fit."""
UNWRITABLE = "the model's vocabulary cannot write the required text; change that text"

CONTROL_PREFIX = b"\xff"
"""Put before the name of a control token so that no text matches it."""


class _VocabularyAdapter:
    """A vocabulary in the form that llguidance's TokenizerWrapper requires.

    It has no reference to the LLTokenizer built from it: Python cannot free such a cycle.
    """

    def __init__(self, tokens: Sequence[bytes], control: frozenset[int], end: int, tokenize: Tokenize) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(control)
        self.bos_token_id = self.eos_token_id = end
        self.tokenize = tokenize

    def __call__(self, text: bytes) -> Sequence[int]:
        """The model's tokenizer may normalize characters or drop bytes. Then the longest matches are used instead."""
        tokens = self.tokenize(text.decode())
        is_exact = b"".join([self.tokens[token] for token in tokens]) == text
        return tokens if is_exact else self._longest_matches(text)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {piece: token for token, piece in enumerate(self.tokens) if piece}

    def _longest_matches(self, text: bytes) -> list[int]:
        longest = max(map(len, self._ids))
        found: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(start + longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                break
            found.append(self._ids[text[start:end]])
            start = end
        return found


def build_tokenizer(
    pieces: Sequence[bytes], control: frozenset[int], ends: frozenset[int], tokenize: Tokenize
) -> LLTokenizer:
    tokens = [CONTROL_PREFIX + piece if token in control else piece for token, piece in enumerate(pieces)]
    # llguidance requires an end token. If the model has none, token 0 stands in: it is allowed only where the reply may
    # end, and then the reply is complete.
    stops = sorted(ends) or [0]
    return LLTokenizer(TokenizerWrapper(_VocabularyAdapter(tokens, control, stops[0], tokenize)), eos_token=stops)


class CompiledGrammar(msgspec.Struct):
    """A compiled grammar and its first mask. If a reply `has_failed` with it, it must be compiled again."""

    matcher: LLMatcher
    mask: Mask
    has_failed: bool = False


class Guide:
    """The position of one reply in a grammar. `param` is the request field that errors name."""

    def __init__(self, compiled: CompiledGrammar, param: str) -> None:
        self.compiled = compiled
        self.param = param
        self.matcher = compiled.matcher.deep_copy()
        self.mask = compiled.mask
        self.is_stale = False
        self.seconds = 0.0
        self.tokens = 0
        self.error: DragomanError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the reply must end here."""
        return self.matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """Whether the reply may end here."""
        return self.matcher.is_accepting()

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens may follow in this order."""
        return self.count_allowed(tokens) == len(tokens)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow, counted from the first."""
        return self.matcher.validate_tokens(list(tokens))

    def skip(self, tokens: Sequence[int]) -> bool:
        """Advance by several tokens, and compute the next mask. False if they may not follow."""
        if not self.allows(tokens):
            return False
        self.matcher.consume_tokens(list(tokens))
        self.compute_mask()
        return True

    def advance(self, token: int) -> None:
        """Advance by one token. `compute_mask` must run before the next mask is used."""
        start = time.thread_time()
        is_accepted = self.matcher.consume_token(token)
        self.seconds += time.thread_time() - start
        if not is_accepted:
            raise self._rejection(token, _first_line(self.matcher.get_error()))
        self.tokens += 1
        self.is_stale = True

    def _rejection(self, token: int, problem: str) -> DragomanError:
        if REJECTED not in problem:
            return self._failure(_error_message(problem))
        if not self.is_stale and self.mask[token // 32] >> (token % 32) & 1:
            # The mask allowed the token, because llguidance skips bytes that the vocabulary lacks.
            return self._failure(UNWRITABLE)
        return EngineFailed(f"the model produced a token that the grammar does not allow: {problem}")

    def compute_mask(self) -> None:
        """Compute the next mask. It runs while the model decodes; `allowed_tokens` raises its error."""
        start = time.thread_time()
        mask = np.zeros_like(self.mask)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.mask, self.is_stale = mask, False
        self.seconds += time.thread_time() - start
        if self.matcher.is_error():
            self.error = self._failure(_error_message(self.matcher.get_error()))
        elif self.seconds > BASE_SECONDS + self.tokens * TOKEN_SECONDS:
            self.error = self._failure(TOO_SLOW)

    def allowed_tokens(self, size: int) -> NDArray[np.bool_]:
        """Return a boolean for each token: may it come next?"""
        if self.is_stale:
            self.compute_mask()
        if self.error is not None:
            raise self.error
        return np.unpackbits(self.mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)

    def _failure(self, problem: str) -> InvalidSchema:
        self.compiled.has_failed = True
        message = f"{self.param}: after {self.tokens} tokens the reply can no longer be constrained: {problem}"
        return InvalidSchema(message, param=self.param)

    def get_captures(self) -> list[tuple[str, bytes]]:
        return self.matcher.get_captures()


class GrammarCache:
    """A thread-safe cache of compiled grammars."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = LLParserLimits(
            max_lexer_states=MAX_STATES, max_grammar_size=MAX_SYMBOLS, step_max_items=MAX_ITEMS, verbose_errors=False
        )
        self.mask_words = (tokenizer.vocab_size + 31) // 32
        self.cache: LruCache[CompiledGrammar] = LruCache(MAX_GRAMMARS, MAX_BYTES)

    def find(self, grammar: str, param: str) -> Guide | None:
        """Return a guide for a cached grammar. None if it is not cached or has failed."""
        compiled = self.cache.get(grammar)
        return None if compiled is None or compiled.has_failed else Guide(compiled, param)

    def create_guide(self, grammar: str, param: str, memory: int = 0) -> Guide:
        """Return a guide for a grammar and compile it if necessary. Do not call this in the event loop. `param` is the
        request field that errors name, `memory` the measured size of the compiled grammar in bytes."""
        found = self.find(grammar, param)
        if found is not None:
            return found
        compiled = self._compile(grammar, param)
        self.cache.put(grammar, compiled, memory)
        return Guide(compiled, param)

    def _compile(self, grammar: str, param: str) -> CompiledGrammar:
        matcher = LLMatcher(self.tokenizer, grammar, limits=self.limits, log_level=0)
        mask = np.zeros(self.mask_words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            problem = _error_message(matcher.get_error())
            raise InvalidSchema(f"{param}: cannot compile the constraint: {problem}", param=param)
        return CompiledGrammar(matcher, mask)


def _error_message(text: str) -> str:
    """Return llguidance's message in one line. The reason for an invalid expression is on a later line."""
    if text.startswith("NoExtensionBias"):
        return "no character is allowed"
    for part, explanation in EXCEEDED_LIMITS.items():
        if re.search(rf"\b{part}\b", text):
            return explanation
    invalid, wrong = _INVALID_REGEX.search(text), _ERROR_LINE.search(text)
    return f"{invalid[0][:MAX_SHOWN]}: {wrong[1]}" if invalid and wrong else _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"

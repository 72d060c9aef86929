"""Grammars over a model's vocabulary, and the masks they give: which tokens may come next.

Rules
1. A vocabulary is built once per model. A grammar is compiled once and kept, with the mask of its beginning; the ones
   that were not used for longest are forgotten. A reply has a matcher of its own.
2. Compiling and masking release the GIL. Neither may run in the event loop.
3. A grammar is compiled here only after a trial (`grammar_trial`) has compiled it within its limits.
4. A reply fails if one mask needs too much work, or if all its masks together take too long: other replies decode in
   the same step. The error is InvalidSchema, because the caller sent the grammar.
5. Replies with the same grammar share its lexer, whose number of states is limited. After a reply has failed, the
   grammar is compiled again for the next one.
"""

import re
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from dragoman.core.errors import DragomanError, EngineFailed, InvalidSchema
from dragoman.grammar.lru_cache import Kept

Mask = NDArray[np.int32]

MOST_GRAMMARS = 32
MOST_BYTES = 256 * 1024 * 1024
"""Memory of all cached grammars together, as measured in their trials."""

MOST_STATES = 50_000
"""Lexer states of one grammar: about 25 MB."""
MOST_SYMBOLS = 200_000
"""Symbols of one grammar."""
MOST_ITEMS = 20_000
"""Parser items for one mask: about 25 ms."""

SPARE_SECONDS, TOKEN_SECONDS = 1.0, 0.002
"""CPU seconds for the tokens and masks of one reply: a fixed allowance, and an addition for each token."""

MOST_SHOWN = 160
"""Characters of an expression that is wrong."""
_INVALID = re.compile(r'invalid regex ".*"(?= \(in regex\))')
_WRONG = re.compile(r"^error: (.+)$", re.MULTILINE)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that its mask does not allow."""

CONTROL = b"\xff"
"""Before the name of a control token: no text can be mistaken for it."""


class Tokens(msgspec.Struct, frozen=True):
    """A vocabulary as llguidance wants to see it."""

    tokens: Sequence[bytes]
    special_token_ids: Sequence[int]
    bos_token_id: int
    eos_token_id: int
    tokenize: Callable[[str], Sequence[int]]

    def __call__(self, text: bytes | str) -> Sequence[int]:
        return self.tokenize(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def vocabulary(
    pieces: Sequence[bytes], control: frozenset[int], ends: frozenset[int], tokenize: Callable[[str], Sequence[int]]
) -> LLTokenizer:
    tokens = [CONTROL + piece if token in control else piece for token, piece in enumerate(pieces)]
    # llguidance needs one. Where a model has none, the first token stands for it: it is let through only where the
    # reply may end, and then the reply is complete.
    stops = sorted(ends) or [0]
    wrapped = TokenizerWrapper(Tokens(tokens, sorted(control), stops[0], stops[0], tokenize))
    return LLTokenizer(wrapped, eos_token=stops)


class CompiledGrammar:
    """A compiled grammar and its first mask. `has_failed`: a reply failed with it, so it must be compiled again."""

    def __init__(self, matcher: LLMatcher, mask: Mask) -> None:
        self.matcher = matcher
        self.mask = mask
        self.has_failed = False


class Guide:
    """The position of one reply in a grammar. `param` is the field of the request that asked for the grammar."""

    def __init__(self, compiled: CompiledGrammar, param: str) -> None:
        self.compiled = compiled
        self.param = param
        self.matcher = compiled.matcher.deep_copy()
        self.mask = compiled.mask
        self.stale = False
        self.seconds = 0.0
        self.tokens = 0
        self.error: DragomanError | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped()

    @property
    def accepting(self) -> bool:
        """Whether the reply may end here."""
        return self.matcher.is_accepting()

    def lets(self, tokens: Sequence[int]) -> bool:
        """Whether the tokens may follow one another."""
        return self.fitting(tokens) == len(tokens)

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may follow one another, from the first on."""
        return self.matcher.validate_tokens(list(tokens))

    def take(self, token: int) -> None:
        """The reply goes on with `token`. What may follow is not known before `compute`."""
        begun = time.thread_time()
        taken = self.matcher.consume_token(token)
        self.seconds += time.thread_time() - begun
        if not taken:
            problem = _first_line(self.matcher.get_error())
            if NOT_ALLOWED in problem:
                raise EngineFailed(f"the reply left its shape: {problem}")
            raise self._failure(problem)
        self.tokens += 1
        self.stale = True

    def compute(self) -> None:
        """Find out what may follow. It takes its time, and is done while the model decodes; what goes wrong is told
        to whoever asks for what is allowed."""
        begun = time.thread_time()
        mask = np.zeros_like(self.mask)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.mask, self.stale = mask, False
        self.seconds += time.thread_time() - begun
        if self.matcher.is_error():
            self.error = self._failure(_first_line(self.matcher.get_error()))
        elif self.seconds > SPARE_SECONDS + self.tokens * TOKEN_SECONDS:
            self.error = self._failure("the grammar is too complex")

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """For each token whether it may come next."""
        if self.stale:
            self.compute()
        if self.error is not None:
            raise self.error
        return np.unpackbits(self.mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)

    def _failure(self, problem: str) -> InvalidSchema:
        self.compiled.has_failed = True
        words = f"{self.param}: the reply can no longer be constrained: {problem}; simplify the constraint"
        return InvalidSchema(words, param=self.param)

    def captures(self) -> list[tuple[str, bytes]]:
        return self.matcher.get_captures()


class Grammars:
    """A cache of compiled grammars. It is thread-safe."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = LLParserLimits(
            max_lexer_states=MOST_STATES, max_grammar_size=MOST_SYMBOLS, step_max_items=MOST_ITEMS, verbose_errors=False
        )
        self.words = (tokenizer.vocab_size + 31) // 32
        self.kept: Kept[CompiledGrammar] = Kept(MOST_GRAMMARS, MOST_BYTES)

    def find(self, grammar: str, param: str) -> Guide | None:
        """A guide for a cached grammar; None if it is not cached, or has failed."""
        compiled = self.kept.get(grammar)
        return None if compiled is None or compiled.has_failed else Guide(compiled, param)

    def guide(self, grammar: str, param: str, memory: int = 0) -> Guide:
        """A guide for a grammar, which is compiled if necessary: do not call this in the event loop. `param` is the
        field that errors name, `memory` the measured size of the compiled grammar in bytes."""
        found = self.find(grammar, param)
        if found is not None:
            return found
        compiled = self._compile(grammar, param)
        self.kept.keep(grammar, compiled, memory)
        return Guide(compiled, param)

    def _compile(self, grammar: str, param: str) -> CompiledGrammar:
        matcher = LLMatcher(self.tokenizer, grammar, limits=self.limits, log_level=0)
        mask = np.zeros(self.words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            problem = _reason(matcher.get_error())
            raise InvalidSchema(f"{param}: nothing can be written to fit this: {problem}", param=param)
        return CompiledGrammar(matcher, mask)


def _reason(text: str) -> str:
    """llguidance's words in one line: what is wrong with an expression stands below it."""
    if text.startswith("NoExtensionBias"):
        return "no character is let through"
    invalid, wrong = _INVALID.search(text), _WRONG.search(text)
    return f"{invalid[0][:MOST_SHOWN]}: {wrong[1]}" if invalid and wrong else _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"

"""Grammars over a model's vocabulary, and the masks they give: which tokens may come next.

Rules
1. A vocabulary is built once per model. A grammar is compiled once and kept, with the mask of its beginning; the ones
   that were not used for longest are forgotten. A reply has a matcher of its own.
2. Neither compiling nor masking holds Python's lock; neither may run in the event loop.
3. A grammar is compiled here only after a trial (`trial`) has compiled it within its limits.
4. A mask that needs too much work fails its reply, and so do masks that take too long together: others decode in the
   same step. The grammar is the caller's own, so that is an InvalidSchema.
5. Replies with one grammar share its lexer, whose states are limited in number. A grammar that has failed a reply is
   compiled anew for the next one.
"""

import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from dragoman.constrain.kept import Kept
from dragoman.errors import DragomanError, EngineFailed, InvalidSchema

Mask = NDArray[np.int32]

MOST_GRAMMARS = 32
MOST_BYTES = 256 * 1024 * 1024
"""Of all compiled grammars that are kept, as they were measured when they were tried."""

MOST_STATES = 50_000
"""Of the lexer of one grammar, about 25 MB."""
MOST_SYMBOLS = 200_000
MOST_ITEMS = 20_000
"""Of the parser for one mask, about 25 ms."""

SPARE_SECONDS, TOKEN_SECONDS = 1.0, 0.002
"""The tokens and masks of a reply may take so long together, and so much longer with each token; of the processor's
time."""

MOST_SHOWN = 160
"""Characters of an expression that is wrong."""
_INVALID = re.compile(r'invalid regex ".*"(?= \(in regex\))')
_WRONG = re.compile(r"^error: (.+)$", re.MULTILINE)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""In llguidance's words for a token that its own mask does not have."""

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


class Compiled:
    """A grammar that replies are kept to. `is_worn`: it has failed a reply, and is of no use for the next."""

    def __init__(self, matcher: LLMatcher, mask: Mask) -> None:
        self.matcher = matcher
        self.mask = mask
        self.is_worn = False


class Guide:
    """One reply on its way through a grammar. `param` is the field that asks for it."""

    def __init__(self, compiled: Compiled, param: str) -> None:
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
        self.compiled.is_worn = True
        words = f"{self.param}: the reply cannot be kept to this any further: {problem}; ask for something simpler"
        return InvalidSchema(words, param=self.param)

    def captures(self) -> list[tuple[str, bytes]]:
        return self.matcher.get_captures()


class Grammars:
    """Compiled grammars. For any thread."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = LLParserLimits(
            max_lexer_states=MOST_STATES, max_grammar_size=MOST_SYMBOLS, step_max_items=MOST_ITEMS, verbose_errors=False
        )
        self.words = (tokenizer.vocab_size + 31) // 32
        self.kept: Kept[Compiled] = Kept(MOST_GRAMMARS, MOST_BYTES)

    def find(self, grammar: str, param: str) -> Guide | None:
        """A guide through a grammar that is kept."""
        compiled = self.kept.get(grammar)
        return None if compiled is None or compiled.is_worn else Guide(compiled, param)

    def guide(self, grammar: str, param: str, memory: int = 0) -> Guide:
        """Compiles the grammar if need be, so not in the event loop. `param` is the field that is to blame for a
        grammar that cannot be compiled, `memory` what it was measured to take."""
        found = self.find(grammar, param)
        if found is not None:
            return found
        compiled = self._compile(grammar, param)
        self.kept.keep(grammar, compiled, memory)
        return Guide(compiled, param)

    def _compile(self, grammar: str, param: str) -> Compiled:
        matcher = LLMatcher(self.tokenizer, grammar, limits=self.limits, log_level=0)
        mask = np.zeros(self.words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            problem = _reason(matcher.get_error())
            raise InvalidSchema(f"{param}: nothing can be written to fit this: {problem}", param=param)
        return Compiled(matcher, mask)


def resident_bytes() -> int:
    """The memory of this process; the most that it ever had where the system tells no more."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reason(text: str) -> str:
    """llguidance's words in one line: what is wrong with an expression stands below it."""
    if text.startswith("NoExtensionBias"):
        return "no character is let through"
    invalid, wrong = _INVALID.search(text), _WRONG.search(text)
    return f"{invalid[0][:MOST_SHOWN]}: {wrong[1]}" if invalid and wrong else _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"

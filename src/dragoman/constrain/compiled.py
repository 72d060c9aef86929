"""Grammars over a model's vocabulary, and the masks they give: which tokens may come next.

Rules
1. A vocabulary is built once per model. A grammar is compiled once and kept, with the mask of its beginning; the ones
   that were not used for longest are forgotten. A reply has a matcher of its own.
2. Compiling and masking never hold Python's lock; neither may run in the event loop.
3. What takes too long at its beginning, or at any token, is refused: others decode in the same step.
"""

import re
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from dragoman.constrain.kept import Kept
from dragoman.errors import EngineFailed, InvalidSchema

Mask = NDArray[np.int32]

MOST_GRAMMARS = 64
MOST_TEXT = 4 * 1024 * 1024
"""Characters of all grammars that are kept together."""

COMPILE_SECONDS = 1.5
SPARE_SECONDS, TOKEN_SECONDS = 1.0, 0.002
"""A reply's masks may take so long together, and so much longer with each token; of the processor's time."""

MOST_SHOWN = 160
"""Characters of an expression that is wrong."""
_INVALID = re.compile(r'invalid regex ".*"(?= \(in regex\))')
_WRONG = re.compile(r"^error: (.+)$", re.MULTILINE)

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


class Guide:
    """One reply on its way through a grammar."""

    def __init__(self, matcher: LLMatcher, mask: Mask) -> None:
        self.matcher = matcher
        self.mask = mask
        self.stale = False
        self.seconds = 0.0
        self.tokens = 0
        self.error: EngineFailed | None = None

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
        if not self.matcher.consume_token(token):
            raise EngineFailed(f"the reply left its shape: {_first_line(self.matcher.get_error())}")
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
            problem = _first_line(self.matcher.get_error())
            self.error = EngineFailed(f"the reply cannot be kept to its shape: {problem}")
        elif self.seconds > SPARE_SECONDS + self.tokens * TOKEN_SECONDS:
            self.error = EngineFailed("the reply cannot be kept to its shape: the grammar is too complex")

    def allowed(self, size: int) -> NDArray[np.bool_]:
        """For each token whether it may come next."""
        if self.stale:
            self.compute()
        if self.error is not None:
            raise self.error
        return np.unpackbits(self.mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)

    def captures(self) -> list[tuple[str, bytes]]:
        return self.matcher.get_captures()


class _Compiled(msgspec.Struct, frozen=True):
    matcher: LLMatcher
    mask: Mask


class Grammars:
    """Compiled grammars. For any thread but the event loop's."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.limits = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
        self.words = (tokenizer.vocab_size + 31) // 32
        self.kept: Kept[_Compiled] = Kept(MOST_GRAMMARS, MOST_TEXT)

    def guide(self, grammar: str, param: str) -> Guide:
        """`param` is the field that is to blame for a grammar that cannot be compiled."""
        compiled = self.kept.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar, param)
            self.kept.keep(grammar, compiled)
        return Guide(compiled.matcher.deep_copy(), compiled.mask)

    def _compile(self, grammar: str, param: str) -> _Compiled:
        begun = time.thread_time()
        matcher = LLMatcher(self.tokenizer, grammar, limits=self.limits, log_level=0)
        mask = np.zeros(self.words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            problem = _reason(matcher.get_error())
            raise InvalidSchema(f"{param}: nothing can be written to fit this: {problem}", param=param)
        if time.thread_time() - begun > COMPILE_SECONDS:
            raise InvalidSchema(f"{param}: this is too complex to be enforced", param=param)
        return _Compiled(matcher, mask)


def _reason(text: str) -> str:
    """llguidance's words in one line: what is wrong with an expression stands below it."""
    if text.startswith("NoExtensionBias"):
        return "no character is let through"
    invalid, wrong = _INVALID.search(text), _WRONG.search(text)
    return f"{invalid[0][:MOST_SHOWN]}: {wrong[1]}" if invalid and wrong else _first_line(text)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"

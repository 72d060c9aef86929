"""Matches texts against grammars with a vocabulary of bytes and optional control tokens."""

import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from dragoman.core.request import GenerationRequest
from dragoman.formats import FORMATS
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.masks import GrammarCache, build_tokenizer
from dragoman.grammar.reply_grammar import Beginning, GrammarModel, build_reply_grammar

END = 256
FIRST_MARKER = 257
PIECES = (*(bytes([byte]) for byte in range(256)), b"<end>")


@cache
def tokenizer(markers: tuple[str, ...] = ()) -> LLTokenizer:
    pieces = [*PIECES, *(marker.encode() for marker in markers)]
    control = frozenset(range(END, len(pieces)))
    return build_tokenizer(pieces, control, frozenset({END}), lambda text: list(text.encode()))


def grammar_model(syntax: ModelFormat, *, control: bool = False, thinks: bool = False) -> GrammarModel:
    """With `control`, every marker of the format is a control token."""
    markers = sorted(syntax.markers) if control else []
    ids = {marker: FIRST_MARKER + i for i, marker in enumerate(markers)}
    return GrammarModel(syntax, ids, frozenset({END}), thinks)


class Matcher:
    """Matches texts against a grammar. `markers` are control tokens."""

    def __init__(self, grammar: str, markers: Sequence[str] = ()) -> None:
        self.grammar = grammar
        self.markers = tuple(markers)

    @cached_property
    def matcher(self) -> LLMatcher:
        return GrammarCache(tokenizer(self.markers)).create_guide(self.grammar, "here").matcher

    def follows(self, text: str) -> int:
        """Return how many bytes and markers of the text the grammar accepts."""
        self.matcher.reset()
        return self.matcher.try_consume_tokens(tokens(text, self.markers))

    def accepts(self, text: str) -> bool:
        """Whether the text is a complete reply."""
        return self.follows(text) == len(tokens(text, self.markers)) and self.matcher.is_accepting()


class Reply(Matcher):
    """Matches replies to a request with these fields."""

    def __init__(
        self,
        kind: str,
        *,
        begins: Beginning = "reply",
        control: bool = False,
        thinks: bool = False,
        **fields: Any,
    ) -> None:
        model = grammar_model(FORMATS[kind], control=control, thinks=thinks)
        built = build_reply_grammar(GenerationRequest(**fields), model, begins=begins)
        assert built is not None
        super().__init__(built.grammar, sorted(FORMATS[kind].markers) if control else ())
        self.param, self.relaxed, self.checks = built.param, built.relaxed, built.checks


def tokens(text: str, markers: Sequence[str] = ()) -> list[int]:
    longest_first = "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)"
    found: list[int] = []
    for part in re.split(f"({longest_first})", text):
        found += [FIRST_MARKER + markers.index(part)] if part in markers else list(part.encode())
    return found

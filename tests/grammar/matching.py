"""Matches texts against grammars with a vocabulary of bytes and optional control tokens."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from dragoman.core.request import GenerationRequest
from dragoman.formats import FORMATS
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.masks import GrammarCache, build_tokenizer
from dragoman.grammar.reply_grammar import GrammarModel, ReplyGrammar, build_reply_grammar

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


def reply(
    kind: str, *, opened: bool = False, control: bool = False, thinks: bool = False, **fields: Any
) -> ReplyGrammar:
    """Return the grammar of the reply to a request with these fields."""
    model = grammar_model(FORMATS[kind], control=control, thinks=thinks)
    found = build_reply_grammar(GenerationRequest(**fields), model, opened=opened)
    assert found is not None
    return found


def tokens(text: str, markers: Sequence[str] = ()) -> list[int]:
    longest_first = "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)"
    found: list[int] = []
    for part in re.split(f"({longest_first})", text):
        found += [FIRST_MARKER + list(markers).index(part)] if part in markers else list(part.encode())
    return found


def matcher(grammar: str, markers: Sequence[str] = ()) -> LLMatcher:
    return GrammarCache(tokenizer(tuple(markers))).create_guide(grammar, "here").matcher


def accepts(grammar: str, text: str, markers: Sequence[str] = ()) -> bool:
    """Whether the text is a complete reply."""
    reader = matcher(grammar, markers)
    ids = tokens(text, markers)
    return reader.try_consume_tokens(ids) == len(ids) and reader.is_accepting()


def follows(grammar: str, text: str, markers: Sequence[str] = ()) -> int:
    """Return how many bytes and markers of the text the grammar accepts."""
    return matcher(grammar, markers).try_consume_tokens(tokens(text, markers))

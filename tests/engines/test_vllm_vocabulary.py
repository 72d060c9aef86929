"""The bytes behind tokens, and the text that comes of them however a reply is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from dragoman.engines.vllm.request_builder import in_one
from dragoman.engines.vllm.vocabulary import Tokens
from tests.engines.fakevllm.vllm.tokenizer import Backend, Tokenizer, letters


class Spaced(Backend):
    def to_str(self) -> str:
        names = ["▁Hello", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "wörld"]
        decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
        return json.dumps(
            {
                "model": {"type": "Unigram", "vocab": [[name, 0.0] for name in names]},
                "decoder": {"type": "Sequence", "decoders": decoders},
                "added_tokens": [{"id": 7, "content": "</s>", "special": True}],
            }
        )


class Odd(Backend):
    """A tokenizer whose tokens have no bytes of their own."""

    def to_str(self) -> str:
        vocabulary = {letter: byte for byte, letter in enumerate(letters())}
        return json.dumps({"model": {"type": "WordPiece", "vocab": vocabulary}, "decoder": {"type": "WordPiece"}})


def tokenizer(backend: Backend) -> Any:
    made = Tokenizer()
    made.backend_tokenizer = backend
    return made


def test_byte_level_names_are_bytes() -> None:
    tokens = Tokens(Tokenizer(), 300)
    assert tokens.kind == "byte-level"
    assert tokens.pieces[:256] == tuple(bytes([byte]) for byte in range(256))
    assert tokens.pieces[256:260] == (b"<|im_start|>", b"<|im_end|>", b"", b"")
    assert tokens.vocab_size == 300
    assert tokens.control == ("<|im_start|>", "<|im_end|>")
    assert tokens.ends == {257}


def test_spaces_and_bytes_in_names() -> None:
    tokens = Tokens(tokenizer(Spaced()), 8)
    assert tokens.kind == "spaced"
    spelling = tokens.spelling()
    assert [spelling.take(token) for token in (0, 1, 2, 3, 4, 5, 6, 7)] == [
        " Hello",
        " ",
        "",
        "",
        "",
        "😀",
        "wörld",
        "",
    ]


def test_markers_that_are_asked_for_are_shown_and_ends_are_not() -> None:
    tokens = Tokens(Tokenizer(), 258)
    assert [tokens.text(token) for token in (256, 257)] == [b"", b""]
    tokens.show({"<|im_start|>", "<|im_end|>"})
    assert [tokens.text(token) for token in (256, 257)] == [b"<|im_start|>", b""]


@pytest.mark.parametrize("backend", [Backend(), Odd()], ids=["a table", "a window"])
def test_what_never_became_a_character_comes_at_the_end(backend: Backend) -> None:
    spelling = Tokens(tokenizer(backend), 256).spelling()
    told = "".join(spelling.take(token) for token in "aä".encode()[:-1])
    assert told + spelling.flush() == "a\ufffd"


@given(st.text(max_size=30))
def test_without_a_table_the_text_is_the_same(text: str) -> None:
    spelling = Tokens(tokenizer(Odd()), 256).spelling()
    assert "".join(spelling.take(token) for token in text.encode()) + spelling.flush() == text


@pytest.mark.parametrize("reply", [b"<ab>", b"<}>"])
def test_a_callers_grammar_inside_ours_becomes_one(reply: bytes) -> None:
    own = 'start: /[a-z]{2}/ | CLOSE\nCLOSE: "}"'
    both = {"grammars": [{"lark_grammar": 'start: "<" @answer ">"'}, {"name": "answer", "lark_grammar": own}]}
    grammar = LLMatcher.grammar_from_lark(in_one(json.dumps(both)))
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert matcher.validate_tokens(list(reply)) == len(reply)
    assert matcher.validate_tokens(list(b"<abc>")) == 3


def test_a_grammar_that_is_one_stays() -> None:
    assert in_one('start: "a"') == 'start: "a"'

"""The bytes of tokens, and the text decoded from them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from dragoman.engines.vllm.request_builder import merge_grammars
from dragoman.engines.vllm.vocabulary import HfVocabulary
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
    """A tokenizer without a byte table."""

    def to_str(self) -> str:
        vocabulary = {letter: byte for byte, letter in enumerate(letters())}
        return json.dumps({"model": {"type": "WordPiece", "vocab": vocabulary}, "decoder": {"type": "WordPiece"}})


def tokenizer(backend: Backend) -> Any:
    made = Tokenizer()
    made.backend_tokenizer = backend
    return made


def test_byte_level_names_are_bytes() -> None:
    tokens = HfVocabulary(Tokenizer(), 300)
    assert tokens.kind == "byte-level"
    assert tokens.pieces[:256] == tuple(bytes([byte]) for byte in range(256))
    assert tokens.pieces[256:260] == (b"<|im_start|>", b"<|im_end|>", b"", b"")
    assert tokens.vocab_size == 300
    assert tokens.control == ("<|im_start|>", "<|im_end|>")
    assert tokens.ends == {257}


def test_spaced_names_decode_spaces_and_bytes() -> None:
    tokens = HfVocabulary(tokenizer(Spaced()), 8)
    assert tokens.kind == "spaced"
    decoder = tokens.create_decoder()
    assert "|".join(decoder.feed(token) for token in range(8)) == " Hello| ||||😀|wörld|"


def test_requested_markers_are_visible_except_ends() -> None:
    tokens = HfVocabulary(Tokenizer(), 258)
    assert [tokens.text(token) for token in (256, 257)] == [b"", b""]
    tokens.show({"<|im_start|>", "<|im_end|>"})
    assert [tokens.text(token) for token in (256, 257)] == [b"<|im_start|>", b""]


@pytest.mark.parametrize("backend", [Backend(), Odd()], ids=["bytes", "window"])
def test_incomplete_character_is_flushed_at_the_end(backend: Backend) -> None:
    decoder = HfVocabulary(tokenizer(backend), 256).create_decoder()
    text = "".join(decoder.feed(token) for token in "aä".encode()[:-1])
    assert text + decoder.flush() == "a\ufffd"


@given(st.text(max_size=30))
def test_window_decoder_returns_the_text(text: str) -> None:
    decoder = HfVocabulary(tokenizer(Odd()), 256).create_decoder()
    assert "".join(decoder.feed(token) for token in text.encode()) + decoder.flush() == text


@pytest.mark.parametrize("reply", [b"<ab>", b"<}>"])
def test_nested_grammars_are_merged(reply: bytes) -> None:
    own = 'start: /[a-z]{2}/ | CLOSE\nCLOSE: "}"'
    both = {"grammars": [{"lark_grammar": 'start: "<" @answer ">"'}, {"name": "answer", "lark_grammar": own}]}
    grammar = LLMatcher.grammar_from_lark(merge_grammars(json.dumps(both)))
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert matcher.validate_tokens(list(reply)) == len(reply)
    assert matcher.validate_tokens(list(b"<abc>")) == 3


def test_single_grammar_is_unchanged() -> None:
    assert merge_grammars('start: "a"') == 'start: "a"'

"""Prompts whose long pieces are kept have the tokens they have without that."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.vllm.token_cache import LONG, Added, Cuts, cuts
from dragoman.engines.vllm.vocabulary import Tokens
from tests.engines.fakevllm.vllm.tokenizer import IM_END, IM_START, NAMES, Backend, Encoding, Tokenizer
from tests.engines.vllm_model import tokenizer_file

START, END = "<|im_start|>", "<|im_end|>"
ADDED = [Added(token, name, special=True) for name, token in NAMES.items()]
TOOL = {"content": "<tool>", "special": False}
"""Families have such tokens too, which are no control tokens."""

words = st.sampled_from(
    [START, END, "<tool>", "<tool", "<|im_", "start|>", "<|im_end", "|>", " ", "\n", "the tools", "'s", "É字", "12"]
)
texts = st.lists(words | st.text(max_size=5), max_size=40).map("".join)


class Counted:
    """Words as tokens, and what was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        found = re.findall(r"<\|im_start\|>|<\|im_end\|>|[^<]+|<", text)
        return [NAMES.get(word, 300 + len(word)) for word in found]


def test_a_long_piece_is_made_tokens_once() -> None:
    encode = Counted()
    cut = Cuts(encode, [START, END])
    system = "s" * LONG
    for question in ("one", "three"):
        tokens = cut.encode(f"{START}{system}{END}{START}{question}{END}")
        assert tokens == [IM_START, 300 + LONG, IM_END, IM_START, 300 + len(question), IM_END]
    assert encode.asked == [START, system, f"{END}{START}one{END}", START, f"{END}{START}three{END}"]


def test_short_texts_are_not_cut() -> None:
    encode = Counted()
    text = f"{START}short{END}" * 2
    Cuts(encode, [START, END]).encode(text)
    assert encode.asked == [text]


@given(texts, st.integers(1, 20))
def test_pieces_are_the_text(text: str, least: int) -> None:
    cut = Cuts(lambda piece: [ord(letter) for letter in piece], [START, END], least)
    assert cut.encode(text) == cut.encode(text) == [ord(letter) for letter in text]


@pytest.mark.parametrize(
    "odd",
    [
        Added(1, START, special=True, lstrip=True),
        Added(1, START, special=True, rstrip=True),
        Added(1, START, special=True, single_word=True),
        Added(1, START, special=True, normalized=True),
    ],
)
def test_names_that_reach_beyond_themselves_cut_nothing(odd: Added) -> None:
    encode = Counted()
    text = f"{START}{'s' * LONG}"
    cuts(encode, [odd], [odd.id]).encode(text)
    assert encode.asked == [text]


@pytest.mark.parametrize("other", ["|>|", "x<", f"{START}s", "<|im_"])
def test_names_that_may_overlap_cut_nothing(other: str) -> None:
    text = f"{START}{'s' * LONG}"
    encode = Counted()
    cuts(encode, [*ADDED, Added(9, other)], [IM_START]).encode(text)
    assert encode.asked == [text]


def test_where_only_the_beginning_of_a_text_is_different_nothing_is_cut() -> None:
    asked = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [*f" {text}".encode()]

    text = f"{START}{'s' * LONG}"
    cut = cuts(encode, ADDED, [IM_START, IM_END])
    asked.clear()
    cut.encode(text)
    assert asked == [text]


def test_what_is_kept_is_for_every_thread() -> None:
    tokens = Tokens(Tokenizer(), 258)
    prompts = [f"{START}{str(number) * 600}{END}{START}{number}" for number in range(8)]
    expected = [Backend().encode(prompt).ids for prompt in prompts]
    wrong: list[str] = []

    def ask() -> None:
        for _ in range(20):
            made = [tokens.tokenize(prompt, special=True) for prompt in prompts]
            wrong.extend(prompt for prompt, got, ids in zip(prompts, made, expected, strict=True) if got != ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_content_keeps_its_names_as_text() -> None:
    tokens = Tokens(Tokenizer(), 258)
    text = f"{START}{'s' * LONG}"
    assert tokens.tokenize(text, special=True)[0] == IM_START
    assert tokens.tokenize(text, special=False) == [*text.encode()]
    assert tokens.tokenize(text, special=False) == [*text.encode()]


def test_what_a_caller_does_with_tokens_changes_nothing_that_is_kept() -> None:
    tokens = Tokens(Tokenizer(), 258)
    for special in (True, False):
        tokens.tokenize("s" * LONG, special).clear()
        assert len(tokens.tokenize("s" * LONG, special)) == LONG


class Real:
    """A tokenizer of Hugging Face's, cut at every name if that may be."""

    def __init__(self, written: dict[str, Any]) -> None:
        library = pytest.importorskip("tokenizers", reason="comes with vllm: make test-vllm")
        self.backend = library.Tokenizer.from_str(json.dumps(written))
        added = msgspec.convert(written["added_tokens"], list[Added])
        names = [token.content for token in added]
        self.is_cut = cuts(self.encode, added, [token.id for token in added]).is_cutting
        self.cut = Cuts(self.encode, names, least=1)

    def encode(self, text: str) -> list[int]:
        encoding: Encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path: Path) -> Real:
    reader = GGUFReader(smollm2_path)
    written = tokenizer_file({name: field.contents() for name, field in reader.fields.items()})
    written["added_tokens"].append({**written["added_tokens"][0], **TOOL, "id": len(written["model"]["vocab"])})
    return Real(written)


@given(text=texts)
def test_a_real_tokenizer_makes_the_same_tokens_of_pieces(smollm2_tokenizer: Real, text: str) -> None:
    assert smollm2_tokenizer.is_cut
    assert smollm2_tokenizer.cut.encode(text) == smollm2_tokenizer.encode(text)


@pytest.mark.parametrize(("scheme", "is_cut"), [("first", False), ("always", True), ("never", True)])
def test_spaces_that_a_real_tokenizer_puts_before_texts(scheme: str, is_cut: bool) -> None:
    named = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {letter: at for at, letter in enumerate("▁abcdefg")}
    spaced = {
        "version": "1.0",
        "added_tokens": [{"id": 8, "content": START, **named}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True},
        "model": {"type": "BPE", "vocab": {**vocabulary, START: 8}, "merges": []},
    }
    assert Real(spaced).is_cut is is_cut

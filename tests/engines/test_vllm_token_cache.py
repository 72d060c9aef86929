"""The token cache does not change the tokens of prompts."""

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

from dragoman.engines.vllm.token_cache import MIN_PIECE_LENGTH, AddedToken, CachingEncoder, create_encoder
from dragoman.engines.vllm.vocabulary import HfVocabulary
from tests.engines.fakevllm.vllm.tokenizer import IM_END, IM_START, NAMES, Backend, Encoding, Tokenizer
from tests.engines.vllm_model import tokenizer_file

START, END = "<|im_start|>", "<|im_end|>"
ADDED = [AddedToken(token, name, special=True) for name, token in NAMES.items()]
TOOL = {"content": "<tool>", "special": False}
"""An added token that is not a control token."""

words = st.sampled_from(
    [START, END, "<tool>", "<tool", "<|im_", "start|>", "<|im_end", "|>", " ", "\n", "the tools", "'s", "É字", "12"]
)
texts = st.lists(words | st.text(max_size=5), max_size=40).map("".join)


class Counted:
    """Encodes words as tokens and records the encoded texts."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.encoded.append(text)
        found = re.findall(r"<\|im_start\|>|<\|im_end\|>|[^<]+|<", text)
        return [NAMES.get(word, 300 + len(word)) for word in found]


def test_long_piece_is_encoded_once() -> None:
    encode = Counted()
    encoder = CachingEncoder(encode, [START, END])
    system = "s" * MIN_PIECE_LENGTH
    for question in ("one", "three"):
        tokens = encoder.encode(f"{START}{system}{END}{START}{question}{END}")
        assert tokens == [IM_START, 300 + MIN_PIECE_LENGTH, IM_END, IM_START, 300 + len(question), IM_END]
    assert encode.encoded == [START, system, f"{END}{START}one{END}", START, f"{END}{START}three{END}"]
    short = f"{START}short{END}" * 2
    encoder.encode(short)
    assert encode.encoded[-1] == short


@given(texts, st.integers(1, 20))
def test_pieces_concatenate_to_the_text(text: str, min_length: int) -> None:
    encoder = CachingEncoder(lambda piece: [ord(letter) for letter in piece], [START, END], min_length)
    assert encoder.encode(text) == encoder.encode(text) == [ord(letter) for letter in text]


@pytest.mark.parametrize(
    "added",
    [
        *(
            [AddedToken(IM_START, START, **{field: True})]
            for field in ("lstrip", "rstrip", "single_word", "normalized")
        ),
        *([*ADDED, AddedToken(9, other)] for other in ("|>|", "x<", f"{START}s", "<|im_")),
    ],
)
def test_names_that_match_beyond_themselves_or_overlap_do_not_split(added: list[AddedToken]) -> None:
    encode = Counted()
    text = f"{START}{'s' * MIN_PIECE_LENGTH}"
    create_encoder(encode, added, [IM_START]).encode(text)
    assert encode.encoded == [text]


def test_tokenizer_that_treats_text_start_differently_does_not_split() -> None:
    encoded = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [*f" {text}".encode()]

    text = f"{START}{'s' * MIN_PIECE_LENGTH}"
    encoder = create_encoder(encode, ADDED, [IM_START, IM_END])
    encoded.clear()
    encoder.encode(text)
    assert encoded == [text]


def test_cache_is_thread_safe() -> None:
    tokens = HfVocabulary(Tokenizer(), 258)
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


def test_control_token_names_in_content_stay_text() -> None:
    tokens = HfVocabulary(Tokenizer(), 258)
    text = f"{START}{'s' * MIN_PIECE_LENGTH}"
    for _ in range(2):
        assert tokens.tokenize(text, special=True)[0] == IM_START
        assert tokens.tokenize(text, special=False) == [*text.encode()]
        # A caller may change the list it gets.
        tokens.tokenize(text, special=False).clear()


class Real:
    """A Hugging Face tokenizer that splits text at every name if that is safe."""

    def __init__(self, written: dict[str, Any]) -> None:
        library = pytest.importorskip("tokenizers", reason="comes with vllm: make test-vllm")
        self.backend = library.Tokenizer.from_str(json.dumps(written))
        added = msgspec.convert(written["added_tokens"], list[AddedToken])
        names = [token.content for token in added]
        self.is_split = create_encoder(self.encode, added, [token.id for token in added]).splits_text
        self.cut = CachingEncoder(self.encode, names, min_length=1)

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
def test_real_tokenizer_encodes_pieces_like_the_whole(smollm2_tokenizer: Real, text: str) -> None:
    assert smollm2_tokenizer.is_split
    assert smollm2_tokenizer.cut.encode(text) == smollm2_tokenizer.encode(text)


@pytest.mark.parametrize(("scheme", "is_split"), [("first", False), ("always", True), ("never", True)])
def test_real_tokenizer_with_prepended_spaces(scheme: str, is_split: bool) -> None:
    named = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {letter: at for at, letter in enumerate("▁abcdefg")}
    spaced = {
        "version": "1.0",
        "added_tokens": [{"id": 8, "content": START, **named}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True},
        "model": {"type": "BPE", "vocab": {**vocabulary, START: 8}, "merges": []},
    }
    assert Real(spaced).is_split is is_split

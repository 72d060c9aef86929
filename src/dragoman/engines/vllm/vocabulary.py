"""A vocabulary made from a Hugging Face tokenizer: the bytes of each token.

    byte-level (GPT-2, Llama 3, Qwen, ...)   each character of a token's name stands for one byte
    spaced (Llama 2, Gemma, Mistral, ...)    a name is text, with ▁ for a space; <0x0A> is a byte
    any other                                no byte table: text is decoded from the last few tokens, and replies
                                             cannot be constrained

Rules
1. Content never becomes a control token: a copy of the tokenizer that treats the names of control tokens as text
   encodes it. Control tokens are those marked `special` in the tokenizer file.
2. Control tokens are hidden in the text, except for requested markers.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, Protocol

import msgspec

from dragoman.core.events import Detokenizer
from dragoman.engines.vllm.token_cache import AddedToken, CachingEncoder, create_encoder
from dragoman.prompt.template import FALLBACK_TEMPLATE

Kind = Literal["byte-level", "spaced"]
NO_TOKEN = -1
SPACE = "▁"
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT_CHARACTER = "\ufffd"
MAX_WINDOW_TOKENS = 32
"""Maximum number of tokens decoded together before incomplete text is accepted."""

INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Names of the tokens before the prefix, before the suffix, and before the text to generate."""


class TextDecoder(Protocol):
    """Decodes a reply token by token."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteTextDecoder:
    """Decodes from the bytes of tokens."""

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._utf8 = Detokenizer()

    def feed(self, token: int) -> str:
        return self._utf8.feed(self._pieces[token])

    def flush(self) -> str:
        return self._utf8.flush()


class WindowTextDecoder:
    """Decodes the last tokens together with the tokenizer; the text added by a token is new."""

    def __init__(self, vocabulary: "HfVocabulary") -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._decoded = ""

    def feed(self, token: int) -> str:
        if token in self._vocabulary.concealed:
            return ""
        self._tokens.append(token)
        text = self._vocabulary.detokenize(self._tokens)
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._tokens) < MAX_WINDOW_TOKENS:
            return ""
        new = text[len(self._decoded) :]
        # Keep the last token: some tokenizers decode a token differently at the start of a text.
        self._tokens = self._tokens[-1:]
        self._decoded = self._vocabulary.detokenize(self._tokens)
        return new

    def flush(self) -> str:
        text = self._vocabulary.detokenize(self._tokens)[len(self._decoded) :] if self._tokens else ""
        self._tokens, self._decoded = [], ""
        return text


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The used parts of `tokenizer.json`."""

    model: dict[str, Any]
    decoder: dict[str, Any] | None = None
    added_tokens: tuple[AddedToken, ...] = ()


class HfVocabulary:
    """`size` is the vocabulary size of the model; `ends` are EOS tokens besides the tokenizer's own."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        serialized = backend.to_str()
        file = msgspec.json.decode(serialized, type=_TokenizerFile)
        self.kind = _detect_kind(file.decoder or {})
        # Copies, because vLLM uses the original.
        self._special_encoder = type(backend).from_str(serialized)
        self._plain_encoder = type(backend).from_str(serialized)
        self._plain_encoder.encode_special_tokens = True
        for encoder in (self._special_encoder, self._plain_encoder):
            encoder.no_truncation()
            encoder.no_padding()
        self.bos = _token_id(tokenizer.bos_token_id)
        self.eos = _token_id(tokenizer.eos_token_id)
        self.ends = ends | ({self.eos} - {NO_TOKEN})
        self.hidden = frozenset(added.id for added in file.added_tokens if added.special)
        pieces = dict(self._read_pieces(file))
        self.vocab_size = max(size, max(pieces, default=0) + 1)
        self.pieces = tuple(pieces.get(token, b"") for token in range(self.vocab_size))
        self.longest_piece = max(map(len, self.pieces), default=1) or 1
        self.add_bos = self.bos != NO_TOKEN and self._special_encoder.encode("a").ids[:1] == [self.bos]
        self.infill = self._find_infill({added.content: added.id for added in file.added_tokens})
        self.concealed: frozenset[int] = self.hidden
        self._visible: Sequence[bytes] = ()
        self.show(())
        used = self._tokens_in_prompts(file.added_tokens)
        self._special_cache = create_encoder(partial(_encode, self._special_encoder), file.added_tokens, used)
        # Plain text has no names at which to split it.
        self._plain_cache = CachingEncoder(partial(_encode, self._plain_encoder), ())

    def _tokens_in_prompts(self, added: Sequence[AddedToken]) -> frozenset[int]:
        """The added tokens that occur in prompts."""
        template = self.chat_template or FALLBACK_TEMPLATE
        return frozenset([self.bos, self.eos, *(token.id for token in added if token.content in template)])

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        return template if isinstance(template, str) else None

    @property
    def control(self) -> tuple[str, ...]:
        return tuple(self.name(token) for token in sorted(self.hidden))

    def name(self, token: int) -> str:
        return "" if token == NO_TOKEN else self.pieces[token].decode("utf-8", "replace")

    def text(self, token: int) -> bytes:
        return self._visible[token]

    def show(self, markers: Collection[str]) -> None:
        shown = frozenset(self.control_ids(markers).values()) - self.ends
        self.concealed = self.hidden - shown
        self._visible = [b"" if token in self.concealed else piece for token, piece in enumerate(self.pieces)]

    def control_ids(self, names: Collection[str]) -> dict[str, int]:
        return {name: token for token in sorted(self.hidden) if (name := self.name(token)) in names}

    def tokenize(self, text: str, special: bool) -> list[int]:
        return (self._special_cache if special else self._plain_cache).encode(_replace_surrogates(text))

    def tokenize_text(self, text: str, special: bool = False) -> list[int]:
        """Tokenize a text, with the BOS and EOS tokens of the vocabulary."""
        encoder = self._special_encoder if special else self._plain_encoder
        return list(encoder.encode(_replace_surrogates(text)).ids)

    def detokenize(self, tokens: Sequence[int]) -> str:
        if self.kind is None:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
        return b"".join([self.pieces[token] for token in tokens]).decode("utf-8", "replace")

    def create_decoder(self) -> TextDecoder:
        return WindowTextDecoder(self) if self.kind is None else ByteTextDecoder(self._visible)

    def _read_pieces(self, file: _TokenizerFile) -> Iterator[tuple[int, bytes]]:
        for token, name in _read_names(file.model):
            if self.kind == "byte-level":
                yield token, _byte_level_piece(name)
            elif self.kind == "spaced":
                yield token, _spaced_piece(name)
            else:
                yield token, str(self.tokenizer.decode([token])).encode("utf-8", "replace")
        for added in file.added_tokens:
            yield added.id, added.content.encode("utf-8", "replace")

    def _find_infill(self, ids: Mapping[str, int]) -> tuple[int, int, int] | None:
        for before, after, middle in INFILL:
            if before in ids and after in ids and middle in ids:
                return ids[before], ids[after], ids[middle]
        return None


def _encode(encoder: Any, text: str) -> list[int]:
    ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
    return ids


def _token_id(value: Any) -> int:
    return value if isinstance(value, int) else NO_TOKEN


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which a tokenizer rejects."""
    return text.encode("utf-8", "replace").decode()


def _detect_kind(decoder: Mapping[str, Any]) -> Kind | None:
    steps = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    types = {step.get("type") for step in steps}
    if "ByteLevel" in types:
        return "byte-level"
    spaces = any(step.get("type") == "Replace" and SPACE in str(step.get("pattern")) for step in steps)
    return "spaced" if spaces or types & {"ByteFallback", "Metaspace"} else None


def _read_names(model: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, Mapping):
        yield from ((token, name) for name, token in vocabulary.items())
    else:
        # Unigram models: a list of names and scores.
        yield from enumerate(entry[0] for entry in vocabulary)


def _byte_level_piece(name: str) -> bytes:
    alphabet = _byte_alphabet()
    if not all(character in alphabet for character in name):
        return name.encode("utf-8", "replace")
    return bytes([alphabet[character] for character in name])


def _spaced_piece(name: str) -> bytes:
    byte = BYTE_NAME.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode("utf-8", "replace")


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}

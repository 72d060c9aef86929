"""A Hugging Face tokenizer as a vocabulary: for each token the bytes it stands for.

    byte-level (GPT-2, Llama 3, Qwen, ...)   every character of a token's name stands for one byte
    spaced (Llama 2, Gemma, Mistral, ...)    a name is text, with ▁ for a space; <0x0A> is a byte
    anything else                            there is no table: text is found by decoding the last few tokens again,
                                             and replies cannot be kept to a shape

Rules
1. Content never becomes a control token: it is encoded by a copy of the tokenizer to which the names of control tokens
   are text. Control tokens are those that the tokenizer's file calls special.
2. A reader sees nothing of a control token, unless it is a marker that was asked for.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol

import msgspec

from dragoman.core.detokenizer import Detokenizer
from dragoman.engines.vllm.token_cache import Added, Cuts, cuts
from dragoman.prompt.template import FALLBACK

Kind = Literal["byte-level", "spaced"]
NO_TOKEN = -1
SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNFINISHED = "\ufffd"
MOST_TOGETHER = 32
"""Tokens that are decoded again where there is no table, before what they gave counts as it is."""

INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Names of the tokens before the prefix, before the suffix and before what is written between them."""


class Spelling(Protocol):
    """The text of a reply, token by token."""

    def take(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Table:
    """From the bytes of tokens."""

    __slots__ = ("_bytes", "_utf8")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._bytes = pieces
        self._utf8 = Detokenizer()

    def take(self, token: int) -> str:
        return self._utf8.feed(self._bytes[token])

    def flush(self) -> str:
        return self._utf8.flush()


class Window:
    """From what the tokenizer makes of the last tokens together: what that has more than before is new."""

    def __init__(self, vocabulary: "Tokens") -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._told = ""

    def take(self, token: int) -> str:
        if token in self._vocabulary.concealed:
            return ""
        self._tokens.append(token)
        text = self._vocabulary.detokenize(self._tokens)
        if text.endswith(UNFINISHED) and len(self._tokens) < MOST_TOGETHER:
            return ""
        new = text[len(self._told) :]
        # The last one stays: some tokenizers write what follows another token differently from what begins a text.
        self._tokens = self._tokens[-1:]
        self._told = self._vocabulary.detokenize(self._tokens)
        return new

    def flush(self) -> str:
        text = self._vocabulary.detokenize(self._tokens)[len(self._told) :] if self._tokens else ""
        self._tokens, self._told = [], ""
        return text


class _File(msgspec.Struct, frozen=True):
    """What a tokenizer says of itself in `tokenizer.json`."""

    model: dict[str, Any]
    decoder: dict[str, Any] | None = None
    added_tokens: tuple[Added, ...] = ()


class Tokens:
    """The vocabulary of `tokenizer`. `size` is the number of tokens that the model knows, `ends` what ends a text
    beside the tokenizer's own."""

    def __init__(self, tokenizer: Any, size: int, ends: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        written = backend.to_str()
        file = msgspec.json.decode(written, type=_File)
        self.kind = _kind(file.decoder or {})
        # Copies: the tokenizer's own is vLLM's to use.
        self._named = type(backend).from_str(written)
        self._plain = type(backend).from_str(written)
        self._plain.encode_special_tokens = True
        for copied in (self._named, self._plain):
            copied.no_truncation()
            copied.no_padding()
        self.bos = _token(tokenizer.bos_token_id)
        self.eos = _token(tokenizer.eos_token_id)
        self.ends = ends | ({self.eos} - {NO_TOKEN})
        self.hidden = frozenset(added.id for added in file.added_tokens if added.special)
        found = dict(self._found(file))
        self.vocab_size = max(size, max(found, default=0) + 1)
        self.pieces = tuple(found.get(token, b"") for token in range(self.vocab_size))
        self.longest_piece = max(map(len, self.pieces), default=1) or 1
        self.add_bos = self.bos != NO_TOKEN and self._named.encode("a").ids[:1] == [self.bos]
        self.infill = self._infill({added.content: added.id for added in file.added_tokens})
        self.concealed: frozenset[int] = self.hidden
        self._visible: Sequence[bytes] = ()
        self.show(())
        self._cuts = cuts(self._encoded, file.added_tokens, self._written(file.added_tokens))
        # In plain text no name counts, and there is nowhere to cut it.
        self._uncut = Cuts(self._encoded_plain, ())

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._named.encode(text, add_special_tokens=False).ids
        return ids

    def _encoded_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _written(self, added: Sequence[Added]) -> frozenset[int]:
        """Those of the tokens that prompts have."""
        template = self.chat_template or FALLBACK
        return frozenset([self.bos, self.eos, *(token.id for token in added if token.content in template)])

    @property
    def chat_template(self) -> str | None:
        found = self.tokenizer.chat_template
        if isinstance(found, Mapping):
            found = found.get("default")
        return found if isinstance(found, str) else None

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
        return (self._cuts if special else self._uncut).encode(_whole(text))

    def tokenize_whole(self, text: str) -> list[int]:
        """A text that is content and nothing else, with the tokens that the vocabulary wants around it."""
        return list(self._plain.encode(_whole(text)).ids)

    def detokenize(self, tokens: Sequence[int]) -> str:
        if self.kind is None:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
        return b"".join([self.pieces[token] for token in tokens]).decode("utf-8", "replace")

    def spelling(self) -> Spelling:
        """For one reply."""
        return Window(self) if self.kind is None else Table(self._visible)

    def _found(self, file: _File) -> Iterator[tuple[int, bytes]]:
        for token, name in _names(file.model):
            if self.kind == "byte-level":
                yield token, _of_bytes(name)
            elif self.kind == "spaced":
                yield token, _of_text(name)
            else:
                yield token, str(self.tokenizer.decode([token])).encode("utf-8", "replace")
        for added in file.added_tokens:
            yield added.id, added.content.encode("utf-8", "replace")

    def _infill(self, ids: Mapping[str, int]) -> tuple[int, int, int] | None:
        for before, after, middle in INFILL:
            if before in ids and after in ids and middle in ids:
                return ids[before], ids[after], ids[middle]
        return None


def _token(found: Any) -> int:
    return found if isinstance(found, int) else NO_TOKEN


def _whole(text: str) -> str:
    """Half characters, which a request may have brought, are none to a tokenizer."""
    return text.encode("utf-8", "replace").decode()


def _kind(decoder: Mapping[str, Any]) -> Kind | None:
    steps = decoder.get("decoders", ()) if decoder.get("type") == "Sequence" else (decoder,)
    types = {step.get("type") for step in steps}
    if "ByteLevel" in types:
        return "byte-level"
    spaces = any(step.get("type") == "Replace" and SPACE in str(step.get("pattern")) for step in steps)
    return "spaced" if spaces or types & {"ByteFallback", "Metaspace"} else None


def _names(model: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, Mapping):
        yield from ((token, name) for name, token in vocabulary.items())
    else:
        # A list of names with how likely they are.
        yield from enumerate(entry[0] for entry in vocabulary)


def _of_bytes(name: str) -> bytes:
    alphabet = _alphabet()
    if not all(character in alphabet for character in name):
        return name.encode("utf-8", "replace")
    return bytes([alphabet[character] for character in name])


def _of_text(name: str) -> bytes:
    byte = BYTE.fullmatch(name)
    return bytes([int(byte[1], 16)]) if byte else name.replace(SPACE, " ").encode("utf-8", "replace")


@cache
def _alphabet() -> dict[str, int]:
    """Bytes that are printable stand for themselves; the others, in their order, for what follows the first 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}

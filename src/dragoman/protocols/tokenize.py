"""Text to token ids and back. Other servers call the text `content` or `prompt`: here both names do."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body
from dragoman.protocols.openai import TokenId


class TokenizeFields(msgspec.Struct, frozen=True):
    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    parse_special: bool = False


class DetokenizeFields(msgspec.Struct, frozen=True):
    tokens: list[TokenId]
    model: str | None = None


class Untokenized(msgspec.Struct, frozen=True):
    """A text that is to become tokens; with `special` the names of control tokens in it count."""

    model: str
    text: str
    special: bool


class Tokenized(msgspec.Struct, frozen=True):
    model: str
    tokens: tuple[int, ...]


def decode_text(body: bytes) -> Untokenized:
    fields = json_body.convert(json_body.parse(body), TokenizeFields)
    text = fields.content if fields.content is not None else fields.prompt
    if text is None:
        raise BadRequest("content: required, but missing", param="content")
    return Untokenized(fields.model or "", text, fields.parse_special)


def decode_tokens(body: bytes) -> Tokenized:
    fields = json_body.convert(json_body.parse(body), DetokenizeFields)
    return Tokenized(fields.model or "", tuple(fields.tokens))


def encode_tokens(tokens: Sequence[int], context: int | None) -> dict[str, Any]:
    return {"tokens": tokens, "count": len(tokens), "max_model_len": context}


def encode_text(text: str) -> dict[str, Any]:
    return {"content": text, "prompt": text}

"""Requests and replies of the tokenize, detokenize and render endpoints.

The text to tokenize may be called `content` or `prompt`, as in other servers.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

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


class TokenizeRequest(msgspec.Struct, frozen=True):
    """With `special`, control tokens in the text are recognized by name."""

    model: str
    text: str
    special: bool


class DetokenizeRequest(msgspec.Struct, frozen=True):
    model: str
    tokens: tuple[int, ...]


def decode_tokenize(body: bytes) -> TokenizeRequest:
    fields = json_body.convert(json_body.parse(body), TokenizeFields)
    text = fields.content if fields.content is not None else fields.prompt
    if text is None:
        raise json_body.missing_field("content")
    return TokenizeRequest(fields.model or "", text, fields.parse_special)


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    fields = json_body.convert(json_body.parse(body), DetokenizeFields)
    return DetokenizeRequest(fields.model or "", tuple(fields.tokens))


def encode_tokens(tokens: Sequence[int], context: int | None) -> dict[str, Any]:
    return {"tokens": tokens, "count": len(tokens), "max_model_len": context}


def encode_text(text: str) -> dict[str, Any]:
    return {"content": text, "prompt": text}


def encode_prompt(model: str, text: str, tokens: Sequence[int], format_name: str) -> dict[str, Any]:
    """Encode the rendered prompt of a chat. `format_name` is the format that its reply would be parsed in."""
    return {
        "object": "chat.completion.prompt",
        "model": model,
        "prompt": text,
        "tokens": tokens,
        "token_count": len(tokens),
        "format": format_name,
    }

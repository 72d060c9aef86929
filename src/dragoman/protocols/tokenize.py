"""Requests and replies of the tokenize, detokenize and render endpoints.

The text to tokenize may be called `content` or `prompt`, as in other servers.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.protocols import json_body
from dragoman.protocols.openai import TokenIds


class TokenizeRequest(msgspec.Struct, frozen=True):
    """With `parse_special`, control tokens in the text are recognized by name."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    parse_special: bool = False

    @property
    def text(self) -> str:
        return self.content if self.content is not None else self.prompt or ""


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: TokenIds
    model: str | None = None


def decode_tokenize(body: bytes) -> TokenizeRequest:
    request = json_body.convert(json_body.parse(body), TokenizeRequest)
    if request.content is None and request.prompt is None:
        raise json_body.missing_field("content")
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    return json_body.convert(json_body.parse(body), DetokenizeRequest)


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

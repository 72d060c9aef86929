"""Requests and replies of the tokenize, detokenize and render endpoints, named as in llama.cpp's server and vLLM.

    tokenize := (content | prompt) [parse_special, add_special] | the fields of a chat [add_generation_prompt]
                [with_pieces, return_token_strs]

The tokens of a chat are those of its prompt. Without `add_generation_prompt` they end with the last message, and with
`continue_final_message` with its text.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest
from dragoman.protocols import json_body
from dragoman.protocols.chat import server as chat
from dragoman.protocols.openai import TokenIds


class TokenizeFields(msgspec.Struct, frozen=True):
    """With `parse_special`, control tokens in the text are recognized by name. `add_special` adds the tokens that the
    model needs around a text."""

    content: str | None = None
    prompt: str | None = None
    model: str | None = None
    parse_special: bool | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None


SPECIAL_FIELDS = ("add_special", "add_special_tokens")
TEXTS_FIELDS = ("with_pieces", "return_token_strs")
CHAT_DEFAULTS = dict.fromkeys(("parse_special", *SPECIAL_FIELDS), False)
"""Fields that have no effect on a chat. The template decides about special tokens."""


class TokenizeRequest(msgspec.Struct, frozen=True):
    """A text, or the chat whose prompt is tokenized."""

    fields: TokenizeFields
    chat: GenerationRequest | None
    asked: tuple[Asked, ...]

    @property
    def text(self) -> str:
        fields = self.fields
        return fields.content if fields.content is not None else fields.prompt or ""

    def asks_for(self, feature: Feature) -> bool:
        return any(asked.feature == feature for asked in self.asked)


class DetokenizeRequest(msgspec.Struct, frozen=True):
    tokens: TokenIds
    model: str | None = None


def decode_tokenize(body: bytes) -> TokenizeRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, TokenizeFields)
    asked = [Asked(Feature.TOKEN_TEXTS, name) for name in TEXTS_FIELDS if getattr(fields, name)]
    if parsed.get("messages") is not None:
        if fields.content is not None or fields.prompt is not None:
            raise BadRequest("messages: only one of content, prompt and messages is allowed", param="messages")
        chat_request = _decode_chat(parsed, fields)
        return TokenizeRequest(fields, chat_request, (*chat_request.asked, *asked))
    if fields.content is None and fields.prompt is None:
        raise json_body.missing_field("content")
    asked += [Asked(Feature.ADD_SPECIAL, name) for name in SPECIAL_FIELDS if getattr(fields, name)]
    unknown = json_body.unknown_fields(parsed, TokenizeFields)
    unknown += ["add_generation_prompt"] if fields.add_generation_prompt is not None else []
    asked += [Asked(Feature.UNKNOWN, name) for name in unknown]
    return TokenizeRequest(fields, None, tuple(asked))


def _decode_chat(parsed: dict[str, Any], fields: TokenizeFields) -> GenerationRequest:
    """Decode the other fields as those of a chat."""
    own = TEXTS_FIELDS if parsed.get("continue_final_message") else (*TEXTS_FIELDS, "add_generation_prompt")
    decoded = chat.decode_fields(
        {
            name: value
            for name, value in parsed.items()
            if name not in own and not (name in CHAT_DEFAULTS and value is CHAT_DEFAULTS[name])
        }
    )
    if fields.add_generation_prompt is not False or decoded.continues_last:
        return decoded
    asked = (*decoded.asked, Asked(Feature.GENERATION_PROMPT, "add_generation_prompt"))
    return msgspec.structs.replace(decoded, add_generation_prompt=False, asked=asked)


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    return json_body.convert(json_body.parse(body), DetokenizeRequest)


def encode_tokens(
    request: TokenizeRequest, tokens: Sequence[int], context: int | None, texts: Sequence[bytes] | None
) -> dict[str, Any]:
    """`texts` are the texts of the tokens, if they are wanted and known."""
    encoded: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": context, "token_strs": None}
    if texts is not None and request.fields.with_pieces:
        encoded["tokens"] = [{"id": token, "piece": _piece(text)} for token, text in zip(tokens, texts, strict=True)]
    if texts is not None and request.fields.return_token_strs:
        encoded["token_strs"] = [text.decode("utf-8", "replace") for text in texts]
    return encoded


def _piece(text: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it is part of a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


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

"""Reads JSON, content, reasoning and logprobs of replies, tolerating the differences between servers.

content   := null | text | part*              part := text | {text} | {thinking} | {refusal}
reasoning := reasoning_content | reasoning | thinking | thought | reasoning_text | reasoning_details
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer
from dragoman.core.events import TokenLogprob

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "reasoning_text")
"""Some servers send the same text in two of these fields; the first counts."""
MAX_EXCERPT = 300
NO_ID = -1
"""The id of tokens of which only the text is known."""

TEXT_FIELDS = ("content", "text")
"""Fields that may end with the first half of a surrogate pair whose second half starts the next chunk."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_INNER_SURROGATE = re.compile("(?<!^)[\udc00-\udfff]|[\ud800-\udbff](?!$)")

TypedText = tuple[Literal["text", "thought"], str]


def parse(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS as error:
        if _ESCAPED_SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            return _parse_surrogates(text)
        raise _invalid_json(text) from error


def _parse_surrogates(text: str | bytes) -> Any:
    """Parse JSON with escaped lone surrogates, from servers that split text by UTF-16 units."""
    try:
        return _replace_inner(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise _invalid_json(text) from error


def _invalid_json(text: str | bytes) -> BadAnswer:
    return BadAnswer(f"the server sent invalid JSON: {excerpt(text)!r}")


def _replace_inner(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {replace_surrogates(key): _replace_inner(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_inner(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return _INNER_SURROGATE.sub("\ufffd", value) if name in TEXT_FIELDS else replace_surrogates(value)


def replace_surrogates(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


def parse_object(text: str | bytes) -> dict[str, Any]:
    parsed = parse(text)
    if not isinstance(parsed, dict):
        raise BadAnswer(f"the server sent JSON that is not an object: {excerpt(text)!r}")
    return parsed


def excerpt(text: str | bytes) -> str:
    shown = text[: MAX_EXCERPT * 4].decode("utf-8", "replace") if isinstance(text, bytes) else text
    return shown if len(shown) <= MAX_EXCERPT else shown[:MAX_EXCERPT] + "…"


def message_texts(message: Mapping[str, Any]) -> Iterator[TypedText]:
    """Yield the texts of a message or a delta: its reasoning, then its content."""
    reasoning = _reasoning(message)
    if reasoning:
        yield "thought", reasoning
    yield from content(message.get("content"))
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        yield "text", refusal


def _reasoning(message: Mapping[str, Any]) -> str:
    for name in REASONING_FIELDS:
        value = message.get(name)
        if value:
            return value if isinstance(value, str) else "".join(text for _, text in content(value))
    details = message.get("reasoning_details")
    return "".join(_detail_texts(details)) if isinstance(details, list) else ""


def content(value: object) -> Iterator[TypedText]:
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            yield "text", part
        elif isinstance(part, dict):
            yield from _part(part)


def _part(part: Mapping[str, Any]) -> Iterator[TypedText]:
    if "thinking" in part:
        # Mistral sends reasoning as a list of parts.
        yield from (("thought", text) for _, text in content(part["thinking"]))
        return
    is_reasoning = part.get("type") in ("reasoning", "reasoning_text", "summary_text")
    text = part.get("text") if part.get("text") is not None else part.get("refusal")
    if isinstance(text, dict):
        text = text.get("value")
    if isinstance(text, str):
        yield ("thought" if is_reasoning else "text"), text


def _detail_texts(details: list[Any]) -> Iterator[str]:
    for detail in details:
        if isinstance(detail, dict):
            text = detail.get("text") or detail.get("summary")
            if isinstance(text, str):
                yield text


def dict_key(value: object) -> str | int | None:
    """Return an id or index that can be a dict key; None for any other value."""
    return value if isinstance(value, str | int) else None


def logprobs(fields: object) -> tuple[TokenLogprob, ...]:
    """Read logprobs in the format of chat completions (a list of entries) or of completions (parallel lists)."""
    if not isinstance(fields, dict):
        return ()
    entries = fields.get("content")
    if isinstance(entries, list):
        return tuple(_logprob(entry) for entry in entries if isinstance(entry, dict))
    tokens, values, tops = (_list(fields.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return tuple(
        TokenLogprob(NO_ID, str(token).encode(), _logprob_value(value), _alternatives(top))
        for token, value, top in itertools.zip_longest(tokens, values, tops[: len(tokens)])
    )


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(_logprob(other) for other in _list(entry.get("top_logprobs")) if isinstance(other, dict))
    raw = entry.get("bytes")
    try:
        text = bytes(raw) if isinstance(raw, list) else str(entry.get("token", "")).encode()
    except (TypeError, ValueError) as error:
        raise BadAnswer("invalid `bytes` of a token in the logprobs") from error
    return TokenLogprob(NO_ID, text, _logprob_value(entry.get("logprob")), top)


def _alternatives(top: object) -> tuple[TokenLogprob, ...]:
    if not isinstance(top, dict):
        return ()
    return tuple(TokenLogprob(NO_ID, str(token).encode(), _logprob_value(value)) for token, value in top.items())


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _logprob_value(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None  # an integer of hundreds of digits

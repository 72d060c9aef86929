"""What is read with a generous eye: JSON of frames, contents, thoughts.

content := null | text | part*                part := text | {text} | {thinking} | {refusal}
thought := reasoning_content | reasoning | thinking | thought | reasoning_text | reasoning_details
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer
from dragoman.core.events import TokenLogprob

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "reasoning_text")
"""Names under which servers tell a thought; some use two of them at once for the same text."""
EXCERPT = 300
NO_ID = -1
"""Of tokens that came with their text alone."""

JOINED = ("content", "text")
"""Where what is said stands: half a character at the end of one piece may have the other half in the next."""
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")
_INNER_HALF = re.compile("(?<!^)[\udc00-\udfff]|[\ud800-\udbff](?!$)")

Said = tuple[Literal["text", "thought"], str]


def parse(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS as error:
        if _ESCAPED.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
            return _parse_halves(text)
        raise BadAnswer(f"the server sent what is no JSON: {excerpt(text)!r}") from error


def _parse_halves(text: str | bytes) -> Any:
    """JSON in which a character is cut in two: whoever writes it counted as Java and JavaScript do."""
    try:
        return _mended(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the server sent what is no JSON: {excerpt(text)!r}") from error


def _mended(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {without_halves(key): _mended(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mended(inner, name) for inner in value]
    if not isinstance(value, str):
        return value
    return _INNER_HALF.sub("\ufffd", value) if name in JOINED else without_halves(value)


def without_halves(text: str) -> str:
    return _HALF.sub("\ufffd", text)


def parse_object(text: str | bytes) -> dict[str, Any]:
    parsed = parse(text)
    if not isinstance(parsed, dict):
        raise BadAnswer(f"the server sent what is no JSON object: {excerpt(text)!r}")
    return parsed


def excerpt(text: str | bytes) -> str:
    shown = text[: EXCERPT * 4].decode("utf-8", "replace") if isinstance(text, bytes) else text
    return shown if len(shown) <= EXCERPT else shown[:EXCERPT] + "…"


def said(message: Mapping[str, Any]) -> Iterator[Said]:
    """What a message or a piece of one says: its thought, then its content."""
    thought = thought_of(message)
    if thought:
        yield "thought", thought
    yield from content(message.get("content"))
    refusal = message.get("refusal")
    if isinstance(refusal, str):
        yield "text", refusal


def thought_of(message: Mapping[str, Any]) -> str:
    for name in THOUGHTS:
        told = message.get(name)
        if told:
            return told if isinstance(told, str) else "".join(text for _, text in content(told))
    details = message.get("reasoning_details")
    return "".join(_texts(details)) if isinstance(details, list) else ""


def content(given: object) -> Iterator[Said]:
    if isinstance(given, str):
        yield "text", given
    elif isinstance(given, dict):
        yield from _part(given)
    elif isinstance(given, list):
        for part in given:
            if isinstance(part, str):
                yield "text", part
            elif isinstance(part, dict):
                yield from _part(part)


def _part(part: Mapping[str, Any]) -> Iterator[Said]:
    if "thinking" in part:
        # Mistral's thoughts have parts of their own.
        yield from (("thought", text) for _, text in content(part["thinking"]))
        return
    kind = "thought" if part.get("type") in ("reasoning", "reasoning_text", "summary_text") else "text"
    text = part.get("text") if part.get("text") is not None else part.get("refusal")
    if isinstance(text, dict):
        text = text.get("value")
    if isinstance(text, str):
        yield ("thought" if kind == "thought" else "text"), text


def _texts(details: list[Any]) -> Iterator[str]:
    for detail in details:
        if isinstance(detail, dict):
            told = detail.get("text") or detail.get("summary")
            if isinstance(told, str):
                yield told


def key(value: object) -> str | int | None:
    """An id or an index of a reply; None for any other value, which cannot be looked up."""
    return value if isinstance(value, str | int) else None


def logprobs(told: object) -> tuple[TokenLogprob, ...]:
    """In either of OpenAI's shapes: a list of entries for a chat, lists side by side for a completion."""
    if not isinstance(told, dict):
        return ()
    entries = told.get("content")
    if isinstance(entries, list):
        return tuple(_logprob(entry) for entry in entries if isinstance(entry, dict))
    tokens, chances, tops = (_list(told.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return tuple(
        TokenLogprob(NO_ID, str(token).encode(), _chance(chance), _rivals(top))
        for token, chance, top in itertools.zip_longest(tokens, chances, tops[: len(tokens)])
    )


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    rivals = entry.get("top_logprobs")
    top = tuple(_logprob(rival) for rival in rivals if isinstance(rival, dict)) if isinstance(rivals, list) else ()
    given = entry.get("bytes")
    try:
        text = bytes(given) if isinstance(given, list) else str(entry.get("token", "")).encode()
    except (TypeError, ValueError) as error:
        raise BadAnswer("the bytes of a token are none") from error
    return TokenLogprob(NO_ID, text, _chance(entry.get("logprob")), top)


def _rivals(top: object) -> tuple[TokenLogprob, ...]:
    if not isinstance(top, dict):
        return ()
    return tuple(TokenLogprob(NO_ID, str(token).encode(), _chance(chance)) for token, chance in top.items())


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _chance(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        # An integer of hundreds of digits.
        return None

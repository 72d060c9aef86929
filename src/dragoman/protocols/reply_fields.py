"""Reads JSON, content, reasoning, logprobs and usage of replies, tolerating the differences between servers.

    content     := null | text | part*              part := text | {text} | {thinking} | {refusal}
    reasoning   := reasoning_content | reasoning | thinking | thought | reasoning_text | reasoning_details
    prompt      := prompt_tokens | input_tokens | prompt_eval_count | prompt_n
    completion  := completion_tokens | output_tokens | generated_tokens | eval_count | predicted_n
    cached      := …_details.cached_tokens | cached_tokens | prompt_cache_hit_tokens | cache_read_input_tokens | cache_n
    kept        := …_details.cache_write_tokens | cache_creation_input_tokens
    thinking    := …_details.reasoning_tokens | …_details.thinking_tokens | reasoning_tokens

Rules
1. If several names are present, the first in the list counts. Some servers send the same text in two fields.
2. Anthropic's `input_tokens` exclude tokens read from or written to a cache, and llama.cpp's `prompt_n` excludes tokens
   read from it. Here the prompt includes both.
3. A usage without prompt and completion counts is ignored. Counts may be text.
4. Lethean's server sends `thought` beside `choices`, not in a message.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer
from dragoman.core.events import TokenLogprob, Usage

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "reasoning_text")
MAX_EXCERPT = 300
NO_ID = -1
"""The id of tokens of which only the text is known."""

TEXT_FIELDS = ("content", "text")
"""Fields that may end with the first half of a surrogate pair whose second half starts the next chunk."""
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_INNER_SURROGATE = re.compile("(?<!^)[\udc00-\udfff]|[\ud800-\udbff](?!$)")

PROMPT = ("prompt_tokens", "input_tokens", "prompt_eval_count", "prompt_n")
COMPLETION = ("completion_tokens", "output_tokens", "generated_tokens", "eval_count", "predicted_n")
CACHED = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens", "cache_n")
KEPT = ("cache_write_tokens", "cache_creation_input_tokens")
REASONING = ("reasoning_tokens", "thinking_tokens")
PROMPT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
COMPLETION_DETAILS = ("completion_tokens_details", "output_tokens_details")
OUTSIDE_PROMPT = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_n")
"""Tokens that are not included in the prompt count."""

TypedText = tuple[Literal["text", "thought"], str]


def parse(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except DECODE_ERRORS as error:
        failure: Exception = error
    if _ESCAPED_SURROGATE.search(text if isinstance(text, str) else text.decode("utf-8", "replace")):
        # Servers that split text by UTF-16 units send lone surrogates.
        try:
            return _replace_inner(json.loads(text))
        except (ValueError, RecursionError) as error:
            failure = error
    raise BadAnswer(f"the server sent invalid JSON: {excerpt(text)!r}") from failure


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
    details = [object_of(detail) for detail in list_of(message.get("reasoning_details"))]
    return "".join(text_of(detail.get("text") or detail.get("summary")) for detail in details)


def unknown_parts(content: object) -> list[Any]:
    """The parts of a content that have neither text nor reasoning, such as audio or citations."""
    parts = [part for part in list_of(content) if isinstance(part, dict) and "thinking" not in part]
    return [part for part in parts if next(_part(part), None) is None]


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


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def object_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def arguments_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else msgspec.json.encode(arguments).decode()


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
    tokens, values, tops = (list_of(fields.get(name)) for name in ("tokens", "token_logprobs", "top_logprobs"))
    return tuple(
        TokenLogprob(NO_ID, str(token).encode(), _logprob_value(value), _alternatives(top))
        for token, value, top in itertools.zip_longest(tokens, values, tops[: len(tokens)])
    )


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(_logprob(other) for other in list_of(entry.get("top_logprobs")) if isinstance(other, dict))
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


def _logprob_value(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None  # an integer of hundreds of digits


def read_usage(fields: object, previous: Usage | None = None) -> Usage | None:
    """Return the usage. Missing counts are taken from `previous`."""
    if not isinstance(fields, dict):
        return previous
    prompt, completion = _first([fields], PROMPT), _first([fields], COMPLETION)
    if prompt is None and completion is None:
        return previous
    old = previous or Usage()
    prompt_objects = _with_details(fields, PROMPT_DETAILS)
    cached, kept = _first(prompt_objects, CACHED), _first(prompt_objects, KEPT)
    reasoning = _first(_with_details(fields, COMPLETION_DETAILS), REASONING)
    outside = 0 if "prompt_tokens" in fields else sum(_count(fields.get(name)) or 0 for name in OUTSIDE_PROMPT)
    return Usage(
        prompt=old.prompt if prompt is None else prompt + outside,
        completion=old.completion if completion is None else completion,
        cached=old.cached if cached is None else cached,
        reasoning=old.reasoning if reasoning is None else reasoning,
        kept=old.kept if kept is None else kept,
    )


def _with_details(fields: Mapping[str, Any], names: Sequence[str]) -> list[Mapping[str, Any]]:
    return [*(object_of(fields.get(name)) for name in names), fields]


def _first(objects: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int | None:
    counts = (_count(fields.get(name)) for fields in objects for name in names)
    return next((count for count in counts if count is not None), None)


def _count(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)

"""Reads the token usage of a reply, whatever names the server uses.

    prompt      prompt_tokens | input_tokens | prompt_eval_count | prompt_n
    completion  completion_tokens | output_tokens | generated_tokens | eval_count | predicted_n
    cached      …_details.cached_tokens | cached_tokens | prompt_cache_hit_tokens | cache_read_input_tokens | cache_n
    reasoning   …_details.reasoning_tokens | …_details.thinking_tokens | reasoning_tokens

Rules
1. If several names are present, the first in the list counts.
2. Anthropic's `input_tokens` exclude tokens read from or written to a cache, and llama.cpp's `prompt_n` excludes tokens
   read from it. Here the prompt includes both.
3. An object without prompt and completion counts is ignored.
"""

from collections.abc import Mapping
from typing import Any

from dragoman.core.events import Usage

PROMPT = ("prompt_tokens", "input_tokens", "prompt_eval_count", "prompt_n")
COMPLETION = ("completion_tokens", "output_tokens", "generated_tokens", "eval_count", "predicted_n")
CACHED = ("cached_tokens", "prompt_cache_hit_tokens", "cache_read_input_tokens", "cache_n")
REASONING = ("reasoning_tokens", "thinking_tokens")
PROMPT_DETAILS = ("prompt_tokens_details", "input_tokens_details")
COMPLETION_DETAILS = ("completion_tokens_details", "output_tokens_details")
OUTSIDE_PROMPT = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_n")
"""Tokens that are not included in the prompt count."""


def read_usage(fields: object, previous: Usage | None = None) -> Usage | None:
    """Return the usage. Missing counts are taken from `previous`."""
    if not isinstance(fields, dict):
        return previous
    prompt, completion = _first(fields, PROMPT), _first(fields, COMPLETION)
    if prompt is None and completion is None:
        return previous
    old = previous or Usage()
    cached = _first_in((*_objects(fields, PROMPT_DETAILS), fields), CACHED)
    reasoning = _first_in((*_objects(fields, COMPLETION_DETAILS), fields), REASONING)
    outside = 0 if "prompt_tokens" in fields else sum(_count(fields.get(name)) or 0 for name in OUTSIDE_PROMPT)
    return Usage(
        prompt=old.prompt if prompt is None else prompt + outside,
        completion=old.completion if completion is None else completion,
        cached=old.cached if cached is None else cached,
        reasoning=old.reasoning if reasoning is None else reasoning,
    )


def _objects(fields: Mapping[str, Any], names: tuple[str, ...]) -> list[Mapping[str, Any]]:
    return [fields[name] for name in names if isinstance(fields.get(name), dict)]


def _first_in(objects: tuple[Mapping[str, Any], ...], names: tuple[str, ...]) -> int | None:
    counts = (_first(fields, names) for fields in objects)
    return next((count for count in counts if count is not None), None)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    counts = (_count(fields.get(name)) for name in names)
    return next((count for count in counts if count is not None), None)


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)

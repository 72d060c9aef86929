"""How many tokens a server says it has used, under whichever names.

    prompt      prompt_tokens | input_tokens | prompt_eval_count | prompt_n
    completion  completion_tokens | output_tokens | generated_tokens | eval_count | predicted_n
    cached      …_details.cached_tokens | cached_tokens | prompt_cache_hit_tokens | cache_read_input_tokens | cache_n
    reasoning   …_details.reasoning_tokens | …_details.thinking_tokens | reasoning_tokens

Rules
1. Of several names for one thing the first that is there counts.
2. Anthropic does not count among `input_tokens` what comes from a cache or goes into one, and llama.cpp's timings do
   not count among `prompt_n` what comes from one: here all of it is the prompt.
3. What says nothing about tokens is no usage.
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
BESIDE = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_n")
"""Counted beside the prompt, not in it."""


def read(told: object, before: Usage | None = None) -> Usage | None:
    """The usage; what it leaves out is as it was `before`."""
    if not isinstance(told, dict):
        return before
    prompt, completion = _first(told, PROMPT), _first(told, COMPLETION)
    if prompt is None and completion is None:
        return before
    old = before or Usage()
    cached = _first_of((*_parts(told, PROMPT_DETAILS), told), CACHED)
    reasoning = _first_of((*_parts(told, COMPLETION_DETAILS), told), REASONING)
    beside = 0 if "prompt_tokens" in told else sum(_count(told.get(name)) or 0 for name in BESIDE)
    return Usage(
        prompt=old.prompt if prompt is None else prompt + beside,
        completion=old.completion if completion is None else completion,
        cached=old.cached if cached is None else cached,
        reasoning=old.reasoning if reasoning is None else reasoning,
    )


def _parts(told: Mapping[str, Any], names: tuple[str, ...]) -> list[Mapping[str, Any]]:
    return [told[name] for name in names if isinstance(told.get(name), dict)]


def _first_of(places: tuple[Mapping[str, Any], ...], names: tuple[str, ...]) -> int | None:
    found = (_first(place, names) for place in places)
    return next((count for count in found if count is not None), None)


def _first(told: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    counts = (_count(told.get(name)) for name in names)
    return next((count for count in counts if count is not None), None)


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        return None
    return int(value)

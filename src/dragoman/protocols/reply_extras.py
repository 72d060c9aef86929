"""What chat and completion replies contain beyond OpenAI's API, under the names of vLLM and llama.cpp's server.

usage             of a stream so far, in every chunk      stream_options.continuous_usage_stats    vLLM
timings           of the prompt and of the reply          timings_per_token                        llama.cpp
token_ids         of the reply, as its usage counts them  return_token_ids                         vLLM
prompt_token_ids                                          return_token_ids                         vLLM
prompt_logprobs   by token id                             prompt_logprobs                          vLLM
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, TokenLogprob, ToolCallDelta, Usage
from dragoman.core.reply import Choice
from dragoman.core.request import GenerationRequest


class RunningCounts:
    """The usage and the timings of a stream so far."""

    def __init__(self, request: GenerationRequest) -> None:
        self._choices = request.choices
        self._started: dict[int, Started] = {}
        self._began: dict[int, float] = {}
        self._tokens: defaultdict[int, int] = defaultdict(int)
        self._reasoning: defaultdict[int, int] = defaultdict(int)

    def note(self, choice: int, event: Event) -> None:
        if isinstance(event, Started):
            self._started[choice] = event
            self._began[choice] = time.monotonic()
        elif isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta):
            self._tokens[choice] += event.count
            self._reasoning[choice] += event.count if isinstance(event, ReasoningDelta) else 0
        elif isinstance(event, Finished) and event.usage is not None:
            # Engines that other servers run count only now.
            usage, started = event.usage, self._started.get(choice, Started())
            prompt, cached = max(started.prompt_tokens, usage.prompt), max(started.cached_tokens, usage.cached)
            self._started[choice] = msgspec.structs.replace(started, prompt_tokens=prompt, cached_tokens=cached)
            self._tokens[choice], self._reasoning[choice] = usage.completion, usage.reasoning

    @property
    def usage(self) -> Usage:
        # The choices of one prompt share its tokens.
        prompts: defaultdict[int, list[Started]] = defaultdict(list)
        for choice, started in self._started.items():
            prompts[choice // self._choices].append(started)
        return Usage(
            prompt=sum(max(started.prompt_tokens for started in shared) for shared in prompts.values()),
            completion=sum(self._tokens.values()),
            cached=sum(max(started.cached_tokens for started in shared) for shared in prompts.values()),
            reasoning=sum(self._reasoning.values()),
        )

    def timings(self, choice: int, event: Event) -> dict[str, Any]:
        started = self._started.get(choice, Started())
        seconds = event.seconds if isinstance(event, Finished) else None
        if seconds is None:
            seconds = time.monotonic() - self._began.get(choice, time.monotonic())
        return _timings(started, self._tokens[choice], seconds)


def encode_timings(choice: Choice) -> dict[str, Any]:
    return _timings(choice.started, choice.usage.completion, choice.seconds or 0.0)


def _timings(started: Started, tokens: int, seconds: float) -> dict[str, Any]:
    read = started.prompt_tokens - started.cached_tokens
    return {
        "cache_n": started.cached_tokens,
        **_rates("prompt", read, started.seconds or 0.0),
        **_rates("predicted", tokens, seconds),
    }


def _rates(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    milliseconds = seconds * 1000
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(milliseconds / tokens, 3) if tokens else None,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds else None,
    }


def encode_prompt_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Encode each token with its alternatives, by token id. The first token of a prompt has no log probability."""
    return [None if entry.logprob is None else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    """The rank of a token that is not among the most likely ones is unknown."""
    ranks = {other.token: rank for rank, other in enumerate(entry.top, 1)}
    return {
        str(other.token): {
            "logprob": other.logprob,
            "rank": ranks.get(other.token),
            "decoded_token": other.text.decode("utf-8", "replace"),
        }
        for other in (entry, *entry.top)
    }

"""What a model does, as a stream of plain values.

    stream := Started (TextDelta | ReasoningDelta | call)* Finished
    call   := ToolCallStart ToolCallDelta*

Rules
1. `Started` comes first and `Finished` last, each exactly once per choice; nothing follows `Finished`.
2. `count` is the number of the engine's tokens behind a delta. A delta may have tokens and no text yet (a character
   spread over several tokens) and text without tokens of its own (what a stage held back).
3. Where the caller gets the reply as a whole (`Delivery.stream` is false), an engine may begin again: a second
   `Started` makes void what was told before it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with the log probability the model gave it, before sampling options. None: the very first token."""

    token: int
    text: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens as the engine counts them. `cached`, which were there before, and `kept`, which were not and are kept for
    a while because the request wants that, are parts of `prompt`; `reasoning` is a part of `completion`.

    Several choices of one prompt share it: only the first of them to start counts its tokens.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    kept: int = 0


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The prompt has been taken in. `prompt_logprobs` only where they were asked for.

    `thinking`: the prompt ends inside a thought, so the reply begins there. `ignored` names parameters that the engine
    could not honour and found out about only now.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_text: str | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()
    kept_tokens: int = 0


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    text: str
    count: int = 1
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True, tag="reasoning"):
    """`signature` closes the thought: what another server wrote under it, or instead of it, and wants to see again."""

    text: str
    count: int = 1
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    signature: str | None = None


class ToolCallStart(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, tag="arguments"):
    """The next piece of the JSON text of the arguments of the call that started last."""

    arguments: str
    count: int = 0


FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """`stop` is the stop string that ended the text. An engine that counts its tokens itself says so in `usage`.
    `warnings` tell what is odd about the reply, such as a tool call that could not be read."""

    reason: FinishReason = "stop"
    stop: str | None = None
    usage: Usage | None = None
    warnings: tuple[str, ...] = ()


Event = Started | TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | Finished

Listener = Callable[[Sequence[Event]], Awaitable[None] | None]
"""Is called with events that became ready together. Where it returns something to wait for, that comes first: until
then it must not be called again."""


def total_usage(usages: Sequence[Usage]) -> Usage:
    if len(usages) == 1:
        return usages[0]
    total = Usage()
    for usage in usages:
        total = Usage(
            prompt=total.prompt + usage.prompt,
            completion=total.completion + usage.completion,
            cached=total.cached + usage.cached,
            reasoning=total.reasoning + usage.reasoning,
            kept=total.kept + usage.kept,
        )
    return total

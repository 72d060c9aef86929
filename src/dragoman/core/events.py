"""The events of a generation: the output of a model as a stream of plain values.

    stream := Started (TextDelta | ReasoningDelta | call | ToolsListed | RoundEnded | ToolOutput)* Finished
    call   := ToolCallStart ToolCallDelta*

Rules
1. `Started` comes first and `Finished` last, each exactly once per choice; nothing follows `Finished`.
2. `count` is the number of the engine's tokens in a delta. A delta may have tokens without text (a character spread
   over several tokens) and text without tokens (text that a stage held back).
3. If the reply is not streamed (`Delivery.stream` is false), an engine may start again: a second `Started` discards
   all events before it.
4. A character spread over several tokens belongs to the last of them. Invalid bytes become U+FFFD as soon as they are
   certain to be invalid; at the end, so does an incomplete character. The joined text does not depend on how the bytes
   are split into tokens.
5. Engines do not emit `ToolsListed`, `RoundEnded` and `ToolOutput`. The server does (see `server/tool_rounds`).
"""

import codecs
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from dragoman.core.tool_servers import ListedTool


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One token with its log probability before sampling options; None for the first token of a prompt."""

    token: int
    text: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens as the engine counts them. `cached` (read from the prefix cache) and `kept` (stored there on request) are
    parts of `prompt`; `reasoning` is a part of `completion`.

    Several choices share one prompt. Only the first choice that starts counts its tokens.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    kept: int = 0


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The prompt has been processed. `prompt_logprobs`, `prompt_ids` and `seconds` (the time for the prompt) are set
    only on request.

    `thinking`: the prompt ends inside a reasoning block, so the reply begins with reasoning. `ignored` names
    parameters that the engine could not honour.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_text: str | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()
    kept_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    seconds: float | None = None


class TextDelta(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    text: str
    count: int = 1
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, array_like=True, tag="reasoning"):
    """`signature` ends the reasoning block. It is an opaque value of another server, which expects it back."""

    text: str
    count: int = 1
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    signature: str | None = None


class ToolCallStart(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """`server`: the label of the tool server that runs the call, which has the tool `name`; None if the client runs it.
    `approval`: the id of the request for approval that allowed it. A call that `needs_approval` has no output."""

    id: str
    name: str
    server: str | None = None
    approval: str | None = None
    needs_approval: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, tag="arguments"):
    """The next piece of the JSON arguments of the current call."""

    arguments: str
    count: int = 0
    tokens: tuple[int, ...] = ()


class ToolsListed(msgspec.Struct, frozen=True, array_like=True, tag="listed"):
    """A tool server has listed its tools, or has failed to."""

    server: str
    tools: tuple[ListedTool, ...] = ()
    error: str | None = None


class RoundEnded(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """The model has ended its part of a round. The calls of tool servers run now."""


class ToolOutput(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    """The result of a call of a tool server. An error without `code` is one of the tool itself; otherwise `code` is the
    HTTP status, or a negative code of the server's protocol."""

    call_id: str
    text: str
    is_error: bool = False
    code: int | None = None


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "compaction"]
"""`compaction`: the conversation was compacted, and the model did not answer. Only the server sets it."""


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """`stop` is the stop string that ended the text. `usage` is set by engines that count tokens themselves.
    `warnings` describe problems of the reply, such as a tool call that could not be parsed. `seconds` is the time since
    `Started`, set only on request. `unknown_reason` is the reason of another server, if `FinishReason` does not contain
    it; `reason` is then the nearest one."""

    reason: FinishReason = "stop"
    stop: str | None = None
    usage: Usage | None = None
    warnings: tuple[str, ...] = ()
    seconds: float | None = None
    unknown_reason: str | None = None


Event = (
    Started
    | TextDelta
    | ReasoningDelta
    | ToolCallStart
    | ToolCallDelta
    | ToolsListed
    | RoundEnded
    | ToolOutput
    | Finished
)

Listener = Callable[[Sequence[Event]], Awaitable[None] | None]
"""Called with events that became ready together. If it returns an awaitable, await it before the next call."""


async def notify(listener: Listener, events: Sequence[Event]) -> None:
    pause = listener(events)
    if pause is not None:
        await pause


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


class Detokenizer:
    """Decodes the bytes of tokens to text incrementally."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

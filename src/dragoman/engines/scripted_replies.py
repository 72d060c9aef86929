"""The replies of the scripted engine: which of them a request gets, and their tokens.

    reply := raw output                       in the syntax of the model's format
           | reasoning? text call*            with the format plain, where `output` is the text
           | error                            after some tokens of the reply, or at once

Rules
1. A request gets the first reply whose conditions hold: `match` is found in a user or tool message of the turn, `seen`
   in any message, `conversation` is the digest of the conversation, and it has been played less than `times` times.
2. The turn is what came after the last reply: agents add reminders after the results of their tools.
3. The digest covers all messages except those of the system, without reasoning and without the ids of calls.
4. Calls are played only if the request offers tools, and reasoning only if the request does not turn it off.
"""

import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from dragoman.core import errors
from dragoman.core.errors import DECODE_ERRORS, DragomanError
from dragoman.core.events import Event, FinishReason, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import GenerationRequest, Image, Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.core.types import Count, CountOrZero, SecondsOrZero

Token = tuple[Event, ...]
"""The events of one token: one, unless the token lies in several parts of the reply."""
DIGEST_DIGITS = 16
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DragomanError)]
BY_STATUS = {kind.status: kind for kind in reversed(ERRORS) if kind is not DragomanError} | {529: errors.QueueFull}
"""The most general error of each status. Anthropic's 529 is a 503 in other protocols."""
BY_CODE = {kind.code: kind for kind in reversed(ERRORS) if kind.code is not None}


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments that are a text are played as they are, so they may be malformed."""

    name: str
    arguments: str | dict[str, Any] = {}

    @property
    def arguments_text(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return msgspec.json.encode(self.arguments).decode()


class ScriptedError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error by its status or its code, after this many tokens of the reply."""

    status: int | None = None
    code: str | None = None
    message: str = "scripted error"
    retry_after: SecondsOrZero | None = None
    after: CountOrZero = 0

    def __post_init__(self) -> None:
        if (self.status is None) == (self.code is None):
            raise ValueError("status: give either status or code")
        if self.code is not None and self.code not in BY_CODE:
            raise ValueError(f"code: unknown code {self.code!r}; one of {', '.join(sorted(BY_CODE))}")
        if self.status is not None and self.status not in BY_STATUS:
            raise ValueError(f"status: unknown status {self.status}; one of {', '.join(map(str, sorted(BY_STATUS)))}")

    def build(self) -> DragomanError:
        kind = BY_CODE[self.code] if self.code is not None else BY_STATUS[self.status or 0]
        error = kind(self.message)
        if self.retry_after is not None:
            error.retry_after = self.retry_after
        return error


class ScriptedReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str | None = None
    match: str | None = None
    seen: str | None = None
    conversation: str | None = None
    """As `conversation_digest` returns it."""
    times: Count | None = None
    """How often the reply is played; None means always."""
    reasoning: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    error: ScriptedError | None = None
    delay: SecondsOrZero = 0
    """Seconds before the first token."""
    tokens: Count | None = None
    """The number of tokens of the reply; None: as `chunk` of the model says."""
    finish: FinishReason | None = None
    """None means `stop`, or `tool_calls` after calls."""

    def __post_init__(self) -> None:
        if self.output is None and not self.has_parts and self.error is None:
            raise ValueError("output is missing; give output, reasoning, calls or error")
        for name, pattern in (("match", self.match), ("seen", self.seen)):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{name} is not a regular expression: {pattern!r} ({error})") from error

    @property
    def has_parts(self) -> bool:
        """Whether the reply has parts beside its output."""
        return bool(self.reasoning or self.calls)


class Script:
    """The replies of one model. It counts how often each was played."""

    def __init__(self, replies: Sequence[ScriptedReply]) -> None:
        self._replies: list[tuple[re.Pattern[str], ScriptedReply]] = []
        self._played: list[int] = []
        for reply in replies:
            self.add(reply)

    def add(self, reply: ScriptedReply) -> None:
        self._played.append(0)
        self._replies.append((re.compile(reply.match or ""), reply))

    @property
    def unplayed(self) -> list[ScriptedReply]:
        return [reply for (_, reply), played in zip(self._replies, self._played, strict=True) if not played]

    def choose(self, request: GenerationRequest) -> ScriptedReply | None:
        turn, digest = turn_texts(request), None
        for at, (pattern, reply) in enumerate(self._replies):
            if reply.times is not None and self._played[at] >= reply.times:
                continue
            if not any(map(pattern.search, turn)) or not _has_seen(request, reply.seen):
                continue
            if reply.conversation is not None:
                digest = digest or conversation_digest(request)
                if digest != reply.conversation:
                    continue
            self._played[at] += 1
            return reply
        return None


def turn_texts(request: GenerationRequest) -> Sequence[str]:
    """The user and tool messages after the last reply, the last one first, or the prompt of a completion."""
    turn = takewhile(lambda message: message.role != "assistant", reversed(request.messages))
    return [message.text for message in turn if message.role in ("user", "tool")] or [request.last_user_text]


def _has_seen(request: GenerationRequest, pattern: str | None) -> bool:
    return pattern is None or any(re.search(pattern, message.text) for message in request.messages)


def conversation_digest(request: GenerationRequest) -> str:
    messages = (message for message in request.messages if message.role not in ("system", "developer"))
    parts = [[message.role, shape] for message in messages for shape in _shapes(message)]
    encoded = msgspec.json.encode([parts, request.prompts, request.suffix], order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:DIGEST_DIGITS]


def _shapes(message: Message) -> Iterator[Any]:
    """The parts of a message, in the form in which they are compared."""
    for part in message.parts:
        if isinstance(part, Text | Image):
            yield part
        elif isinstance(part, ToolCall):
            yield [part.name, _parsed(part.arguments)]
        elif isinstance(part, ToolResult):
            yield [part.content, part.is_error]


def _parsed(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except DECODE_ERRORS:
        return arguments


def reply_parts(reply: ScriptedReply, request: GenerationRequest) -> list[Part]:
    """The parts of the reply that the request allows."""
    parts: list[Part] = []
    if reply.reasoning and not request.thinking.is_off:
        parts.append(Reasoning(reply.reasoning))
    if reply.output:
        parts.append(Text(reply.output))
    choice = request.tool_choice
    if request.tools and choice.mode != "none":
        calls = reply.calls if choice.parallel else reply.calls[:1]
        parts += [ToolCall(f"call_{secrets.token_hex(12)}", call.name, call.arguments_text) for call in calls]
    return parts


def continue_parts(parts: Sequence[Part], prefill: Text | Reasoning | None) -> list[Part]:
    """What follows the prefill. Nothing before its part is played again."""
    rest = list(parts)
    if isinstance(prefill, Text):
        rest = [part for part in rest if not isinstance(part, Reasoning)]
    for at, part in enumerate(rest):
        if prefill is not None and type(part) is type(prefill):
            rest[at] = type(prefill)(part.text.removeprefix(prefill.text))
    return rest


def split_tokens(parts: Sequence[Part], size: int, count: int | None) -> list[Token]:
    """Split the parts into tokens of `size` characters, or into `count` tokens of about the same size."""
    spans: list[tuple[int, Part, str]] = []
    length = 0
    for part in parts:
        text = part.arguments if isinstance(part, ToolCall) else part.text if isinstance(part, Text | Reasoning) else ""
        spans.append((length, part, text))
        length += len(text)
    total = -(-length // size) if count is None else count
    bounds = [at * size if count is None else at * length // total for at in range(total)] + [length]
    return [_token(spans, bounds[at], bounds[at + 1], at == total - 1) for at in range(total)]


def _token(spans: Sequence[tuple[int, Part, str]], start: int, end: int, is_last: bool) -> Token:
    """The events of the characters from `start` to `end`. The token counts with the first of them."""
    events: list[Event] = []
    count = 1
    for first, part, text in spans:
        begins = start <= first < end or (is_last and first == end)
        piece = text[max(0, start - first) : max(0, end - first)]
        if isinstance(part, ToolCall) and begins:
            events.append(ToolCallStart(part.id, part.name))
        if piece:
            kind = {Text: TextDelta, Reasoning: ReasoningDelta}.get(type(part), ToolCallDelta)
            events.append(kind(piece, count))
            count = 0
    return tuple(events) if not count else (*events, TextDelta("", 1))

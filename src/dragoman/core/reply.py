"""Replies: the collected events of a stream, and the rate limits reported with them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.edits import Compaction, ContextEdited
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
    total_usage,
)
from dragoman.core.request import Message, Part, Reasoning, Text, ToolCall

BETWEEN_PARTS = "\n\n"
"""Joins thoughts, and contents, where a format has only one of them."""


class Choice(msgspec.Struct, frozen=True):
    """One choice. `tokens` are those that its usage counts, `logprobs` those of its visible text."""

    index: int
    parts: tuple[Part, ...]
    reason: FinishReason
    stop: str | None
    usage: Usage
    started: Started
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    is_counted: bool = True
    """Whether the usage was reported. Otherwise it is 0."""
    seconds: float | None = None
    """The time for the tokens of the reply, if it was requested."""
    unknown_reason: str | None = None
    """The reason of another server, if `FinishReason` does not contain it."""

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Text)])

    @property
    def reasoning(self) -> str:
        return BETWEEN_PARTS.join([part.text for part in self.parts if isinstance(part, Reasoning) and part.text])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])

    @property
    def mean_logprob(self) -> float:
        known = [entry.logprob for entry in self.logprobs if entry.logprob is not None]
        return sum(known) / len(known) if known else 0.0


class Reply(msgspec.Struct, frozen=True):
    """`output` is the text decoded to the requested type, if one was requested.

    The properties are those of the first choice. The other fields are set by clients only.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    output: Any = None
    id: str = ""
    model: str = ""
    raw: Mapping[str, Any] | None = None
    """The JSON body of the response; None if it was streamed."""
    edited: ContextEdited | None = None
    """What the edits of the request did before the reply. Set by the server."""
    unknown_parts: tuple[Any, ...] = ()
    """Parts of the content that are not text, reasoning or tool calls, as the server sent them."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def reason(self) -> FinishReason | str:
        return self.choices[0].unknown_reason or self.choices[0].reason

    @property
    def compaction(self) -> Compaction | None:
        return None if self.edited is None else self.edited.compaction

    @property
    def is_counted(self) -> bool:
        """Whether the usage was reported. Otherwise it is 0."""
        return all(choice.is_counted for choice in self.choices)

    @property
    def message(self) -> Message:
        """The reply as the next message of the conversation."""
        return Message("assistant", self.choices[0].parts)

    def best(self, count: int) -> "Reply":
        """Return the `count` most likely choices. The usage stays that of all choices."""
        if count >= len(self.choices):
            return self
        ranked = sorted(self.choices, key=lambda choice: -choice.mean_logprob)[:count]
        renumbered = tuple(msgspec.structs.replace(choice, index=i) for i, choice in enumerate(ranked))
        return Reply(renumbered, self.usage)


class _Draft:
    """A choice while its events arrive. Adjacent deltas of one kind become one part."""

    started = Started()
    finished: Finished | None = None
    open: type[Text] | type[Reasoning] | None = None
    call: ToolCallStart | None = None

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                if event.text:
                    if self.open is not Text:
                        self._open(Text)
                    self.pieces.append(event.text)
                if event.tokens:
                    self.tokens += event.tokens
                if event.logprobs:
                    self.logprobs += event.logprobs
            elif isinstance(event, Started):
                self.started = event
            elif isinstance(event, Finished):
                self.close()
                self.finished = event
            elif isinstance(event, ReasoningDelta):
                self.tokens += event.tokens
                if event.text or event.signature:
                    self._think(event)
            elif isinstance(event, ToolCallStart):
                self.close()
                self.call = event
            elif isinstance(event, ToolCallDelta):
                self.tokens += event.tokens
                self.pieces.append(event.arguments)

    def _think(self, event: ReasoningDelta) -> None:
        if self.open is not Reasoning:
            self._open(Reasoning)
        self.pieces.append(event.text)
        if event.signature:
            self.parts.append(Reasoning("".join(self.pieces), event.signature))
            self.open = None
            self.pieces.clear()

    def _open(self, kind: type[Text] | type[Reasoning]) -> None:
        self.close()
        self.open = kind

    def close(self) -> None:
        if self.call is not None:
            self.parts.append(ToolCall(self.call.id, self.call.name, "".join(self.pieces)))
        elif self.open is not None:
            self.parts.append(self.open("".join(self.pieces)))
        self.open, self.call = None, None
        self.pieces.clear()

    def choice(self, index: int) -> Choice:
        if self.finished is None:
            raise AssertionError("the event stream ended without Finished")
        return Choice(
            index=index,
            parts=tuple(self.parts),
            reason=self.finished.reason,
            stop=self.finished.stop,
            usage=self.finished.usage or Usage(),
            started=self.started,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            is_counted=self.finished.usage is not None,
            seconds=self.finished.seconds,
            unknown_reason=self.finished.unknown_reason,
        )


class ReplyBuilder:
    """Builds a reply from events as they arrive."""

    def __init__(self) -> None:
        self._drafts: defaultdict[int, _Draft] = defaultdict(_Draft)

    def add(self, index: int, events: Sequence[Event]) -> None:
        if events and type(events[0]) is Started:
            self._drafts[index] = _Draft()
        self._drafts[index].add(events)

    def arrived(self, index: int = 0) -> tuple[Part, ...]:
        """Return the parts of a choice that have arrived so far."""
        draft = self._drafts[index]
        draft.close()
        return tuple(draft.parts)

    def reply(self) -> Reply:
        choices = tuple([self._drafts[index].choice(index) for index in sorted(self._drafts)])
        return Reply(choices, total_usage([choice.usage for choice in choices]))


class RateLimitState(msgspec.Struct, frozen=True):
    """The state of a rate limit. `reset` is the number of seconds until the whole limit is available again."""

    what: str
    limit: int
    remaining: int
    reset: float

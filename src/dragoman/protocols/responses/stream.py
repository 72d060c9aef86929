"""Encodes a response as a stream of events.

    stream := response.created response.in_progress item* (response.completed | response.incomplete)
            | response.created response.in_progress item* error response.failed

Events have consecutive sequence numbers. `item_drafts` lists the events of an item. Each item is done before the next
one starts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, QueueFull
from dragoman.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.protocols.responses.encode import INCOMPLETE_REASONS, ResponseBuilder, needs_message
from dragoman.protocols.responses.item_drafts import ItemDraft, ItemEvent, MessageDraft, ReasoningDraft

Clock = Callable[[], float]
ERROR_CODES: tuple[tuple[type[DragomanError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (BadRequest, "invalid_prompt"),
    (QueueFull, "rate_limit_exceeded"),
    (DragomanError, "server_error"),
)
"""The first matching class decides the `code` of a failed response."""


class ResponseEncoder:
    def __init__(self, builder: ResponseBuilder, clock: Clock, done: Callable[[dict[str, Any]], None]) -> None:
        self._builder = builder
        self._clock = clock
        self._done = done
        """Called with the final response."""
        self._number = 0
        self._is_started = False
        self._drafts: list[ItemDraft] = []
        self._output: list[dict[str, Any]] = []
        self._open: ItemDraft | None = None
        self._delta_prefix = b""
        """The frame of a text delta of the open message up to the text."""
        self._pending_logprobs: list[TokenLogprob] = []
        """Logprobs that arrived before their text."""
        self._finished = Finished()

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        return b"".join([self._encode(event) for event in events])

    def _encode(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, ReasoningDelta):
            return self._reasoning(event.text) if event.text else b""
        if isinstance(event, ToolCallStart):
            draft = self._builder.call(len(self._drafts), event.id, event.name)
            return self._close("completed") + self._start(draft)
        if isinstance(event, ToolCallDelta):
            return b"" if self._open is None else self._frames(self._open.add(event.arguments))
        if isinstance(event, Started):
            return self._begin()
        self._finished = event
        return self._finish(event)

    def _begin(self) -> bytes:
        self._is_started = True
        response = self._builder.response("in_progress")
        return self._frames((name, {"response": response}) for name in ("response.created", "response.in_progress"))

    def _text(self, event: TextDelta) -> bytes:
        if not event.text and not isinstance(self._open, MessageDraft):
            self._pending_logprobs += event.logprobs
            return b""
        opening = b""
        if not isinstance(self._open, MessageDraft):
            opening = self._close("completed") + self._start(self._builder.message(len(self._drafts)))
        if event.logprobs or self._pending_logprobs:
            logprobs = (*self._pending_logprobs, *event.logprobs)
            self._pending_logprobs.clear()
            assert self._open is not None
            return opening + self._frames(self._open.add(event.text, logprobs))
        return opening + self._text_frame(event.text) if event.text else opening

    def _text_frame(self, text: str) -> bytes:
        """Build the frame of a text without logprobs by hand, because it is by far the most common event."""
        assert isinstance(self._open, MessageDraft)
        self._open.push(text)
        number = self._number
        self._number += 1
        return self._delta_prefix + msgspec.json.encode(text) + b',"sequence_number":%d}\n\n' % number

    def _reasoning(self, text: str) -> bytes:
        opening = b""
        if not isinstance(self._open, ReasoningDraft):
            opening = self._close("completed") + self._start(self._builder.reasoning(len(self._drafts)))
        assert self._open is not None
        return opening + self._frames(self._open.add(text))

    def _start(self, draft: ItemDraft) -> bytes:
        self._open = draft
        self._drafts.append(draft)
        if isinstance(draft, MessageDraft):
            self._delta_prefix = draft.delta_prefix
        return self._frames(draft.begin())

    def _close(self, status: str) -> bytes:
        draft, self._open = self._open, None
        if draft is None:
            return b""
        events = list(draft.finish(status))
        self._output.append(events[-1][1]["item"])
        return self._frames(events)

    def _finish(self, event: Finished) -> bytes:
        frames = self._close("incomplete" if event.reason in INCOMPLETE_REASONS else "completed")
        if needs_message(event.reason, self._drafts):
            draft = self._builder.message(len(self._drafts))
            frames += self._start(draft)
            if self._pending_logprobs:
                frames += self._frames(draft.add("", tuple(self._pending_logprobs)))
            frames += self._close("completed")
        return frames

    def end(self) -> bytes:
        finished = self._finished
        usage = finished.usage or Usage()
        response = self._builder.final(finished.reason, self._output, usage, int(self._clock()))
        self._done(response)
        return self._frames([(f"response.{response['status']}", {"response": response})])

    def fail(self, error: DragomanError) -> bytes:
        opening = b"" if self._is_started else self._begin()
        code = next(code for kind, code in ERROR_CODES if isinstance(error, kind))
        fields = {"code": code, "message": error.message}
        response = self._builder.response("failed", self._output, error=fields)
        param = "input" if isinstance(error, ContextTooLong) else error.param
        events: list[ItemEvent] = [("error", {**fields, "param": param}), ("response.failed", {"response": response})]
        return opening + self._frames(events)

    def _frames(self, events: Iterable[ItemEvent]) -> bytes:
        frames = bytearray()
        for name, fields in events:
            payload = {"type": name, **fields, "sequence_number": self._number}
            frames += b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))
            self._number += 1
        return bytes(frames)

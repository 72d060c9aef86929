"""A response as it is made.

    stream := response.created response.in_progress item* (response.completed | response.incomplete)
            | response.created response.in_progress item* error response.failed

Every event has its name, and a number that is one more than that of the event before. What an item's events are stands
in `drafts`; one item is done before the next begins.
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
from dragoman.protocols.responses.encode import REASONS, Drawing, needs_message
from dragoman.protocols.responses.item_drafts import Draft, MessageDraft, ThoughtDraft, Told

Clock = Callable[[], float]
CODES: tuple[tuple[type[DragomanError], str], ...] = (
    (ContextTooLong, "context_length_exceeded"),
    (BadRequest, "invalid_prompt"),
    (QueueFull, "rate_limit_exceeded"),
    (DragomanError, "server_error"),
)
"""The words that a response has for what went wrong."""


class ResponseEncoder:
    def __init__(self, drawing: Drawing, clock: Clock, done: Callable[[dict[str, Any]], None]) -> None:
        self._drawing = drawing
        self._clock = clock
        self._done = done
        """Is told the response when it has come to its end."""
        self._number = 0
        self._begun = False
        self._drafts: list[Draft] = []
        self._output: list[dict[str, Any]] = []
        self._open: Draft | None = None
        self._head = b""
        """The frame of a text of the open message up to the text."""
        self._waiting: list[TokenLogprob] = []
        """Tokens of the next text, which came before it."""
        self._finished = Finished()

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        return b"".join([self._fed(event) for event in events])

    def _fed(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, ReasoningDelta):
            return self._thought(event.text) if event.text else b""
        if isinstance(event, ToolCallStart):
            draft = self._drawing.call(len(self._drafts), event.id, event.name)
            return self._close("completed") + self._start(draft)
        if isinstance(event, ToolCallDelta):
            return b"" if self._open is None else self._frames(self._open.add(event.arguments))
        if isinstance(event, Started):
            return self._begin()
        self._finished = event
        return self._finish(event)

    def _begin(self) -> bytes:
        self._begun = True
        response = self._drawing.response("in_progress")
        return self._frames((name, {"response": response}) for name in ("response.created", "response.in_progress"))

    def _text(self, event: TextDelta) -> bytes:
        if not event.text and not isinstance(self._open, MessageDraft):
            self._waiting += event.logprobs
            return b""
        begun = b""
        if not isinstance(self._open, MessageDraft):
            begun = self._close("completed") + self._start(self._drawing.message(len(self._drafts)))
        if event.logprobs or self._waiting:
            logprobs = (*self._waiting, *event.logprobs)
            self._waiting.clear()
            assert self._open is not None
            return begun + self._frames(self._open.add(event.text, logprobs))
        return begun + self._plain(event.text) if event.text else begun

    def _plain(self, text: str) -> bytes:
        """The frame of a text without more to it, nearly all that there is, put together by hand."""
        assert isinstance(self._open, MessageDraft)
        self._open.push(text)
        number = self._number
        self._number += 1
        return self._head + msgspec.json.encode(text) + b',"sequence_number":%d}\n\n' % number

    def _thought(self, text: str) -> bytes:
        begun = b""
        if not isinstance(self._open, ThoughtDraft):
            begun = self._close("completed") + self._start(self._drawing.thought(len(self._drafts)))
        assert self._open is not None
        return begun + self._frames(self._open.add(text))

    def _start(self, draft: Draft) -> bytes:
        self._open = draft
        self._drafts.append(draft)
        if isinstance(draft, MessageDraft):
            self._head = draft.head
        return self._frames(draft.begin())

    def _close(self, status: str) -> bytes:
        draft, self._open = self._open, None
        if draft is None:
            return b""
        told = list(draft.finish(status))
        self._output.append(told[-1][1]["item"])
        return self._frames(told)

    def _finish(self, event: Finished) -> bytes:
        frames = self._close("incomplete" if event.reason in REASONS else "completed")
        if needs_message(event.reason, self._drafts):
            draft = self._drawing.message(len(self._drafts))
            frames += self._start(draft)
            if self._waiting:
                frames += self._frames(draft.add("", tuple(self._waiting)))
            frames += self._close("completed")
        return frames

    def end(self) -> bytes:
        finished = self._finished
        usage = finished.usage or Usage()
        response = self._drawing.final(finished.reason, self._output, usage, int(self._clock()))
        self._done(response)
        return self._frames([(f"response.{response['status']}", {"response": response})])

    def fail(self, error: DragomanError) -> bytes:
        begun = b"" if self._begun else self._begin()
        code = next(code for kind, code in CODES if isinstance(error, kind))
        told = {"code": code, "message": error.message}
        response = self._drawing.response("failed", self._output, error=told)
        param = "input" if isinstance(error, ContextTooLong) else error.param
        frames: list[Told] = [("error", {**told, "param": param}), ("response.failed", {"response": response})]
        return begun + self._frames(frames)

    def _frames(self, told: Iterable[Told]) -> bytes:
        frames = bytearray()
        for name, fields in told:
            payload = {"type": name, **fields, "sequence_number": self._number}
            frames += b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))
            self._number += 1
        return bytes(frames)

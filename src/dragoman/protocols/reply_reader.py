"""Reads one reply and turns it into events: what the readers of all protocols share.

    piece := index? id? name? arguments?           of a tool call; arguments are JSON text or a piece of it

Rules
1. `Started` is the first event, `Finished` the last. Each occurs once.
2. Deltas have a token count of 0: only the server knows the number of tokens and may report it in the usage. The usage
   is never derived from deltas; telemetry estimates it if needed.
3. A piece belongs to the call with its index; without an index, to the latest call. Two things start another call:
   a different id together with a name or without an index (some servers change the id within a call), and a name,
   unless the call has the same name and incomplete arguments.
4. Events describe one call after the other. The events of a call wait until the arguments of the previous call are
   complete. Text that arrives while arguments are incomplete follows after the calls.
5. A call without an id gets one. A call without arguments gets an empty object. Arguments that are not a JSON object at
   the end raise `MalformedToolCall`, unless the reply was cut short.
6. A reply with tool calls that ended normally has the finish reason `tool_calls`, whatever the server reports. Another
   reason that `REASONS` does not contain is kept beside `stop`.
7. A body with neither content nor a finish reason raises `BadAnswer`.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadAnswer, MalformedToolCall, StreamCutOff, quote
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
)
from dragoman.core.request import GenerationRequest, ToolCall
from dragoman.protocols.errors import error_from_frame
from dragoman.protocols.json_body import is_object
from dragoman.protocols.reply_fields import excerpt, object_of, parse, replace_surrogates, text_of
from dragoman.protocols.sse import SseFrame

NewId = Callable[[], str]
DONE = "[DONE]"
REASON_NAMES: dict[FinishReason, tuple[str, ...]] = {
    "stop": ("stop", "eos", "eos_token", "end", "end_turn", "complete", "completed", "stop_sequence"),
    "length": ("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"),
    "tool_calls": ("tool_calls", "tool_call", "tool_use", "function_call"),
    "content_filter": (
        *("content_filter", "content_filtered", "refusal", "safety", "recitation"),
        *("blocklist", "prohibited_content", "spii", "guardrail_intervened"),
    ),
}
REASONS = {name: reason for reason, names in REASON_NAMES.items() for name in names}
FAILURE_REASONS = frozenset({"error", "abort", "aborted", "cancelled", "insufficient_system_resource"})
"""Finish reasons that mean that the generation failed."""
MAX_REASON = 100
MAX_KINDS = 5
"""How many types of unknown parts a warning names."""


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Call:
    id: str = ""
    name: str = ""
    is_started = False
    """Whether `ToolCallStart` has been returned."""

    def __init__(self, index: object) -> None:
        self.index = index
        self.pieces: list[str] = []
        self.pending: list[str] = []

    @property
    def arguments(self) -> str:
        # Joined in place, so that the next access is cheap.
        self.pieces = ["".join(self.pieces)]
        return self.pieces[0]

    @property
    def is_complete(self) -> bool:
        return is_object(self.arguments)

    def check(self) -> None:
        arguments = self.arguments
        if self.name and is_object(arguments):
            return
        error = MalformedToolCall(
            f"the arguments of a call to {self.name!r:.100} are not a JSON object: {arguments[:500]!r}"
            if self.name
            else f"a tool call has no name; its arguments: {arguments[:500]!r}"
        )
        error.call = ToolCall(self.id, self.name, arguments)
        raise error


class ToolCallAssembler:
    def __init__(self, make_id: NewId) -> None:
        self._make_id = make_id
        self._calls: list[_Call] = []
        self._current = 0
        """The index of the call whose pieces are returned as they arrive."""

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def is_open(self) -> bool:
        """Whether a call may still receive arguments."""
        active = self._calls[self._current :]
        return bool(self._calls) and not all(call.is_started and call.is_complete for call in active)

    def add(self, index: object, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        call = self._find(index)
        if call is None or self._starts_new(call, index, call_id, name):
            call = _Call(index)
            self._calls.append(call)
        call.id = call.id or call_id
        call.name = call.name or name
        if arguments:
            call.pieces.append(arguments)
            call.pending.append(arguments)
        while self._current < len(self._calls):
            call = self._calls[self._current]
            yield from self._flush(call)
            if call is self._calls[-1] or not call.is_started or not call.is_complete:
                return
            self._current += 1

    def end(self, cut_short: bool, check: bool) -> Iterator[Event]:
        """Return the remaining events after the last piece."""
        for call in self._calls[self._current :]:
            yield from self._flush(call)
            if call.is_started and not call.arguments.strip() and not cut_short:
                call.pieces.append("{}")
                yield ToolCallDelta("{}")
        self._current = len(self._calls)
        if check and not cut_short:
            for call in self._calls:
                call.check()

    def _find(self, index: object) -> _Call | None:
        if index is None:
            return self._calls[-1] if self._calls else None
        return next((call for call in reversed(self._calls) if call.index == index), None)

    def _starts_new(self, call: _Call, index: object, call_id: str, name: str) -> bool:
        if call_id and call.id:
            return call_id != call.id and (bool(name) or index is None)
        return bool(name and call.name) and (name != call.name or call.is_complete)

    def _flush(self, call: _Call) -> Iterator[Event]:
        if not call.is_started and call.name:
            call.is_started = True
            call.id = call.id or self._make_id()
            yield ToolCallStart(call.id, call.name)
        if call.is_started and call.pending:
            yield ToolCallDelta("".join(call.pending))
            call.pending.clear()


class ReplyReader(ABC):
    """Reads one reply, as a whole or frame by frame. The methods that read return the events that are ready.

    `check_calls` decides whether malformed arguments of a tool call are an error or passed on unchanged.
    """

    ends_with_done = False
    """Whether `[DONE]` completes a reply."""

    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        self.finished = False
        self._calls = ToolCallAssembler(make_id)
        self._check_calls = check_calls
        self._usage: Usage | None = None
        self._has_stray_usage = False
        """Whether the usage was not where the protocol has it."""
        self._reason: FinishReason | None = None
        self._unknown_reason: str | None = None
        """The finish reason, if `REASONS` does not contain it."""
        self.id = self.model = ""
        """As the server reports them."""
        self.raw: Mapping[str, Any] | None = None
        """The body of a reply that was not streamed."""
        self.unknown_parts: list[Any] = []
        """Parts of the content that no event can express, as they came."""
        self._stop: str | None = None
        self._logprobs: tuple[TokenLogprob, ...] = ()
        """Logprobs of the tokens of the next text or reasoning."""
        self._warnings: list[str] = []
        self._is_started = False
        self._ready: list[Event] = []
        self._delayed: list[Event] = []
        self._high_surrogate = ""
        """A high surrogate at the end of the last text, which waits for the low one."""

    @property
    def can_finish(self) -> bool:
        """Whether only the end marker may still be missing."""
        return self._reason is not None

    @property
    def has_usage(self) -> bool:
        """Whether the usage was where the protocol has it."""
        return self._usage is not None and not self._has_stray_usage

    @abstractmethod
    def _read_event(self, kind: str, body: Mapping[str, Any]) -> None:
        """Read the body of a frame; `kind` is its `type` or the event of the frame."""

    @abstractmethod
    def _read_whole(self, body: Mapping[str, Any]) -> None: ...

    def plain_text(self, frame: SseFrame) -> str | None:
        """Return the text of a frame that contains only text, whatever came before it; otherwise None."""
        return None

    def read_frame(self, frame: SseFrame) -> list[Event]:
        data = frame.data.strip()
        if data == DONE:
            if self.ends_with_done:
                self._close()
        elif (text := self.plain_text(frame)) is not None:
            self._add_text(text)
        elif data:
            body = parse(data)
            error = error_from_frame(body, frame.event, data)
            if error is not None:
                raise error
            if isinstance(body, dict):
                if not self.id:
                    self._identify(body)
                self._read_event(text_of(body.get("type")) or frame.event, body)
        return self.take_events()

    def read_body(self, body: Mapping[str, Any]) -> list[Event]:
        self.raw = body
        self._identify(body)
        self._read_whole(body)
        if self._reason is None and not (self._is_started or self._high_surrogate or self.unknown_parts):
            raise BadAnswer(f"the reply has neither content nor a finish reason: {excerpt(str(body))}")
        self._finish()
        return self.take_events()

    def add_texts(self, texts: Sequence[str]) -> list[Event]:
        """Read the texts of plain frames."""
        is_simple = self._is_started and not (self._delayed or self._logprobs or self._calls or self._high_surrogate)
        if is_simple:
            return [TextDelta(text, 0) for text in texts if text]
        for text in texts:
            self._add_text(text)
        return self.take_events()

    def end(self) -> list[Event]:
        """Finish after the last frame."""
        self._close()
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return the events that are ready, also those before an error."""
        ready, self._ready = self._ready, []
        return ready

    def _identify(self, body: Mapping[str, Any]) -> None:
        """Read the id and the model, which some protocols wrap in the message or response that a stream begins."""
        head = object_of(body.get("message")) or object_of(body.get("response")) or body
        head = head if text_of(head.get("id")) else body
        self.id, self.model = text_of(head.get("id")), text_of(head.get("model"))

    def _close(self) -> None:
        if not self.can_finish:
            raise StreamCutOff("the stream ended before the reply was complete: it has no finish reason")
        self._finish()

    def _add_text(self, text: str) -> None:
        if self._high_surrogate or (text and ("\ud800" <= text[0] <= "\udfff" or "\ud800" <= text[-1] <= "\udfff")):
            text = self._join_surrogates(text)
        if text:
            self._add_outside_calls(TextDelta(text, 0, (), self._take_logprobs()))

    def _join_surrogates(self, text: str) -> str:
        """Join surrogate pairs and hold back a high surrogate at the end."""
        joined = (self._high_surrogate + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        ends_high = "\ud800" <= joined[-1:] <= "\udbff"
        self._high_surrogate = joined[-1] if ends_high else ""
        return replace_surrogates(joined[:-1] if ends_high else joined)

    def _add_reasoning(self, text: str, signature: str | None = None) -> None:
        if not text.isascii():
            text = replace_surrogates(text)
        if text or signature:
            self._add_outside_calls(ReasoningDelta(text, 0, (), self._take_logprobs(), signature))

    def _add_call(self, index: object, call_id: str, name: str, arguments: str) -> None:
        self._add(self._calls.add(index, call_id, name, arguments))

    def _set_finish_reason(self, reason: object, stop: object = None) -> None:
        """Set the finish reason. More may follow, such as the usage."""
        name = str(reason)[:MAX_REASON]
        if name.lower() in FAILURE_REASONS:
            raise BadAnswer(f"the server aborted its reply (finish reason {name})")
        is_known = name.lower() in REASONS
        self._reason = REASONS.get(name.lower(), "stop")
        self._unknown_reason = None if is_known or not isinstance(reason, str) else name
        if not is_known:
            self._warnings.append(f"the server sent an unknown finish reason: {quote(name)}")
        if isinstance(stop, str):
            self._stop = stop

    def _finish(self) -> None:
        if self.finished:
            return
        if self._high_surrogate:
            self._high_surrogate = ""
            self._add_text("\ufffd")
        reason = self._reason or "stop"
        self._add(self._calls.end(reason in ("length", "content_filter"), self._check_calls))
        self._add(self._delayed)
        if len(self._calls) and reason == "stop":
            reason, self._unknown_reason = "tool_calls", None
        if self.unknown_parts:
            kinds = dict.fromkeys(quote(object_of(part).get("type")) for part in self.unknown_parts)
            self._warnings.append(f"the reply has parts of unknown types: {', '.join([*kinds][:MAX_KINDS])}")
        warnings, unknown = tuple(self._warnings), self._unknown_reason
        self._add([Finished(reason, self._stop, self._usage, warnings, unknown_reason=unknown)])
        self.finished = True

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        logprobs, self._logprobs = self._logprobs, ()
        return logprobs

    def _add_outside_calls(self, event: Event) -> None:
        if self._delayed or self._calls.is_open:
            self._delayed.append(event)
        else:
            self._add([event])

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            if not self._is_started:
                self._is_started = True
                self._ready.append(Started())
            self._ready.append(event)


class ClientProtocol(msgspec.Struct, frozen=True):
    """The client side of a protocol."""

    name: str
    path: str
    """Appended to the base URL of the API, which usually ends in `/v1`: `/messages`."""
    supported_fields: frozenset[str]
    """The fields that `encode` can express, by their names in `request_fields.used_fields`. A request that uses another
    one is refused, or an upstream engine removes it. Messages, tools and `max_tokens` are not listed."""
    encode: Callable[[GenerationRequest, bool], dict[str, Any]]
    reader: Callable[[NewId, bool], ReplyReader]

"""Builds the events of a reply while it is read. Shared by the readers of all protocols.

Rules
1. `Started` is the first event, `Finished` the last. Each occurs once.
2. Deltas have a token count of 0: only the server knows the number of tokens and may report it in the usage. The usage
   is never derived from deltas; telemetry estimates it if needed.
3. Text that arrives while the arguments of a call are incomplete follows after the calls.
4. A reply with tool calls that ended normally has the finish reason `tool_calls`, whatever the server reports.
"""

from collections.abc import Iterable, Sequence

from dragoman.core.errors import BadAnswer
from dragoman.core.events import Event, Finished, FinishReason, ReasoningDelta, Started, TextDelta, TokenLogprob, Usage
from dragoman.protocols.client.reply_fields import replace_surrogates
from dragoman.protocols.client.tool_calls import NewId, ToolCallAssembler, new_id
from dragoman.protocols.sse import SseFrame

REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "end": "stop",
    "end_turn": "stop",
    "complete": "stop",
    "completed": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_length": "length",
    "model_context_window_exceeded": "length",
    "tool_calls": "tool_calls",
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "refusal": "content_filter",
    "safety": "content_filter",
    "recitation": "content_filter",
}
FAILURE_REASONS = frozenset({"error", "abort", "aborted", "cancelled", "insufficient_system_resource"})
"""Finish reasons that mean that the generation failed."""


class ReplyDraft:
    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        self.calls = ToolCallAssembler(make_id)
        self.usage: Usage | None = None
        self.reason: FinishReason | None = None
        self.stop: str | None = None
        self.finished = False
        self.logprobs: tuple[TokenLogprob, ...] = ()
        """Logprobs of the tokens of the next text or reasoning."""
        self._check_calls = check_calls
        self._warnings: list[str] = []
        self._is_started = False
        self._ready: list[Event] = []
        self._delayed: list[Event] = []
        self._high_surrogate = ""
        """A high surrogate at the end of the last text, which waits for the low one."""

    def take_events(self) -> list[Event]:
        ready, self._ready = self._ready, []
        return ready

    def add_text(self, text: str) -> None:
        if self._high_surrogate or (text and ("\ud800" <= text[0] <= "\udfff" or "\ud800" <= text[-1] <= "\udfff")):
            text = self._join_surrogates(text)
        if text:
            self._add_outside_calls(TextDelta(text, 0, (), self._take_logprobs()))

    def add_texts(self, texts: Sequence[str]) -> list[Event]:
        if self._is_started and not self._delayed and not self.logprobs and not self.calls and not self._high_surrogate:
            return [TextDelta(text, 0) for text in texts if text]
        for text in texts:
            self.add_text(text)
        return self.take_events()

    def _join_surrogates(self, text: str) -> str:
        """Join surrogate pairs and hold back a high surrogate at the end."""
        joined = (self._high_surrogate + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        ends_high = "\ud800" <= joined[-1:] <= "\udbff"
        self._high_surrogate = joined[-1] if ends_high else ""
        return replace_surrogates(joined[:-1] if ends_high else joined)

    def add_reasoning(self, text: str, signature: str | None = None) -> None:
        if not text.isascii():
            text = replace_surrogates(text)
        if text or signature:
            self._add_outside_calls(ReasoningDelta(text, 0, (), self._take_logprobs(), signature))

    def add_events(self, events: Iterable[Event]) -> None:
        self._add(events)

    def set_finish_reason(self, reason: object, stop: object = None) -> None:
        """Set the finish reason. More may follow, such as the usage."""
        name = str(reason).lower()
        if name in FAILURE_REASONS:
            raise BadAnswer(f"the server aborted its reply (finish reason {name})")
        if name not in REASONS:
            self._warnings.append(f"the server sent an unknown finish reason: {name[:100]}")
        self.reason = REASONS.get(name, "stop")
        if isinstance(stop, str):
            self.stop = stop

    def finish(self) -> None:
        if self.finished:
            return
        if self._high_surrogate:
            self._high_surrogate = ""
            self.add_text("\ufffd")
        reason = self.reason or "stop"
        cut_short = reason in ("length", "content_filter")
        self._add(self.calls.end(cut_short, self._check_calls))
        self._add(self._delayed)
        if len(self.calls) and reason == "stop":
            reason = "tool_calls"
        self._add([Finished(reason, self.stop, self.usage, tuple(self._warnings))])
        self.finished = True

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        logprobs, self.logprobs = self.logprobs, ()
        return logprobs

    def _add_outside_calls(self, event: Event) -> None:
        if self._delayed or self.calls.is_open:
            self._delayed.append(event)
        elif self._is_started:
            self._ready.append(event)
        else:
            self._add([event])

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            if not self._is_started:
                self._is_started = True
                self._ready.append(Started())
            self._ready.append(event)


class BaseReplyReader:
    """Base class of the reply readers of all protocols."""

    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        self._draft = ReplyDraft(make_id, check_calls)

    @property
    def finished(self) -> bool:
        return self._draft.finished

    @property
    def can_finish(self) -> bool:
        return self._draft.reason is not None

    def take_events(self) -> list[Event]:
        """Return the events that were ready before an error."""
        return self._draft.take_events()

    def plain_text(self, frame: SseFrame) -> str | None:
        return None

    def add_texts(self, texts: Sequence[str]) -> list[Event]:
        return self._draft.add_texts(texts)

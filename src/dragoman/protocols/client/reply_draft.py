"""A reply while it is read: what the readers of all protocols have in common.

Rules
1. `Started` comes before the first event that says something, `Finished` last, each once.
2. Deltas have no tokens of their own: only the server knows how many there were, and says so in the usage, if at all.
   So no usage is ever made of them; whoever needs figures all the same has to estimate (`telemetry.meter`).
3. What is said while the arguments of a call are not complete is told after the calls.
4. A reply that has calls and ended of itself ended because of them, whatever word the server has for it.
"""

from collections.abc import Iterable, Sequence

from dragoman.core.errors import BadAnswer
from dragoman.core.events import Event, Finished, FinishReason, ReasoningDelta, Started, TextDelta, TokenLogprob, Usage
from dragoman.protocols.client.reply_fields import without_halves
from dragoman.protocols.client.tool_calls import Calls, NewId, new_id
from dragoman.protocols.sse import Frame

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
FAILURES = frozenset({"error", "abort", "aborted", "cancelled", "insufficient_system_resource"})
"""Ways to end that are none."""


class Draft:
    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        self.calls = Calls(make_id)
        self.usage: Usage | None = None
        self.reason: FinishReason | None = None
        self.stop: str | None = None
        self.finished = False
        self.logprobs: tuple[TokenLogprob, ...] = ()
        """Of tokens that belong to what is said next."""
        self._check_calls = check_calls
        self._warnings: list[str] = []
        self._begun = False
        self._ready: list[Event] = []
        self._held: list[Event] = []
        self._half = ""
        """The first half of a character, of which there are two in UTF-16."""

    def take(self) -> list[Event]:
        ready, self._ready = self._ready, []
        return ready

    def say(self, text: str) -> None:
        if self._half or (text and ("\ud800" <= text[0] <= "\udfff" or "\ud800" <= text[-1] <= "\udfff")):
            text = self._joined(text)
        if text:
            self._beside_calls(TextDelta(text, 0, (), self._taken()))

    def say_all(self, texts: Sequence[str]) -> list[Event]:
        if self._begun and not self._held and not self.logprobs and not self.calls and not self._half:
            return [TextDelta(text, 0) for text in texts if text]
        for text in texts:
            self.say(text)
        return self.take()

    def _joined(self, text: str) -> str:
        """Without half a character at its end, which waits for the other half."""
        whole = (self._half + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        is_half = "\ud800" <= whole[-1:] <= "\udbff"
        self._half = whole[-1] if is_half else ""
        return without_halves(whole[:-1] if is_half else whole)

    def think(self, text: str, signature: str | None = None) -> None:
        if not text.isascii():
            text = without_halves(text)
        if text or signature:
            self._beside_calls(ReasoningDelta(text, 0, (), self._taken(), signature))

    def tell_calls(self, events: Iterable[Event]) -> None:
        self._add(events)

    def end_with(self, reason: object, stop: object = None) -> None:
        """The server says why it ends; it may still have more to say, such as the usage."""
        word = str(reason).lower()
        if word in FAILURES:
            raise BadAnswer(f"the server gave up in the middle of its reply ({word})")
        if word not in REASONS:
            self._warnings.append(f"the server ended for a reason that nobody knows here: {word[:100]}")
        self.reason = REASONS.get(word, "stop")
        if isinstance(stop, str):
            self.stop = stop

    def finish(self) -> None:
        if self.finished:
            return
        if self._half:
            self._half = ""
            self.say("\ufffd")
        reason = self.reason or "stop"
        cut_short = reason in ("length", "content_filter")
        self._add(self.calls.end(cut_short, self._check_calls))
        self._add(self._held)
        if len(self.calls) and reason == "stop":
            reason = "tool_calls"
        self._add([Finished(reason, self.stop, self.usage, tuple(self._warnings))])
        self.finished = True

    def _taken(self) -> tuple[TokenLogprob, ...]:
        taken, self.logprobs = self.logprobs, ()
        return taken

    def _beside_calls(self, event: Event) -> None:
        if self._held or self.calls.is_open:
            self._held.append(event)
        elif self._begun:
            self._ready.append(event)
        else:
            self._add([event])

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            if not self._begun:
                self._begun = True
                self._ready.append(Started())
            self._ready.append(event)


class DraftReader:
    """What it means for every protocol to read a reply into a draft."""

    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        self._draft = Draft(make_id, check_calls)

    @property
    def finished(self) -> bool:
        return self._draft.finished

    @property
    def knows_end(self) -> bool:
        return self._draft.reason is not None

    def take(self) -> list[Event]:
        """Events that were ready when something went wrong."""
        return self._draft.take()

    def plain(self, frame: Frame) -> str | None:
        return None

    def say(self, texts: Sequence[str]) -> list[Event]:
        return self._draft.say_all(texts)

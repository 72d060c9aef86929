"""Turns what the split stage finds into events.

Rules
1. Adjacent text of the same kind becomes one event.
2. A token is counted with the text it begins in. Tokens of markers and held text count with the next event. Token ids
   go where the token is counted.
3. Log probabilities go only with the text and reasoning that they consist of.
4. Two thoughts with nothing between them are joined with a blank line.
5. Text and reasoning that begin before `hidden` are part of the prompt: the reply continues them.
"""

import os
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.events import Event, ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, ToolCallStart
from dragoman.core.reply import BETWEEN_PARTS
from dragoman.core.request import Tool
from dragoman.pipeline.text_buffer import TextBuffer

Kind = Literal["text", "thought", "gap", "start", "arguments"]


MIN_FENCE = 3
"""Backticks that begin a code fence."""
TICKS = re.compile("`+")


class MalformedCall(Exception):
    """The text is not a call."""


class SingleCallDone(Exception):
    """The reply has made the only call that is allowed."""


class EventWriter:
    def __init__(self, buffer: TextBuffer, tools: Mapping[str, Tool], parallel: bool) -> None:
        self.hidden = 0
        """Number of characters at the beginning that cause no events."""
        self.has_text = False
        """Whether there has been visible text."""
        self.first_char = ""
        """The first visible character."""
        self._fence = 0
        """Backticks of the open code fence, and `_ticks` at the end of the text so far."""
        self._ticks = 0
        self.has_thought = False
        """Whether the current reasoning has any text yet."""
        self._last_is_thought = False
        self.calls: list[str] = []
        self.warnings: list[str] = []
        self.has_started_call = False
        """Whether the current call was reported, so that it cannot be withdrawn."""
        self.strict = False
        """Whether only calls of offered tools are accepted, because no marker announced the call."""
        self._buffer = buffer
        self._tools = tools
        self._parallel = parallel
        self._arguments: list[str] = []
        self._pending: list[tuple[Kind, list[str], int]] = []
        self._tokens: deque[tuple[int, TextDelta]] = deque()

    def add_tokens(self, delta: TextDelta) -> None:
        """Record the tokens of the next piece of the buffer."""
        self._tokens.append((self._buffer.position + len(self._buffer.window), delta))

    @property
    def has_tokens(self) -> bool:
        """Whether tokens wait for the next event."""
        return bool(self._tokens)

    def write_text(self, text: str, consumed_after: int = 0) -> None:
        """`consumed_after`: this many characters after the text are consumed already."""
        if text:
            self.track_text(text)
            if shown := self._visible_part(text, consumed_after):
                self._add("text", shown)

    def track_text(self, text: str) -> None:
        """Update the state for visible text."""
        self.has_text = self.has_text or bool(text)
        self._last_is_thought = False
        self.first_char = self.first_char or text.lstrip()[:1]
        if "`" in text or self._ticks:
            self._read_fences(text)

    def _read_fences(self, text: str) -> None:
        joined = "`" * self._ticks + text
        self._ticks = 0
        for run in TICKS.finditer(joined):
            if run.end() == len(joined):
                # More backticks may follow.
                self._ticks = len(run[0])
            else:
                self._fence = _fence_after(self._fence, len(run[0]))

    @property
    def is_in_fence(self) -> bool:
        """Whether text that follows now is inside a code fence."""
        return _fence_after(self._fence, self._ticks) > 0

    def begin_thought(self) -> None:
        self.has_thought = False

    def write_thought(self, text: str, consumed_after: int = 0) -> None:
        if text:
            shown = self._visible_part(text, consumed_after)
            if self._last_is_thought and not self.has_thought and shown == text:
                self._add("gap", BETWEEN_PARTS)
            self.has_thought = self._last_is_thought = True
            if shown:
                self._add("thought", shown)

    def _visible_part(self, text: str, consumed_after: int) -> str:
        """Return the part of the last consumed text that is not hidden."""
        begin = self._buffer.position - consumed_after - len(text)
        return text[max(0, self.hidden - begin) :]

    def start_call(self, name: str) -> None:
        """Raises `MalformedCall` if a call of this tool is not allowed here."""
        if self.strict and name not in self._tools:
            raise MalformedCall
        self._last_is_thought = False
        self.has_started_call = True
        self.calls.append(name)
        self._add("start", name)

    def write_arguments(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._add("arguments", text)

    def end_call(self) -> None:
        self.has_started_call = False
        try:
            msgspec.json.decode("".join(self._arguments))
        except DECODE_ERRORS:
            if not self._buffer.cut:
                self.warn("the arguments of a tool call are not JSON")
        self._arguments.clear()
        self._buffer.start_recording()
        if not self._parallel:
            raise SingleCallDone

    def warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def parameter_schemas(self, name: str) -> Mapping[str, Any]:
        """Return the known schemas of a tool's parameters."""
        tool = self._tools.get(name)
        properties = (tool.parameters or {}).get("properties") if tool else None
        return properties if isinstance(properties, Mapping) else {}

    def _add(self, kind: Kind, text: str) -> None:
        position = self._buffer.position
        if self._pending and self._pending[-1][0] == kind != "start":
            last = self._pending[-1]
            last[1].append(text)
            self._pending[-1] = (kind, last[1], position)
        else:
            self._pending.append((kind, [text], position))

    def flush(self, out: list[Event]) -> None:
        for kind, pieces, end in self._pending:
            text = "".join(pieces)
            if kind == "start":
                out.append(ToolCallStart(f"call_{os.urandom(12).hex()}", text))
                continue
            if kind == "gap":
                out.append(ReasoningDelta(text, 0))
                continue
            count, tokens, logprobs = self._take_tokens(end - len(text), end)
            if kind == "arguments":
                out.append(ToolCallDelta(text, count, tokens))
            else:
                out.append((TextDelta if kind == "text" else ReasoningDelta)(text, count, tokens, logprobs))
        self._pending.clear()

    def flush_tokens(self, out: list[Event]) -> None:
        """Emit the count of tokens that belong to no event."""
        if count := sum(delta.count for _, delta in self._tokens):
            out.append(TextDelta("", count, tuple([token for _, delta in self._tokens for token in delta.tokens])))
        self._tokens.clear()

    def _take_tokens(self, begin: int, end: int) -> tuple[int, tuple[int, ...], tuple[TokenLogprob, ...]]:
        count, ids, logprobs = 0, list[int](), list[TokenLogprob]()
        while self._tokens and self._tokens[0][0] < end:
            at, delta = self._tokens.popleft()
            count += delta.count
            ids += delta.tokens
            if at >= begin:
                logprobs += delta.logprobs
        return count, tuple(ids), tuple(logprobs)


def _fence_after(fence: int, ticks: int) -> int:
    """Return the open fence after a run of backticks. As in Markdown, a run at least as long as the first closes it."""
    if ticks < max(fence, MIN_FENCE):
        return fence
    return 0 if fence else ticks

"""What the split stage has found, on its way to being events.

Rules
1. What was found in one piece of text and belongs together is one event.
2. A token is counted with the text it begins in. Those of markers, and of what was held, count with what comes next.
3. Ids and log probabilities of tokens go with text and thoughts that they are the text of, and with nothing else.
"""

import os
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.events import Event, ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta, ToolCallStart
from dragoman.core.request import Tool
from dragoman.pipeline.text_buffer import Source
from dragoman.pipeline.tool_calls import Malformed

Kind = Literal["text", "thought", "start", "arguments"]


LEAST_FENCE = 3
"""Backticks that begin a code fence."""
TICKS = re.compile("`+")


class EnoughError(Exception):
    """The one call that may be made has been made."""


class Writer:
    def __init__(self, source: Source, tools: Mapping[str, Tool], parallel: bool) -> None:
        self.said = False
        """Whether there has been text."""
        self.first = ""
        """The first character that there was to see."""
        self._fence = 0
        """Backticks of the open code fence; 0 if none is open."""
        self._ticks = 0
        """Backticks at the end of the text so far."""
        self.thought_of = False
        """Whether the thought at hand has said anything yet."""
        self.calls: list[str] = []
        self.warnings: list[str] = []
        self.started = False
        self.strict = False
        self._source = source
        self._tools = tools
        self._parallel = parallel
        self._told: list[str] = []
        self._found: list[tuple[Kind, list[str], int]] = []
        self._tokens: deque[tuple[int, TextDelta]] = deque()

    def arrived(self, delta: TextDelta) -> None:
        """The tokens of the next piece of the source."""
        self._tokens.append((self._source.position + len(self._source.window), delta))

    def text(self, text: str) -> None:
        if text:
            self.passed(text)
            self._add("text", text)

    def passed(self, text: str) -> None:
        """The text has been said, by whomever."""
        self.said = self.said or bool(text)
        self.first = self.first or text.lstrip()[:1]
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
    def in_fence(self) -> bool:
        """Whether text that follows now is inside a code fence."""
        return _fence_after(self._fence, self._ticks) > 0

    def thought(self, text: str) -> None:
        if text:
            self.thought_of = True
            self._add("thought", text)

    # Calls, for their readers.

    def start(self, name: str) -> None:
        if self.strict and name not in self._tools:
            raise Malformed
        self.started = True
        self.calls.append(name)
        self._add("start", name)

    def arguments(self, text: str) -> None:
        if text:
            self._told.append(text)
            self._add("arguments", text)

    def end(self) -> None:
        self.started = False
        self._check("".join(self._told))
        self._told.clear()
        self._source.record()
        if not self._parallel:
            raise EnoughError

    def _check(self, arguments: str) -> None:
        try:
            msgspec.json.decode(arguments)
        except DECODE_ERRORS:
            if not self._source.cut:
                self.warn("the arguments of a tool call are not JSON")

    def warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)

    def parameters(self, name: str) -> Mapping[str, Any]:
        tool = self._tools.get(name)
        properties = (tool.parameters or {}).get("properties") if tool else None
        return properties if isinstance(properties, Mapping) else {}

    # Events.

    def _add(self, kind: Kind, text: str) -> None:
        position = self._source.position
        if self._found and self._found[-1][0] == kind != "start":
            last = self._found[-1]
            last[1].append(text)
            self._found[-1] = (kind, last[1], position)
        else:
            self._found.append((kind, [text], position))

    def flush(self, out: list[Event]) -> None:
        for kind, pieces, end in self._found:
            text = "".join(pieces)
            if kind == "start":
                out.append(ToolCallStart(f"call_{os.urandom(12).hex()}", text))
                continue
            count, tokens, logprobs = self._tokens_of(end - len(text), end)
            if kind == "arguments":
                out.append(ToolCallDelta(text, count))
            else:
                out.append((TextDelta if kind == "text" else ReasoningDelta)(text, count, tokens, logprobs))
        self._found.clear()

    def rest(self, out: list[Event]) -> None:
        """The tokens of what made no event."""
        if count := sum(delta.count for _, delta in self._tokens):
            out.append(TextDelta("", count))
        self._tokens.clear()

    def _tokens_of(self, begin: int, end: int) -> tuple[int, tuple[int, ...], tuple[TokenLogprob, ...]]:
        count, ids, logprobs = 0, list[int](), list[TokenLogprob]()
        while self._tokens and self._tokens[0][0] < end:
            at, delta = self._tokens.popleft()
            count += delta.count
            if at >= begin:
                ids += delta.tokens
                logprobs += delta.logprobs
        return count, tuple(ids), tuple(logprobs)


def _fence_after(fence: int, ticks: int) -> int:
    """The open fence after a run of backticks. As in Markdown, a run at least as long as the first closes it."""
    if ticks < max(fence, LEAST_FENCE):
        return fence
    return 0 if fence else ticks

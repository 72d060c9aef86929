"""Prints a chat: answers as they arrive, reasoning and tool calls dimmed. A pipe gets only the answer.

On a terminal, control characters in model output are removed, so that a model cannot control the terminal.
"""

import os
from collections.abc import Mapping
from typing import TextIO

from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Text, ToolResult

DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
MAX_RESULT_LENGTH = 200
"""Characters of a tool result that are printed."""


class Screen:
    """`is_verbose`: print reasoning, tool calls and notes too."""

    def __init__(self, out: TextIO, *, is_verbose: bool, environ: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._is_verbose = is_verbose
        self._is_terminal = out.isatty()
        self._has_colors = self._is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._block: type[Event] | None = None
        self._is_line_start = True

    def show(self, event: Event | ToolResult) -> None:
        if isinstance(event, TextDelta):
            self._print(TextDelta, event.text)
        elif isinstance(event, Finished):
            self.end_block()
            if event.reason == "length" and self._is_verbose:
                self.note("(cut off: the token limit was reached)")
        elif not self._is_verbose:
            return
        elif isinstance(event, ReasoningDelta):
            self._print(ReasoningDelta, event.text)
        elif isinstance(event, ToolCallStart):
            self.end_block()
            self._print(ToolCallStart, f"→ {event.name} ")
        elif isinstance(event, ToolCallDelta):
            self._print(ToolCallStart, event.arguments)
        elif isinstance(event, ToolResult):
            text = " ".join("".join(part.text for part in event.content if isinstance(part, Text)).split())
            self.note(f"← {text[:MAX_RESULT_LENGTH]}{'…' if len(text) > MAX_RESULT_LENGTH else ''}")

    def note(self, text: str) -> None:
        """Print a dimmed line."""
        self.end_block()
        text = self._clean(text)
        self._write(f"{DIM}{text}{PLAIN}\n" if self._has_colors else f"{text}\n")

    def line(self, text: str = "") -> None:
        self.end_block()
        self._write(self._clean(text) + "\n")

    def style_prompt(self, text: str) -> str:
        """Make the prompt bold. \\x01 and \\x02 mark the characters that have no width for readline."""
        return f"\x01{BOLD}\x02{text}\x01{PLAIN}\x02" if self._has_colors else text

    def _print(self, block: type[Event], text: str) -> None:
        if self._block is not block:
            self.end_block()
            self._block = block
            if block is not TextDelta and self._has_colors:
                self._write(DIM)
        self._write(self._clean(text))
        self._is_line_start = text.endswith("\n") if text else self._is_line_start

    def end_block(self) -> None:
        """End the text, reasoning or tool call that is being printed, and its line."""
        if self._block is not None and self._block is not TextDelta and self._has_colors:
            self._write(PLAIN)
        if self._block is not None and not self._is_line_start:
            self._write("\n")
        self._block, self._is_line_start = None, True

    def _clean(self, text: str) -> str:
        return text.translate(CONTROLS) if self._is_terminal else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

"""What a chat shows: answers as they come, thoughts and calls dimmed; in a pipe the answer and nothing else.

What a model writes is data: on a terminal its control characters are left out, so that nobody but us moves the cursor.
"""

import os
from collections.abc import Mapping
from typing import TextIO

from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Text, ToolResult

DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
WIDTH = 200
"""Characters of a result that are shown."""


class Screen:
    """`talkative`: whether more is shown than the answer."""

    def __init__(self, out: TextIO, *, talkative: bool, environ: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._talkative = talkative
        self._is_terminal = out.isatty()
        self._colours = self._is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._showing: type[Event] | None = None
        self._at_margin = True

    def hear(self, event: Event | ToolResult) -> None:
        if isinstance(event, TextDelta):
            self._piece(TextDelta, event.text)
        elif isinstance(event, Finished):
            self._stop()
            if event.reason == "length" and self._talkative:
                self.note("(cut short: there was no room for more)")
        elif self._talkative:
            self._more(event)

    def _more(self, event: Event | ToolResult) -> None:
        if isinstance(event, ReasoningDelta):
            self._piece(ReasoningDelta, event.text)
        elif isinstance(event, ToolCallStart):
            self._stop()
            self._piece(ToolCallStart, f"→ {event.name} ")
        elif isinstance(event, ToolCallDelta):
            self._piece(ToolCallStart, event.arguments)
        elif isinstance(event, ToolResult):
            text = " ".join("".join(part.text for part in event.content if isinstance(part, Text)).split())
            self.note(f"← {text[:WIDTH]}{'…' if len(text) > WIDTH else ''}")

    def note(self, words: str) -> None:
        """A line of ours."""
        self._stop()
        self._write(self._dimmed(self._clean(words)) + "\n")

    def line(self, words: str = "") -> None:
        self._stop()
        self._write(self._clean(words) + "\n")

    def prompt(self, words: str) -> str:
        """How to ask for a line. Readline has to know which characters take no room."""
        return f"\x01{BOLD}\x02{words}\x01{PLAIN}\x02" if self._colours else words

    def stop(self) -> None:
        self._stop()

    def _piece(self, kind: type[Event], text: str) -> None:
        if self._showing is not kind:
            self._stop()
            self._showing = kind
            if kind is not TextDelta and self._colours:
                self._write(DIM)
        self._write(self._clean(text))
        self._at_margin = text.endswith("\n") if text else self._at_margin

    def _stop(self) -> None:
        """Ends what is being shown, with its line."""
        if self._showing is not None and self._showing is not TextDelta and self._colours:
            self._write(PLAIN)
        if self._showing is not None and not self._at_margin:
            self._write("\n")
        self._showing, self._at_margin = None, True

    def _dimmed(self, words: str) -> str:
        return f"{DIM}{words}{PLAIN}" if self._colours else words

    def _clean(self, text: str) -> str:
        return text.translate(CONTROLS) if self._is_terminal else text

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

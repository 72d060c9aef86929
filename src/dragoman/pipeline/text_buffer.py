"""A buffer of text that arrives in pieces, and parsers over it.

A parser is a generator that consumes available text and yields when it needs more. Grammars are read by recursive
descent, independent of how the text is cut.

Rules
1. A parser never decides by where a piece ends. It waits as long as the text could still become something else.
2. Consumed text is not read again, except by a parser that pushes it back, at most once.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")
Parser = Generator[None, None, T]
"""Yields when it needs more text and returns what it read."""
Emit = Callable[[str], None]

MAX_GAP = 256
"""Whitespace before a marker that belongs to the marker, at most."""
MAX_WINDOW = 256
"""Characters in the window. Consuming copies the rest of the window, so it must stay short."""
RECENT_LENGTH = 256
"""Number of last consumed characters in `recent`."""

Gap = Literal["space", "line", "none"]
"""Which whitespace before a marker belongs to it: all, one line break, none."""


class MarkerMatch(msgspec.Struct, frozen=True):
    """A marker and the whitespace that belongs to it. An empty marker means the end of the text."""

    marker: str
    gap: str = ""

    @property
    def text(self) -> str:
        return self.gap + self.marker


class Markers:
    """Finds the first of several markers, and how much of the end of a text may be the beginning of one."""

    def __init__(self, *texts: str, gap: Gap = "space") -> None:
        self.all = sorted(set(filter(None, texts)), key=len, reverse=True)
        self.gap = gap
        self.longest = len(self.all[0]) if self.all else 0
        prefixes = sorted({marker[:end] for marker in self.all for end in range(1, len(marker))}, key=len, reverse=True)
        self.pattern = re.compile(_any_of(self.all))
        self._prefix = re.compile(f"(?:{_any_of(prefixes)})\\Z")
        self.first = re.compile(
            "[" + "".join({re.escape(marker[0]) for marker in self.all}) + "]" if self.all else "(?!)"
        )

    def gap_before(self, text: str, end: int) -> int:
        """Return the start of the whitespace that belongs to a marker at `end`."""
        if self.gap == "none":
            return end
        if self.gap == "line":
            return end - 1 if text[end - 1 : end] == "\n" else end
        return max(len(text[:end].rstrip()), end - MAX_GAP)

    def safe_length(self, text: str) -> int:
        """Return how many characters certainly come before the next marker and its gap."""
        partial = self._prefix.search(text, max(0, len(text) - self.longest + 1))
        return self.gap_before(text, len(text) if partial is None else partial.start())


markers = lru_cache(maxsize=1024)(Markers)
"""Cached: formats use the same markers for every reply, and building them is slow."""


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"


class TextBuffer:
    def __init__(self) -> None:
        self.window = ""
        self._pending: list[str] = []
        """Text after the window, in reverse order."""
        self._ended = False
        self._cut = False
        self.position = 0
        """Number of consumed characters."""
        self.recent = ""
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self.window = self.window + text if self.window else text
        self._limit_window()

    def end(self, cut: bool = False) -> None:
        self._ended, self._cut = True, cut

    @property
    def ended(self) -> bool:
        return self._ended and not self._pending

    @property
    def cut(self) -> bool:
        """Whether the text was truncated by a length limit."""
        return self._cut and not self._pending

    def refill(self) -> bool:
        """Move more pending text into the window. Return whether there was any."""
        if not self._pending:
            return False
        self.window += self._pending.pop()
        return True

    def _limit_window(self) -> None:
        if len(self.window) > 2 * MAX_WINDOW:
            window = self.window
            pieces = [window[start : start + MAX_WINDOW] for start in range(0, len(window), MAX_WINDOW)]
            self.window = pieces[0]
            self._pending += pieces[:0:-1]

    def take(self, length: int) -> str:
        taken, self.window = self.window[:length], self.window[length:]
        self.mark_taken(taken)
        return taken

    def mark_taken(self, text: str) -> None:
        """Count the text as consumed."""
        self.position += len(text)
        self.recent = (self.recent + text)[-RECENT_LENGTH:]
        if self._record is not None:
            self._record.append(text)

    def push_back(self, text: str) -> None:
        """Return the last consumed text to the buffer."""
        self.window = text + self.window
        self._limit_window()
        self.position -= len(text)
        self.recent = self.recent[: max(0, len(self.recent) - len(text))]
        if self._record is not None:
            recorded = "".join(self._record)
            self._record = [recorded[: len(recorded) - len(text)]]

    def start_recording(self) -> None:
        """Record consumed text until `stop_recording`."""
        self._record = []

    def stop_recording(self) -> str:
        text, self._record = "".join(self._record or ()), None
        return text

    def has_length(self, length: int) -> Parser[bool]:
        """Whether at least `length` characters are still to come."""
        while len(self.window) < length and not self.ended:
            yield
        return len(self.window) >= length

    def peek(self) -> Parser[str]:
        """Return the next character without consuming it; empty at the end."""
        yield from self.has_length(1)
        return self.window[:1]

    def skip_space(self) -> Parser[None]:
        """Consume all whitespace."""
        while True:
            stripped = self.window.lstrip()
            self.take(len(self.window) - len(stripped))
            if stripped or self.ended:
                return
            yield

    def skip_comma(self) -> Parser[None]:
        """Consume a comma and whitespace around it."""
        yield from self.skip_space()
        yield from self.take_literal(",")
        yield from self.skip_space()

    def starts_with(self, texts: Sequence[str]) -> Parser[str]:
        """Return the longest of the texts that comes next, without consuming it; empty if none does."""
        while not self.ended and any(len(text) > len(self.window) and text.startswith(self.window) for text in texts):
            yield
        return max((text for text in texts if text and self.window.startswith(text)), key=len, default="")

    def take_literal(self, text: str) -> Parser[bool]:
        """Consume the text if it comes next."""
        match = yield from self.starts_with((text,))
        self.take(len(match))
        return bool(match)

    def read_until(self, markers: Markers, emit: Emit) -> Parser[MarkerMatch]:
        """Pass everything before the next marker to `emit`, and consume the marker."""
        while True:
            match = markers.pattern.search(self.window)
            if match is not None:
                begin = markers.gap_before(self.window, match.start())
                if begin:
                    emit(self.take(begin))
                marked = self.take(match.end() - begin)
                return MarkerMatch(match[0], marked[: len(marked) - len(match[0])])
            safe_length = len(self.window) if self.ended else markers.safe_length(self.window)
            if safe_length:
                emit(self.take(safe_length))
            if self.ended:
                return MarkerMatch("")
            yield

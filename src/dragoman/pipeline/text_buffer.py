"""A text that arrives in pieces, and what a reader asks of it.

A reader is a generator: it takes what is there and yields where it cannot go on without more. So a grammar is read by
plain recursive descent, however the text is cut.

Rules
1. A reader never decides by where a piece ends. It waits as long as the text at hand could still become something else.
2. What has been taken is not looked at again, except by a reader that puts it back, which it does once.
"""

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when it needs more text; returns what it read."""

MOST_GAP = 256
"""White space next to a marker belongs to the marker, as far as this; more of it would have to be kept for nothing."""
MOST_WINDOW = 256
"""Characters at hand at once. Taking moves what is left, so that much text at once would be moved again and again."""
REMEMBERED = 256
"""Characters of what was taken last that can still be asked for."""

Gap = Literal["space", "line", "none"]
"""What belongs to a marker of the white space before it: all, one line break, nothing."""


class Found(msgspec.Struct, frozen=True):
    """A marker, with the white space before it that belongs to it. No marker: the text has ended."""

    marker: str
    gap: str = ""

    @property
    def text(self) -> str:
        return self.gap + self.marker


class Markers:
    """Finds the first of several markers, and how much of a text's end may be the beginning of one."""

    def __init__(self, markers: Sequence[str], gap: Gap = "space") -> None:
        self.all = sorted(set(filter(None, markers)), key=len, reverse=True)
        self.gap = gap
        self.longest = len(self.all[0]) if self.all else 0
        prefixes = sorted({marker[:end] for marker in self.all for end in range(1, len(marker))}, key=len, reverse=True)
        self._marker = re.compile(_any_of(self.all))
        self._prefix = re.compile(f"(?:{_any_of(prefixes)})\\Z")
        self.first = re.compile(
            "[" + "".join({re.escape(marker[0]) for marker in self.all}) + "]" if self.all else "(?!)"
        )

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._marker.search(text, at)

    def gap_before(self, text: str, end: int) -> int:
        """Where the white space begins that belongs to a marker at `end`."""
        if self.gap == "none":
            return end
        if self.gap == "line":
            return end - 1 if text[end - 1 : end] == "\n" else end
        return max(len(text[:end].rstrip()), end - MOST_GAP)

    def safe(self, text: str) -> int:
        """How many characters certainly come before the next marker and its gap."""
        partial = self._prefix.search(text, max(0, len(text) - self.longest + 1))
        return self.gap_before(text, len(text) if partial is None else partial.start())


@lru_cache(maxsize=1024)
def markers(*texts: str, gap: Gap = "space") -> Markers:
    """Those of a format are the same for every reply, and take longer to make than a short reply takes to read."""
    return Markers(texts, gap)


def _any_of(texts: Sequence[str]) -> str:
    return "|".join(map(re.escape, texts)) or "(?!)"


class Source:
    def __init__(self) -> None:
        self.window = ""
        self._later: list[str] = []
        """What comes after the window, the next piece last."""
        self._ended = False
        self._cut = False
        self.position = 0
        """Characters taken so far."""
        self.recent = ""
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        self.window = self.window + text if self.window else text
        self._shorten()

    def end(self, cut: bool = False) -> None:
        self._ended, self._cut = True, cut

    @property
    def ended(self) -> bool:
        return self._ended and not self._later

    @property
    def cut(self) -> bool:
        """Whether the end has come because there was no more room, so that more would have followed."""
        return self._cut and not self._later

    def refill(self) -> bool:
        """Whether there was more, now that a reader has asked for it."""
        if not self._later:
            return False
        self.window += self._later.pop()
        return True

    def _shorten(self) -> None:
        if len(self.window) > 2 * MOST_WINDOW:
            window = self.window
            pieces = [window[at : at + MOST_WINDOW] for at in range(0, len(window), MOST_WINDOW)]
            self.window = pieces[0]
            self._later += pieces[:0:-1]

    def take(self, length: int) -> str:
        taken, self.window = self.window[:length], self.window[length:]
        self.passed(taken)
        return taken

    def passed(self, text: str) -> None:
        """The text counts as taken."""
        self.position += len(text)
        self.recent = (self.recent + text)[-REMEMBERED:]
        if self._record is not None:
            self._record.append(text)

    def put_back(self, text: str) -> None:
        """The text, which was taken last, is still to be read."""
        self.window = text + self.window
        self._shorten()
        self.position -= len(text)
        self.recent = self.recent[: max(0, len(self.recent) - len(text))]
        if self._record is not None:
            kept = "".join(self._record)
            self._record = [kept[: len(kept) - len(text)]]

    def record(self) -> None:
        """Keep what is taken from here on, until `recorded`."""
        self._record = []

    def recorded(self) -> str:
        text, self._record = "".join(self._record or ()), None
        return text

    # Readings.

    def has(self, length: int) -> Reading[bool]:
        """Whether so many characters are still to come."""
        while len(self.window) < length and not self.ended:
            yield
        return len(self.window) >= length

    def next(self) -> Reading[str]:
        """The next character, not taken; nothing at the end."""
        yield from self.has(1)
        return self.window[:1]

    def space(self) -> Reading[None]:
        """Take all white space."""
        while True:
            stripped = self.window.lstrip()
            self.take(len(self.window) - len(stripped))
            if stripped or self.ended:
                return
            yield

    def begins(self, texts: Sequence[str]) -> Reading[str]:
        """Which of the texts comes next, not taken; the longest of several, nothing if none."""
        while not self.ended and any(len(text) > len(self.window) and text.startswith(self.window) for text in texts):
            yield
        return max((text for text in texts if text and self.window.startswith(text)), key=len, default="")

    def literal(self, text: str) -> Reading[bool]:
        """Take the text if it comes next."""
        found = yield from self.begins((text,))
        self.take(len(found))
        return bool(found)

    def until(self, markers: Markers, emit: Callable[[str], None]) -> Reading[Found]:
        """Hand on everything before the next marker, as it comes, and take the marker."""
        while True:
            found = markers.search(self.window)
            if found is not None:
                begin = markers.gap_before(self.window, found.start())
                if begin:
                    emit(self.take(begin))
                marked = self.take(found.end() - begin)
                return Found(found[0], marked[: len(marked) - len(found[0])])
            safe = len(self.window) if self.ended else markers.safe(self.window)
            if safe:
                emit(self.take(safe))
            if self.ended:
                return Found("")
            yield

"""A conversation as plain text, to be read by a model that summarises it, whole or in parts.

    transcript := entry ("\\n\\n" entry)*
    entry      := "[" HEADING "]\\n" text        one for each part of a message; an image is only named

The parts of a transcript, joined, are the transcript: nothing is left out and nothing is read twice.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from dragoman.core.request import Image, Message, Reasoning, Text, ToolCall, ToolResult

BETWEEN_ENTRIES = "\n\n"
IMAGE = "(an image)"


class Transcript:
    def __init__(self, messages: Iterable[Message]) -> None:
        entries = [entry for message in messages for entry in _entries(message)]
        self.text = BETWEEN_ENTRIES.join(entries)
        self._starts: list[int] = []
        """Where each entry but the first begins."""
        at = 0
        for entry in entries[:-1]:
            at += len(entry) + len(BETWEEN_ENTRIES)
            self._starts.append(at)

    def end_of_part(self, start: int, size: int) -> int:
        """Where a part of at most `size` characters ends. It ends with an entry, unless it would be less than half."""
        end = start + size
        if end >= len(self.text):
            return len(self.text)
        found = bisect_right(self._starts, end)
        boundary = self._starts[found - 1] if found else 0
        return boundary if boundary - start > size // 2 else end


def _entries(message: Message) -> Iterator[str]:
    for part in message.parts:
        if isinstance(part, Text):
            yield _entry(message.role, part.text)
        elif isinstance(part, Reasoning):
            if part.text:
                yield _entry(f"{message.role}, reasoning", part.text)
        elif isinstance(part, ToolCall):
            yield _entry(f"{message.role}, call of {part.name}", part.arguments)
        elif isinstance(part, ToolResult):
            content = "".join(inner.text if isinstance(inner, Text) else IMAGE for inner in part.content)
            yield _entry("error of the call" if part.is_error else "result of the call", content)
        elif isinstance(part, Image):
            yield _entry(message.role, IMAGE)


def _entry(heading: str, text: str) -> str:
    return f"[{heading}]\n{text}"

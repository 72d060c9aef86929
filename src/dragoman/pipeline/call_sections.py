"""Reads sections of tool calls with the readers of `call_readers`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dragoman.core.request import Tool
from dragoman.formats.syntax import Braced, CallSection, JsonCall, ModelFormat, NamedJson, Pythonic, Tagged
from dragoman.pipeline.call_readers import braced_calls, json_calls, python_calls, tagged_calls
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Emit, MarkerMatch, Parser, TextBuffer

MAX_JUNK = 16

READERS: dict[type, Callable[[TextBuffer, Any, CallSection, EventWriter], Parser[None]]] = {
    JsonCall: json_calls.read_objects,
    NamedJson: json_calls.read_named,
    Tagged: tagged_calls.read,
    Pythonic: python_calls.read,
    Braced: braced_calls.read,
}

DETECTORS: dict[type, Callable[[TextBuffer, Any, CallSection], Parser[bool]]] = {
    JsonCall: json_calls.begins_object,
    NamedJson: json_calls.begins_named,
    Tagged: tagged_calls.begins,
    Pythonic: python_calls.begins,
    Braced: braced_calls.begins,
}
"""Return whether a call of this kind comes next, without consuming it."""


class SectionReader:
    """Reads the calls of one reply. Only if tools were offered."""

    def __init__(self, syntax: ModelFormat, tools: Mapping[str, Tool], buffer: TextBuffer, writer: EventWriter) -> None:
        self.syntax = syntax
        self.tools = tools
        self.buffer = buffer
        self.writer = writer
        sections = syntax.calls if tools else ()
        self.openers = frozenset(section.open for section in sections if section.open)
        self.bare = [section for section in sections if not section.open]

    def read(self, match: MarkerMatch, emit: Emit, *, strict: bool = False) -> Parser[None]:
        """Read the calls after a marker. Text that is not a call goes to `emit`."""
        sections = [section for section in self.syntax.calls if section.open == match.marker]
        yield from self._read(sections, match, emit, strict or match.marker.startswith("```"))

    def read_bare(self, space: str) -> Parser[bool]:
        """Read calls without a marker, after this whitespace. False without calls; then no text is consumed."""
        if (yield from self._detect(self.bare)) is None:
            return False
        yield from self._read(self.bare, MarkerMatch("", space), self.writer.write_text, strict=True)
        return True

    def _read(self, sections: Sequence[CallSection], match: MarkerMatch, emit: Emit, strict: bool) -> Parser[None]:
        writer, buffer = self.writer, self.buffer
        before = len(writer.calls)
        writer.strict = strict
        buffer.start_recording()
        try:
            yield from buffer.skip_space()
            section = yield from self._detect(sections)
            if section is None:
                raise MalformedCall
            yield from self._read_calls(section)
        except MalformedCall:
            writer.has_started_call = False
            emit((match.text if len(writer.calls) == before else "") + buffer.stop_recording())
            if not strict or (len(writer.calls) > before and not buffer.cut):
                writer.warn("a malformed tool call was left as text")
            return
        buffer.stop_recording()
        yield from buffer.skip_space()

    def _read_calls(self, section: CallSection) -> Parser[None]:
        buffer = self.buffer
        while True:
            yield from READERS[type(section.call)](buffer, section.call, section, self.writer)
            yield from buffer.skip_space()
            if (yield from self._take_end(section)) or not buffer.window:
                return
            if section.separator:
                yield from buffer.take_literal(section.separator)
                yield from buffer.skip_space()
            if not section.multiple or (yield from self._detect([section])) is None:
                return

    def _detect(self, sections: Sequence[CallSection]) -> Parser[CallSection | None]:
        """Return the kind of section that comes next, without consuming it."""
        for section in sections:
            if (yield from DETECTORS[type(section.call)](self.buffer, section.call, section)):
                return section
        return None

    def _take_end(self, section: CallSection) -> Parser[bool]:
        """Consume the end of a section, including surplus brackets that small models write before it.

        A reply that is cut off may end within it.
        """
        if not section.close:
            return False
        junk = ""
        while (yield from self.buffer.peek()) and self.buffer.window[0] in "}] \n" and len(junk) < MAX_JUNK:
            junk += self.buffer.take(1)
        if (yield from self.buffer.take_literal(section.close)):
            return True
        rest = self.buffer.window
        if rest and self.buffer.cut and section.close.startswith(rest):
            self.buffer.take(len(rest))
            return True
        self.buffer.push_back(junk)
        return False

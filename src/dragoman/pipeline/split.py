"""The stage that splits model output into text, reasoning and tool calls, for every format.

    reply   := thought? (text | thought | section)*

Rules
1. The joined events do not depend on how the text is cut. Only text that may still become a marker is held back.
2. Whitespace next to a marker belongs to the marker. All other text is preserved.
3. A malformed call becomes text, with a warning. Calls are recognized only if tools were offered.
4. In reasoning, a marker may be real or only mentioned. It is ambiguous if it is quoted, if it closes a nested opener,
   or if it is a call. The following text is then held until the case is clear: if a closer follows, everything before
   it was reasoning; if the reply ends, the ambiguous marker ended the reasoning. Calls at the end of reasoning,
   followed only by another call or the end, are calls.
5. Outside reasoning, an opener counts at the beginning of a line, but not in a code fence. Elsewhere it is text unless
   a closer follows. Once a constrained answer has begun, markers in it are text.
6. Tokens are counted with the text they begin in, those of a marker with the text after it.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event, Finished, Started, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Tool
from dragoman.formats.syntax import CallSection, ModelFormat
from dragoman.pipeline.call_readers import DETECTORS, READERS, MalformedCall
from dragoman.pipeline.channels import read_channels
from dragoman.pipeline.event_writer import EventWriter, SingleCallDone
from dragoman.pipeline.text_buffer import RECENT_LENGTH, MarkerMatch, Parser, TextBuffer, markers

Emit = Callable[[str], None]
MAX_JUNK = 16


class SplitStage:
    def __init__(
        self,
        syntax: ModelFormat,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        shaped: bool = False,
        is_trial: bool = False,
    ) -> None:
        self.syntax = syntax
        self._shaped = shaped
        """Whether the answer is constrained: once it has begun, markers in it are text."""
        self._is_trial = is_trial
        """Whether this instance only classifies a text. It then runs no further trials."""
        self.tools = {tool.name: tool for tool in tools}
        self.buffer = TextBuffer()
        self.writer = EventWriter(self.buffer, self.tools, parallel)
        self._idle = False
        """Whether the reader waits in plain text with nothing held: text without a possible marker can pass."""
        self._reader: Parser[None] | None = None
        opens = [section.open for section in syntax.calls if section.open] if tools else []
        self._closers = markers(*(tags.close for tags in syntax.thoughts))
        self._openers = frozenset(tags.open for tags in syntax.thoughts)
        self.openings = frozenset(opens)
        self._tags = markers(*self._closers.all, *self._openers)
        self._depth = 0
        """Openers nested inside the current reasoning."""
        self._inside = markers(*self._closers.all, *self._openers, *opens)
        self._outside = markers(*self._openers, *opens, *syntax.frame_markers)

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        out: list[Event] = []
        for event in events:
            if type(event) is TextDelta:
                self._feed(event, out)
            elif isinstance(event, Started):
                self._reader = self._read_reply(event.thinking)
                out.append(event)
            elif isinstance(event, Finished):
                self._finish(event, out)
            else:
                out.append(event)
            if out and type(out[-1]) is Finished:
                break
        return out

    def _feed(self, event: TextDelta, out: list[Event]) -> None:
        if self._idle and not self._outside.first.search(event.text) and not event.text[-1:].isspace():
            self.buffer.mark_taken(event.text)
            self.writer.track_text(event.text)
            out.append(event)
            return
        self.writer.add_tokens(event)
        self.buffer.feed(event.text)
        if self._advance(out):
            self.writer.flush_tokens(out)
            out.append(Finished("tool_calls", warnings=tuple(self.writer.warnings)))

    def _advance(self, out: list[Event]) -> bool:
        """Read as far as possible. Return whether the reply is done."""
        if self._reader is None:
            self._reader = self._read_reply(False)
        is_done = False
        try:
            next(self._reader)
            while self.buffer.refill():
                next(self._reader)
        except StopIteration:
            pass
        except SingleCallDone:
            is_done = True
        self.writer.flush(out)
        return is_done

    def _finish(self, event: Finished, out: list[Event]) -> None:
        self.buffer.end(cut=event.reason == "length")
        self._advance(out)
        self.writer.flush_tokens(out)
        reason = "tool_calls" if event.reason == "stop" and self.writer.calls else event.reason
        warnings = (*event.warnings, *self.writer.warnings)
        out.append(Finished(reason, event.stop, event.usage, warnings))

    def _read_reply(self, thinking: bool) -> Parser[None]:
        if self.syntax.channels is not None:
            yield from read_channels(self, self.syntax.channels, thinking)
            return
        if thinking and self.syntax.thoughts:
            yield from self._read_thought()
        yield from self._read_beginning()
        while True:
            match = yield from self._read_until_marker()
            if not match.marker:
                return
            if self._shaped and self._shape_begun:
                self.writer.text(match.text)
            elif match.marker in self._openers:
                yield from self._read_opener(match)
            elif match.marker not in self.openings:
                yield from self.buffer.skip_space()
            elif self._in_code(match) or (yield from self._is_quoted(match)):
                self.writer.text(match.text)
            else:
                yield from self.section(match, self.writer.text)

    @property
    def _shape_begun(self) -> bool:
        """Whether the constrained answer has begun, as opposed to text before a call."""
        return self.writer.has_text if not self.tools else self.writer.first_char in ("{", "[")

    def _read_until_marker(self) -> Parser[MarkerMatch]:
        """Read text up to the next marker and keep `_idle` up to date."""
        buffer = self.buffer
        reading = buffer.read_until(self._outside, self.writer.text)
        while True:
            try:
                next(reading)
            except StopIteration as done:
                self._idle = False
                match: MarkerMatch = done.value
                return match
            self._idle = not buffer.window
            yield
            self._idle = False

    def _read_beginning(self) -> Parser[None]:
        """Read what may only start an answer: its tag, and calls without a marker."""
        bare = [section for section in self.syntax.calls if not section.open] if self.tools else []
        if not bare and self.syntax.answer is None:
            return
        self.buffer.start_recording()
        yield from self.buffer.skip_space()
        space = self.buffer.stop_recording()
        answer = self.syntax.answer
        if answer is not None and (yield from self.buffer.take_literal(answer.open)):
            yield from self.buffer.skip_space()
            # The closing tag is a marker only after the opening one.
            self._outside = markers(*self._outside.all, answer.close)
        elif not bare or not (yield from self._read_bare_calls(bare, space)):
            self.buffer.push_back(space)

    def _read_bare_calls(self, sections: Sequence[CallSection], space: str) -> Parser[bool]:
        """Read calls without a marker. False if there are none; then no text is consumed."""
        for section in sections:
            if (yield from DETECTORS[type(section.call)](self.buffer, section.call, section)):
                yield from self._read_section([section], MarkerMatch("", space), self.writer.text, strict=True)
                return True
        return False

    def _read_opener(self, match: MarkerMatch) -> Parser[None]:
        if self.writer.in_fence or (yield from self._is_quoted(match)):
            self.writer.text(match.text)
        elif self._begins_line(match):
            yield from self._read_thought()
            if not self.writer.has_text:
                yield from self._read_beginning()
        else:
            held: list[str] = []
            closer = yield from self.buffer.read_until(self._closers, held.append)
            if closer.marker:
                self.writer.thought("".join(held))
                yield from self.buffer.skip_space()
            else:
                self.writer.text(match.text + "".join(held))

    def _begins_line(self, match: MarkerMatch) -> bool:
        before = self.buffer.recent[: len(self.buffer.recent) - len(match.text)]
        return not self.writer.has_text or "\n" in match.gap or not before.strip() or before[-1:] == "\n"

    def _in_code(self, match: MarkerMatch) -> bool:
        """Whether the last marker starts inline code between backticks."""
        before = self.buffer.recent[: len(self.buffer.recent) - len(match.marker)].rpartition("\n")[2]
        return before.endswith("`") and not before.endswith("``") and before.count("`") % 2 == 1

    def _is_quoted(self, match: MarkerMatch) -> Parser[bool]:
        """Whether the last marker is between two equal quotes, with an odd number of them before it in its line."""
        before = self.buffer.recent[: len(self.buffer.recent) - len(match.marker)]
        return before[-1:] in QUOTES and is_quoted(before, (yield from self.buffer.peek()))

    def _read_thought(self) -> Parser[None]:
        """Read reasoning from after its opener to after its closer."""
        self._depth = 0
        yield from self.buffer.skip_space()
        self.writer.has_thought = False
        while True:
            match = yield from self.buffer.read_until(self._inside, self.writer.thought)
            if not match.marker:
                return
            quoted = yield from self._is_quoted(match)
            if match.marker in self._openers:
                if not quoted and self.writer.has_thought:
                    self._depth += 1
                if quoted or self.writer.has_thought:
                    self.writer.thought(match.text)
                else:
                    yield from self.buffer.skip_space()
            elif match.marker in self.openings:
                if quoted or self._is_trial:
                    self.writer.thought(match.text)
                elif (yield from self._call_in_thought(match)):
                    return
            elif self._depth or quoted:
                self._depth = max(0, self._depth - (not quoted))
                if (yield from self._is_real_closer(match)):
                    break
            else:
                break
        yield from self.buffer.skip_space()

    def _is_real_closer(self, match: MarkerMatch) -> Parser[bool]:
        """Whether an ambiguous closer ended the reasoning: it did not if another one follows."""
        held: list[str] = []
        closer = yield from self._read_until_closer(held)
        text = "".join(held)
        if closer.marker:
            self.writer.thought(match.text + text)
            self.buffer.push_back(closer.text)
            return False
        self.buffer.push_back(text)
        return True

    def _read_until_closer(self, held: list[str]) -> Parser[MarkerMatch]:
        """Read to the next closer and count openers before it, which it may belong to."""
        while True:
            match = yield from self.buffer.read_until(self._tags, held.append)
            if match.marker not in self._openers:
                return match
            self._depth += not (yield from self._is_quoted(match))
            held.append(match.text)

    def _call_in_thought(self, match: MarkerMatch) -> Parser[bool]:
        """Whether this is a call, which ends the reasoning and is read again. Otherwise it is reasoning."""
        held = [match.marker]
        closer = yield from self._read_until_closer(held)
        text = "".join(held)
        if closer.marker:
            calls = self._only_calls(text) and (yield from self._nothing_follows())
        else:
            calls = self._begins_with_call(text)
        if calls:
            self.buffer.push_back(text)
            return True
        self.writer.thought(match.gap + text)
        if closer.marker:
            self.buffer.push_back(closer.text)
        return False

    def _nothing_follows(self) -> Parser[bool]:
        """Whether only the end or a call follows the reasoning."""
        yield from self.buffer.skip_space()
        if not (yield from self.buffer.peek()):
            return True
        return bool((yield from self.buffer.starts_with(sorted(self.openings))))

    def _trial(self, text: str) -> list[Event]:
        """Return the events of the text outside of reasoning."""
        trial = SplitStage(self.syntax, list(self.tools.values()), is_trial=True)
        return [*trial([Started(), TextDelta(text, count=0), Finished()])][1:]

    def _only_calls(self, text: str) -> bool:
        events = self._trial(text)
        whole = isinstance(events[-1], Finished) and not events[-1].warnings
        return whole and all(self._is_known(event) for event in events[:-1])

    def _begins_with_call(self, text: str) -> bool:
        first, last = (events := self._trial(text))[0], events[-1]
        return isinstance(first, ToolCallStart) and self._is_known(first) and not getattr(last, "warnings", ())

    def _is_known(self, event: Event) -> bool:
        return isinstance(event, ToolCallDelta) or (isinstance(event, ToolCallStart) and event.name in self.tools)

    def section(self, match: MarkerMatch, emit: Emit, strict: bool = False) -> Parser[None]:
        """Read the calls after a marker. Text that is not a call goes to `emit`."""
        sections = [section for section in self.syntax.calls if section.open == match.marker]
        yield from self._read_section(sections, match, emit, strict or match.marker.startswith("```"))

    def _read_section(
        self, sections: Sequence[CallSection], match: MarkerMatch, emit: Emit, strict: bool
    ) -> Parser[None]:
        writer, buffer = self.writer, self.buffer
        before = len(writer.calls)
        writer.strict = strict
        buffer.start_recording()
        try:
            section = yield from self._detect_section(sections)
            while True:
                yield from READERS[type(section.call)](buffer, section.call, section, writer)
                yield from buffer.skip_space()
                if (yield from self._take_section_end(section)) or not buffer.window:
                    break
                if section.separator:
                    yield from buffer.take_literal(section.separator)
                    yield from buffer.skip_space()
                if not section.multiple or not (
                    yield from DETECTORS[type(section.call)](buffer, section.call, section)
                ):
                    break
        except MalformedCall:
            writer.started = False
            emit((match.text if len(writer.calls) == before else "") + buffer.stop_recording())
            if not strict or (len(writer.calls) > before and not buffer.cut):
                writer.warn("a malformed tool call was left as text")
            return
        buffer.stop_recording()
        yield from buffer.skip_space()

    def _take_section_end(self, section: CallSection) -> Parser[bool]:
        """Consume the end of a section, including surplus brackets that small models write before it."""
        if not section.close:
            return False
        junk = ""
        while (yield from self.buffer.peek()) and self.buffer.window[0] in "}] \n" and len(junk) < MAX_JUNK:
            junk += self.buffer.take(1)
        if (yield from self.buffer.take_literal(section.close)):
            return True
        self.buffer.push_back(junk)
        return False

    def _detect_section(self, sections: Sequence[CallSection]) -> Parser[CallSection]:
        """Return the kind of section that has begun."""
        yield from self.buffer.skip_space()
        for section in sections:
            if (yield from DETECTORS[type(section.call)](self.buffer, section.call, section)):
                return section
        raise MalformedCall


QUOTES = ("`", '"', "'")


def is_quoted(before: str, after: str) -> bool:
    """Whether the text between the two is quoted: the same quote on both sides, opened in the same line."""
    quote = before[-1:]
    if quote not in QUOTES or after[:1] != quote:
        return False
    if quote == "'":
        return not before[-2:-1].isalnum()
    return before.rpartition("\n")[2].count(quote) % 2 == 1


def starts_inside_reasoning(syntax: ModelFormat, text: str) -> bool:
    """Whether a reply closes reasoning that it did not open, so that the prompt must have opened it."""
    if not syntax.thoughts:
        return False
    closers = {tags.close for tags in syntax.thoughts}
    known = markers(*closers, *(tags.open for tags in syntax.thoughts))
    at = 0
    while (match := known.search(text, at)) is not None:
        at = match.end()
        if not is_quoted(text[: match.start()][-RECENT_LENGTH:], text[at : at + 1]):
            return match[0] in closers
    return False

"""What a model writes, split into text, thoughts and tool calls: the framing of every format.

    reply   := thought? (text | thought | section)*

Rules
1. However the text is cut, the joined events are the same. Only what may still become a marker is held back.
2. White space next to a marker belongs to it; all other text is somebody's: nothing is lost.
3. A call that cannot be read is text, with a warning. Calls count only where tools were offered.
4. In a thought a marker may be meant or only talked about. One that stands in quotes, or closes a thought that was
   opened inside the thought, is in doubt; so is a call. Then what follows is held until it is clear: where a closer
   comes, everything before it was thought; where the reply ends, the doubtful marker did end the thought. Calls that
   end a thought, with nothing but another call or the end behind them, are calls.
5. Outside of a thought an opener counts at the beginning of a line, but not inside a code fence. Elsewhere it is in
   doubt, and text if no closer comes. Once an answer of a guaranteed shape has begun, no marker in it counts.
6. Tokens are counted with the text they begin in, those of a marker with what follows it.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event, Finished, Started, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Tool
from dragoman.formats.syntax import Calls, ModelFormat
from dragoman.pipeline.channels import read_channels
from dragoman.pipeline.event_writer import EnoughError, Writer
from dragoman.pipeline.text_buffer import REMEMBERED, Found, Reading, Source, markers
from dragoman.pipeline.tool_calls import BEGINS, READERS, Malformed

Emit = Callable[[str], None]
MOST_JUNK = 16


class Split:
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
        """Whether the answer has a shape that is guaranteed: once it has begun, no marker in it means anything."""
        self._is_trial = is_trial
        """Whether it is only to be seen what a text would be; then no further trials are made."""
        self.tools = {tool.name: tool for tool in tools}
        self.source = Source()
        self.writer = Writer(self.source, self.tools, parallel)
        self._idle = False
        """Whether the reader waits in plain text with nothing held: text without the beginning of a marker passes."""
        self._reader: Reading[None] | None = None
        opens = [section.open for section in syntax.calls if section.open] if tools else []
        self._closers = markers(*(tags.close for tags in syntax.thoughts))
        self._openers = frozenset(tags.open for tags in syntax.thoughts)
        self.openings = frozenset(opens)
        self._tags = markers(*self._closers.all, *self._openers)
        self._depth = 0
        """Thoughts that were opened inside the thought at hand."""
        self._inside = markers(*self._closers.all, *self._openers, *opens)
        self._outside = markers(*self._openers, *opens, *syntax.silent)

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        out: list[Event] = []
        for event in events:
            if type(event) is TextDelta:
                self._feed(event, out)
            elif isinstance(event, Started):
                self._reader = self._reply(event.thinking)
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
            self.source.passed(event.text)
            self.writer.passed(event.text)
            out.append(event)
            return
        self.writer.arrived(event)
        self.source.feed(event.text)
        if self._advance(out):
            self.writer.rest(out)
            out.append(Finished("tool_calls", warnings=tuple(self.writer.warnings)))

    def _advance(self, out: list[Event]) -> bool:
        """Read as far as the text goes; whether nothing more is wanted."""
        if self._reader is None:
            self._reader = self._reply(False)
        enough = False
        try:
            next(self._reader)
            while self.source.refill():
                next(self._reader)
        except StopIteration:
            pass
        except EnoughError:
            enough = True
        self.writer.flush(out)
        return enough

    def _finish(self, event: Finished, out: list[Event]) -> None:
        self.source.end(cut=event.reason == "length")
        self._advance(out)
        self.writer.rest(out)
        reason = "tool_calls" if event.reason == "stop" and self.writer.calls else event.reason
        warnings = (*event.warnings, *self.writer.warnings)
        out.append(Finished(reason, event.stop, event.usage, warnings))

    # Reading.

    def _reply(self, thinking: bool) -> Reading[None]:
        if self.syntax.channels is not None:
            yield from read_channels(self, self.syntax.channels, thinking)
            return
        if thinking and self.syntax.thoughts:
            yield from self._thought()
        yield from self._beginning()
        while True:
            found = yield from self._until_marker()
            if not found.marker:
                return
            if self._shaped and self._shape_begun:
                self.writer.text(found.text)
            elif found.marker in self._openers:
                yield from self._opener(found)
            elif found.marker not in self.openings:
                yield from self.source.space()
            elif self._in_code(found) or (yield from self._is_quoted(found)):
                self.writer.text(found.text)
            else:
                yield from self.section(found, self.writer.text)

    @property
    def _shape_begun(self) -> bool:
        """Whether what is said is the answer that has a shape, and not words before a call."""
        return self.writer.said if not self.tools else self.writer.first in ("{", "[")

    def _until_marker(self) -> Reading[Found]:
        """Text up to the next marker; between two pieces it may be that nothing is held."""
        source = self.source
        reading = source.until(self._outside, self.writer.text)
        while True:
            try:
                next(reading)
            except StopIteration as done:
                self._idle = False
                found: Found = done.value
                return found
            self._idle = not source.window
            yield
            self._idle = False

    def _beginning(self) -> Reading[None]:
        """What may stand at the beginning of an answer only: its tag, and calls without one."""
        bare = [section for section in self.syntax.calls if not section.open] if self.tools else []
        if not bare and self.syntax.answer is None:
            return
        self.source.record()
        yield from self.source.space()
        space = self.source.recorded()
        answer = self.syntax.answer
        if answer is not None and (yield from self.source.literal(answer.open)):
            yield from self.source.space()
            # From here on, and only then, the tag that closes the answer is a marker.
            self._outside = markers(*self._outside.all, answer.close)
        elif not bare or not (yield from self._bare(bare, space)):
            self.source.put_back(space)

    def _bare(self, sections: Sequence[Calls], space: str) -> Reading[bool]:
        """Calls that nothing announces; False where there are none, and nothing has been taken."""
        for section in sections:
            if (yield from BEGINS[type(section.call)](self.source, section.call, section)):
                yield from self._read_section([section], Found("", space), self.writer.text, strict=True)
                return True
        return False

    def _opener(self, found: Found) -> Reading[None]:
        if self.writer.in_fence or (yield from self._is_quoted(found)):
            self.writer.text(found.text)
        elif self._begins_line(found):
            yield from self._thought()
            if not self.writer.said:
                yield from self._beginning()
        else:
            held: list[str] = []
            closer = yield from self.source.until(self._closers, held.append)
            if closer.marker:
                self.writer.thought("".join(held))
                yield from self.source.space()
            else:
                self.writer.text(found.text + "".join(held))

    def _begins_line(self, found: Found) -> bool:
        before = self.source.recent[: len(self.source.recent) - len(found.text)]
        return not self.writer.said or "\n" in found.gap or not before.strip() or before[-1:] == "\n"

    def _in_code(self, found: Found) -> bool:
        """Whether the marker just taken begins a piece of code between backticks."""
        before = self.source.recent[: len(self.source.recent) - len(found.marker)].rpartition("\n")[2]
        return before.endswith("`") and not before.endswith("``") and before.count("`") % 2 == 1

    def _is_quoted(self, found: Found) -> Reading[bool]:
        """Whether the marker just taken stands between two quotes of a kind, with an odd one before it in its line."""
        before = self.source.recent[: len(self.source.recent) - len(found.marker)]
        return before[-1:] in QUOTES and is_quoted(before, (yield from self.source.next()))

    # Thoughts.

    def _thought(self) -> Reading[None]:
        """A thought from behind its opener to behind its closer."""
        self._depth = 0
        yield from self.source.space()
        self.writer.thought_of = False
        while True:
            found = yield from self.source.until(self._inside, self.writer.thought)
            if not found.marker:
                return
            quoted = yield from self._is_quoted(found)
            if found.marker in self._openers:
                if not quoted and self.writer.thought_of:
                    self._depth += 1
                if quoted or self.writer.thought_of:
                    self.writer.thought(found.text)
                else:
                    yield from self.source.space()
            elif found.marker in self.openings:
                if quoted or self._is_trial:
                    self.writer.thought(found.text)
                elif (yield from self._call_in_thought(found)):
                    return
            elif self._depth or quoted:
                self._depth = max(0, self._depth - (not quoted))
                if (yield from self._did_close(found)):
                    break
            else:
                break
        yield from self.source.space()

    def _did_close(self, found: Found) -> Reading[bool]:
        """Whether a closer that is in doubt was one: it was not if another one follows."""
        held: list[str] = []
        closer = yield from self._until_closer(held)
        text = "".join(held)
        if closer.marker:
            self.writer.thought(found.text + text)
            self.source.put_back(closer.text)
            return False
        self.source.put_back(text)
        return True

    def _until_closer(self, held: list[str]) -> Reading[Found]:
        """The next closer; thoughts that begin before it are counted, for it may be theirs."""
        while True:
            found = yield from self.source.until(self._tags, held.append)
            if found.marker not in self._openers:
                return found
            self._depth += not (yield from self._is_quoted(found))
            held.append(found.text)

    def _call_in_thought(self, found: Found) -> Reading[bool]:
        """Whether what begins here is a call, which ends the thought and is read again; if not it was thought."""
        held = [found.marker]
        closer = yield from self._until_closer(held)
        text = "".join(held)
        if closer.marker:
            calls = self._only_calls(text) and (yield from self._nothing_follows())
        else:
            calls = self._begins_with_call(text)
        if calls:
            self.source.put_back(text)
            return True
        self.writer.thought(found.gap + text)
        if closer.marker:
            self.source.put_back(closer.text)
        return False

    def _nothing_follows(self) -> Reading[bool]:
        """Whether behind the thought there is only the end, or a call."""
        yield from self.source.space()
        if not (yield from self.source.next()):
            return True
        return bool((yield from self.source.begins(sorted(self.openings))))

    def _trial(self, text: str) -> list[Event]:
        """What the text would be outside of a thought."""
        trial = Split(self.syntax, list(self.tools.values()), is_trial=True)
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

    # Calls.

    def section(self, found: Found, emit: Emit, strict: bool = False) -> Reading[None]:
        """The calls behind a marker. What turns out not to be calls is handed to `emit`."""
        sections = [section for section in self.syntax.calls if section.open == found.marker]
        yield from self._read_section(sections, found, emit, strict or found.marker.startswith("```"))

    def _read_section(self, sections: Sequence[Calls], found: Found, emit: Emit, strict: bool) -> Reading[None]:
        writer, source = self.writer, self.source
        before = len(writer.calls)
        writer.strict = strict
        source.record()
        try:
            section = yield from self._which(sections)
            while True:
                yield from READERS[type(section.call)](source, section.call, section, writer)
                yield from source.space()
                if (yield from self._closes(section)) or not source.window:
                    break
                if section.between:
                    yield from source.literal(section.between)
                    yield from source.space()
                if not section.several or not (yield from BEGINS[type(section.call)](source, section.call, section)):
                    break
        except Malformed:
            writer.started = False
            emit((found.text if len(writer.calls) == before else "") + source.recorded())
            if not strict or (len(writer.calls) > before and not source.cut):
                writer.warn("what looked like a tool call could not be read and was left as text")
            return
        source.recorded()
        yield from source.space()

    def _closes(self, section: Calls) -> Reading[bool]:
        """Take the end of a section, with the brackets too many that small models put before it."""
        if not section.close:
            return False
        junk = ""
        while (yield from self.source.next()) and self.source.window[0] in "}] \n" and len(junk) < MOST_JUNK:
            junk += self.source.take(1)
        if (yield from self.source.literal(section.close)):
            return True
        self.source.put_back(junk)
        return False

    def _which(self, sections: Sequence[Calls]) -> Reading[Calls]:
        """The kind of section that has begun."""
        yield from self.source.space()
        for section in sections:
            if (yield from BEGINS[type(section.call)](self.source, section.call, section)):
                return section
        raise Malformed


QUOTES = ("`", '"', "'")


def is_quoted(before: str, after: str) -> bool:
    """Whether what stands between the two texts is in quotes: the same on both sides, opened in the same line."""
    quote = before[-1:]
    if quote not in QUOTES or after[:1] != quote:
        return False
    if quote == "'":
        return not before[-2:-1].isalnum()
    return before.rpartition("\n")[2].count(quote) % 2 == 1


def begins_in_thought(syntax: ModelFormat, text: str) -> bool:
    """Whether a whole reply closes a thought that it never opened, so that the prompt must have."""
    if not syntax.thoughts:
        return False
    closers = {tags.close for tags in syntax.thoughts}
    known = markers(*closers, *(tags.open for tags in syntax.thoughts))
    at = 0
    while (found := known.search(text, at)) is not None:
        at = found.end()
        if not is_quoted(text[: found.start()][-REMEMBERED:], text[at : at + 1]):
            return found[0] in closers
    return False

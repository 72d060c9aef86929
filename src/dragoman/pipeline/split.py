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
7. If the reply continues a text, the two are read together, and the events are those of the reply. A call may begin in
   that text, but its name must not.
"""

from collections.abc import Sequence

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.events import Event, Finished, Started, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import Tool
from dragoman.formats.syntax import ModelFormat
from dragoman.pipeline.call_sections import SectionReader
from dragoman.pipeline.channels import read_channels
from dragoman.pipeline.event_writer import EventWriter, SingleCallDone
from dragoman.pipeline.text_buffer import RECENT_LENGTH, MarkerMatch, Parser, TextBuffer, markers

QUOTES = ("`", '"', "'")


class SplitStage:
    def __init__(
        self,
        syntax: ModelFormat,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        shaped: bool = False,
        is_trial: bool = False,
        prefill: tuple[str, str] = ("", ""),
    ) -> None:
        """`prefill` is the text that the reply continues, and its path in the request."""
        self._syntax = syntax
        self._prefill, self._prefill_path = prefill
        self._shaped = shaped
        """Whether the answer is constrained: once it has begun, markers in it are text."""
        self._is_trial = is_trial
        """Whether this instance only classifies a text. It then runs no further trials."""
        self._tools = {tool.name: tool for tool in tools}
        self._buffer = TextBuffer()
        self._writer = EventWriter(self._buffer, self._tools, parallel)
        self._sections = SectionReader(syntax, self._tools, self._buffer, self._writer)
        self._is_idle = False
        """Whether the reader waits in plain text with nothing held: text without a possible marker can pass."""
        self._reader: Parser[None] | None = None
        self._depth = 0
        """Openers nested inside the current reasoning."""
        closers = [tags.close for tags in syntax.thoughts]
        self._openers = frozenset(tags.open for tags in syntax.thoughts)
        self._closers = markers(*closers)
        self._tags = markers(*closers, *self._openers)
        self._inside = markers(*closers, *self._openers, *self._sections.openers)
        self._outside = markers(*self._openers, *self._sections.openers, *syntax.frame_markers)

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        out: list[Event] = []
        for event in events:
            if type(event) is TextDelta:
                self._feed(event, out)
            elif isinstance(event, Started):
                self._reader = self._read_reply(event.thinking)
                out.append(event)
                self._read_prefill()
            elif isinstance(event, Finished):
                self._finish(event, out)
            else:
                out.append(event)
            if out and type(out[-1]) is Finished:
                break
        return out

    def _read_prefill(self) -> None:
        if not self._prefill:
            return
        self._writer.hidden = len(self._prefill)
        self._buffer.feed(self._prefill)
        self._advance([])
        if self._writer.calls:
            path = self._prefill_path
            raise BadRequest(f"{path}: the text contains a tool call, so it cannot be continued", param=path)

    def _feed(self, event: TextDelta, out: list[Event]) -> None:
        if self._is_idle and not self._outside.first.search(event.text) and not event.text[-1:].isspace():
            self._buffer.mark_taken(event.text)
            self._writer.track_text(event.text)
            out.append(event)
            return
        self._writer.add_tokens(event)
        self._buffer.feed(event.text)
        if self._advance(out):
            self._writer.flush_tokens(out)
            out.append(Finished("tool_calls", warnings=tuple(self._writer.warnings)))

    def _advance(self, out: list[Event]) -> bool:
        """Read as far as possible. Return whether the reply is done."""
        if self._reader is None:
            self._reader = self._read_reply(False)
        is_done = False
        try:
            next(self._reader)
            while self._buffer.refill():
                next(self._reader)
        except StopIteration:
            pass
        except SingleCallDone:
            is_done = True
        self._writer.flush(out)
        # Text may not overtake a token that waits for the next event.
        self._is_idle = self._is_idle and not self._writer.has_tokens
        return is_done

    def _finish(self, event: Finished, out: list[Event]) -> None:
        self._buffer.end(cut=event.reason == "length")
        self._advance(out)
        self._writer.flush_tokens(out)
        if event.reason == "stop" and self._writer.calls:
            event = msgspec.structs.replace(event, reason="tool_calls", unknown_reason=None)
        out.append(msgspec.structs.replace(event, warnings=(*event.warnings, *self._writer.warnings)))

    def _read_reply(self, thinking: bool) -> Parser[None]:
        if self._syntax.channels is not None:
            yield from read_channels(self._sections, self._syntax.channels, thinking)
            return
        if thinking and self._syntax.thoughts:
            yield from self._read_thought()
        yield from self._read_beginning()
        while True:
            match = yield from self._read_until_marker()
            if not match.marker:
                return
            if self._shaped and self._shape_begun:
                self._writer.write_text(match.text)
            elif match.marker in self._openers:
                yield from self._read_opener(match)
            elif match.marker not in self._sections.openers:
                yield from self._buffer.skip_space()
            elif self._in_code(match) or (yield from self._is_quoted(match)):
                self._writer.write_text(match.text)
            else:
                yield from self._sections.read(match, self._writer.write_text)

    @property
    def _shape_begun(self) -> bool:
        """Whether the constrained answer has begun, as opposed to text before a call."""
        return self._writer.has_text if not self._tools else self._writer.first_char in ("{", "[")

    def _read_until_marker(self) -> Parser[MarkerMatch]:
        """Read text up to the next marker and keep `_is_idle` up to date."""
        buffer = self._buffer
        reading = buffer.read_until(self._outside, self._writer.write_text)
        while True:
            try:
                next(reading)
            except StopIteration as done:
                self._is_idle = False
                match: MarkerMatch = done.value
                return match
            self._is_idle = not buffer.window
            yield
            self._is_idle = False

    def _read_beginning(self) -> Parser[None]:
        """Read what may only start an answer: its tag, and calls without a marker."""
        answer = self._syntax.answer
        if not self._sections.bare and answer is None:
            return
        self._buffer.start_recording()
        yield from self._buffer.skip_space()
        space = self._buffer.stop_recording()
        if answer is not None and (yield from self._buffer.take_literal(answer.open)):
            yield from self._buffer.skip_space()
            # The closing tag is a marker only after the opening one.
            self._outside = markers(*self._outside.all, answer.close)
        elif not (yield from self._sections.read_bare(space)):
            self._buffer.push_back(space)

    def _read_opener(self, match: MarkerMatch) -> Parser[None]:
        if self._writer.is_in_fence or (yield from self._is_quoted(match)):
            self._writer.write_text(match.text)
        elif self._begins_line(match):
            yield from self._read_thought()
            if not self._writer.has_text:
                yield from self._read_beginning()
        else:
            held: list[str] = []
            closer = yield from self._buffer.read_until(self._closers, held.append)
            if closer.marker:
                self._writer.begin_thought()
                self._writer.write_thought("".join(held), consumed_after=len(closer.text))
                yield from self._buffer.skip_space()
            else:
                self._writer.write_text(match.text + "".join(held))

    def _begins_line(self, match: MarkerMatch) -> bool:
        before = self._buffer.recent[: len(self._buffer.recent) - len(match.text)]
        return not self._writer.has_text or "\n" in match.gap or not before.strip() or before[-1:] == "\n"

    def _in_code(self, match: MarkerMatch) -> bool:
        """Whether the last marker starts inline code between backticks."""
        before = self._buffer.recent[: len(self._buffer.recent) - len(match.marker)].rpartition("\n")[2]
        return before.endswith("`") and not before.endswith("``") and before.count("`") % 2 == 1

    def _is_quoted(self, match: MarkerMatch) -> Parser[bool]:
        """Whether the last marker is between two equal quotes, with an odd number of them before it in its line."""
        before = self._buffer.recent[: len(self._buffer.recent) - len(match.marker)]
        return before[-1:] in QUOTES and is_quoted(before, (yield from self._buffer.peek()))

    def _read_thought(self) -> Parser[None]:
        """Read reasoning from after its opener to after its closer."""
        self._depth = 0
        yield from self._buffer.skip_space()
        self._writer.begin_thought()
        while True:
            match = yield from self._buffer.read_until(self._inside, self._writer.write_thought)
            if not match.marker:
                return
            quoted = yield from self._is_quoted(match)
            if match.marker in self._openers:
                if not quoted and self._writer.has_thought:
                    self._depth += 1
                if quoted or self._writer.has_thought:
                    self._writer.write_thought(match.text)
                else:
                    yield from self._buffer.skip_space()
            elif match.marker in self._sections.openers:
                if quoted or self._is_trial:
                    self._writer.write_thought(match.text)
                elif (yield from self._call_in_thought(match)):
                    return
            elif self._depth or quoted:
                self._depth = max(0, self._depth - (not quoted))
                if (yield from self._is_real_closer(match)):
                    break
            else:
                break
        yield from self._buffer.skip_space()

    def _is_real_closer(self, match: MarkerMatch) -> Parser[bool]:
        """Whether an ambiguous closer ended the reasoning: it did not if another one follows."""
        held: list[str] = []
        closer = yield from self._read_until_closer(held)
        text = "".join(held)
        if closer.marker:
            self._buffer.push_back(closer.text)
            self._writer.write_thought(match.text + text)
            return False
        self._buffer.push_back(text)
        return True

    def _read_until_closer(self, held: list[str]) -> Parser[MarkerMatch]:
        """Read to the next closer and count openers before it, which it may belong to."""
        while True:
            match = yield from self._buffer.read_until(self._tags, held.append)
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
            is_call = self._begins_with_call(text, only=True) and (yield from self._nothing_follows())
        else:
            is_call = self._begins_with_call(text, only=False)
        if is_call:
            self._buffer.push_back(text)
            return True
        if closer.marker:
            self._buffer.push_back(closer.text)
        self._writer.write_thought(match.gap + text)
        return False

    def _nothing_follows(self) -> Parser[bool]:
        """Whether only the end or a call follows the reasoning."""
        yield from self._buffer.skip_space()
        if not (yield from self._buffer.peek()):
            return True
        return bool((yield from self._buffer.starts_with(sorted(self._sections.openers))))

    def _begins_with_call(self, text: str, *, only: bool) -> bool:
        """Whether the text, outside of reasoning, begins with a call of an offered tool, or contains `only` such
        calls."""
        trial = SplitStage(self._syntax, list(self._tools.values()), is_trial=True)
        _, *events, last = trial([Started(), TextDelta(text, count=0), Finished()])
        if isinstance(last, Finished) and last.warnings:
            return False
        return all(map(self._is_known_call, events)) if only else bool(events) and self._is_known_call(events[0])

    def _is_known_call(self, event: Event) -> bool:
        return isinstance(event, ToolCallDelta) or (isinstance(event, ToolCallStart) and event.name in self._tools)


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
    while (match := known.pattern.search(text, at)) is not None:
        at = match.end()
        if not is_quoted(text[: match.start()][-RECENT_LENGTH:], text[at : at + 1]):
            return match[0] in closers
    return False

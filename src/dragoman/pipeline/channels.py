"""Reads replies in which headers announce the kind of text: the channels of harmony, Gemma and others.

    reply  := text? (open NAME text end?)*                                     channels with a name only
    reply  := header? ((start | open) header message text end)*                channels with headers
    header := words, including the channel's name and possibly a recipient

Rules
1. The text of a hidden channel is reasoning. A message to a tool is a call. Everything else is the answer.
2. A marker without a name is text. So are the words of a header without a message.
3. In a hidden channel, only a call of an offered tool counts as a call.
"""

import re

from dragoman.formats.syntax import CallSection, Channels, JsonCall
from dragoman.pipeline.call_readers import json_calls
from dragoman.pipeline.call_sections import SectionReader
from dragoman.pipeline.text_buffer import Emit, MarkerMatch, Parser, markers

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s*(?:to=\S*\s*)?(?:<\|channel\|>\s*\w*)?")
IMPLIED = ("to=functions.", "assistant<|", "assistant to=")
"""Beginnings of a reply that continues a header from the prompt."""


def read_channels(sections: SectionReader, channels: Channels, thinking: bool) -> Parser[None]:
    buffer, writer = sections.buffer, sections.writer
    known = markers(
        *(channels.open, channels.start, channels.message, *channels.ends),
        *sections.syntax.frame_markers,
        *sections.openers,
    )
    emit: Emit = writer.write_thought if thinking else writer.write_text
    if thinking:
        yield from buffer.skip_space()
    elif channels.message:
        emit = yield from _read_implied_header(sections, channels)
    while True:
        match = yield from buffer.read_until(known, emit)
        if not match.marker:
            return
        if match.marker in sections.openers:
            yield from sections.read(match, emit, strict=emit == writer.write_thought)
        elif match.marker in channels.ends:
            emit = writer.write_text
            yield from buffer.skip_space()
        elif match.marker in (channels.open, channels.start):
            header = _read_header if channels.message else _read_channel_name
            emit = yield from header(sections, channels, match, emit)


def _read_implied_header(sections: SectionReader, channels: Channels) -> Parser[Emit]:
    """Read the rest of a header that the prompt has begun."""
    buffer, writer = sections.buffer, sections.writer
    buffer.start_recording()
    yield from buffer.skip_space()
    has_header = yield from buffer.starts_with(IMPLIED)
    if not has_header:
        buffer.push_back(buffer.stop_recording())
        return writer.write_text
    buffer.stop_recording()
    return (yield from _read_header(sections, channels, MarkerMatch(channels.start), writer.write_text))


def _read_channel_name(sections: SectionReader, channels: Channels, match: MarkerMatch, emit: Emit) -> Parser[Emit]:
    """Switch to a channel by name."""
    buffer = sections.buffer
    spaces = ""
    while (yield from buffer.peek()) == " ":
        spaces += buffer.take(1)
    name = ""
    while (yield from buffer.peek()) and (run := _NAME.match(buffer.window)):
        name += buffer.take(run.end())
    if not name:
        emit(match.text + spaces)
        return emit
    yield from buffer.skip_space()
    return _switch(sections, name.lower() in channels.hidden)


def _switch(sections: SectionReader, is_hidden: bool) -> Emit:
    """Return where the text of a new channel goes."""
    sections.writer.begin_thought()
    return sections.writer.write_thought if is_hidden else sections.writer.write_text


def _read_header(sections: SectionReader, channels: Channels, match: MarkerMatch, emit: Emit) -> Parser[Emit]:
    """Read a header and return where its text goes. The arguments of a call are read at once."""
    words: list[str] = []
    end = yield from sections.buffer.read_until(markers(channels.message, *channels.ends), words.append)
    header = match.marker + "".join(words)
    if end.marker != channels.message:
        # Without a message, everything except the role and the channel's name is text.
        consumed_after = len(header) - len(header.rstrip()) + len(end.text)
        sections.writer.write_text(_HEADER.sub("", header).strip(), consumed_after)
        return sections.writer.write_text
    name = re.search(re.escape(channels.open) + r"\s*(\w+)", header)
    tool = re.search(re.escape(channels.recipient) + r"([\w.:/-]+)", header) if channels.recipient else None
    is_hidden = name is not None and name[1].lower() in channels.hidden
    emit = _switch(sections, is_hidden)
    yield from sections.buffer.skip_space()
    if tool is not None and sections.tools and (not is_hidden or tool[1] in sections.tools):
        yield from _read_call(sections, channels, tool[1], emit)
    return emit


def _read_call(sections: SectionReader, channels: Channels, name: str, emit: Emit) -> Parser[None]:
    buffer, writer = sections.buffer, sections.writer
    if (yield from buffer.peek()) != "{":
        writer.warn("a malformed tool call was left as text")
        return
    writer.strict = False
    writer.start_call(name)
    yield from json_calls.read_arguments(buffer, CallSection(JsonCall(), close=channels.call_end), writer)
    writer.end_call()
    yield from buffer.skip_space()

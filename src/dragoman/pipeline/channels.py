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
from collections.abc import Callable
from typing import Protocol

from dragoman.core.request import Tool
from dragoman.formats.syntax import CallSection, Channels, JsonCall, ModelFormat
from dragoman.pipeline.call_readers import json_calls
from dragoman.pipeline.event_writer import EventWriter
from dragoman.pipeline.text_buffer import MarkerMatch, Parser, TextBuffer, markers

Emit = Callable[[str], None]


class ChannelContext(Protocol):
    """The part of `split.SplitStage` that this module uses."""

    syntax: ModelFormat
    buffer: TextBuffer
    writer: EventWriter
    tools: dict[str, Tool]
    openings: frozenset[str]

    def section(self, match: MarkerMatch, emit: Emit, *, strict: bool) -> Parser[None]: ...


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s*(?:to=\S*\s*)?(?:<\|channel\|>\s*\w*)?")
IMPLIED = ("to=functions.", "assistant<|", "assistant to=")
"""Beginnings of a reply that continues a header from the prompt."""


def read_channels(split: ChannelContext, channels: Channels, thinking: bool) -> Parser[None]:
    buffer, writer = split.buffer, split.writer
    known = markers(
        *(channels.open, channels.start, channels.message, *channels.ends), *split.syntax.frame_markers, *split.openings
    )
    emit: Emit = writer.thought if thinking else writer.text
    if thinking:
        yield from buffer.skip_space()
    elif channels.message:
        emit = yield from _read_implied_header(split, channels)
    while True:
        match = yield from buffer.read_until(known, emit)
        if not match.marker:
            return
        if match.marker in split.openings:
            yield from split.section(match, emit, strict=emit == writer.thought)
        elif match.marker in channels.ends:
            emit = writer.text
            yield from buffer.skip_space()
        elif match.marker in (channels.open, channels.start):
            header = _read_header if channels.message else _read_channel_name
            emit = yield from header(split, channels, match, emit)


def _read_implied_header(split: ChannelContext, channels: Channels) -> Parser[Emit]:
    """Read the rest of a header that the prompt has begun."""
    buffer, writer = split.buffer, split.writer
    buffer.start_recording()
    yield from buffer.skip_space()
    has_header = yield from buffer.starts_with(IMPLIED)
    if not has_header:
        buffer.push_back(buffer.stop_recording())
        return writer.text
    buffer.stop_recording()
    return (yield from _read_header(split, channels, MarkerMatch(channels.start), writer.text))


def _read_channel_name(split: ChannelContext, channels: Channels, match: MarkerMatch, emit: Emit) -> Parser[Emit]:
    """Switch to a channel by name."""
    buffer = split.buffer
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
    return split.writer.thought if name.lower() in channels.hidden else split.writer.text


def _read_header(split: ChannelContext, channels: Channels, match: MarkerMatch, emit: Emit) -> Parser[Emit]:
    """Read a header and return where its text goes. The arguments of a call are read at once."""
    words: list[str] = []
    end = yield from split.buffer.read_until(markers(channels.message, *channels.ends), words.append)
    header = match.marker + "".join(words)
    if end.marker != channels.message:
        # Without a message, everything except the role and the channel's name is text.
        split.writer.text(_HEADER.sub("", header).strip())
        return split.writer.text
    name = re.search(re.escape(channels.open) + r"\s*(\w+)", header)
    tool = re.search(re.escape(channels.recipient) + r"([\w.:/-]+)", header) if channels.recipient else None
    is_hidden = name is not None and name[1].lower() in channels.hidden
    emit = split.writer.thought if is_hidden else split.writer.text
    yield from split.buffer.skip_space()
    if tool is not None and split.tools and (not is_hidden or tool[1] in split.tools):
        yield from _read_call(split, channels, tool[1], emit)
    return emit


def _read_call(split: ChannelContext, channels: Channels, name: str, emit: Emit) -> Parser[None]:
    buffer, writer = split.buffer, split.writer
    if (yield from buffer.peek()) != "{":
        writer.warn("a malformed tool call was left as text")
        return
    writer.strict = False
    writer.start(name)
    yield from json_calls.read_arguments(buffer, CallSection(JsonCall(), close=channels.call_end), writer)
    writer.end()
    yield from buffer.skip_space()

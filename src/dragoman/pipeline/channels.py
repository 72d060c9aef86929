"""Replies in which a header says what the text behind it is: the channels of harmony, Gemma and others.

    reply  := text? (open NAME text end?)*                                     channels by name alone
    reply  := header? ((start | open) header message text end)*                with headers
    header := words, among them the channel's name and perhaps a recipient

Rules
1. The text of a hidden channel is thought. A message to a tool is a call; everything else is the answer.
2. A marker without a name is text, and so are the words of a header that no message follows.
3. In a hidden channel only a call of a tool that was offered is one.
"""

import re
from collections.abc import Callable
from typing import Protocol

from dragoman.core.request import Tool
from dragoman.formats.syntax import Calls, Channels, JsonCall, ModelFormat
from dragoman.pipeline.event_writer import Writer
from dragoman.pipeline.text_buffer import Found, Reading, Source, markers
from dragoman.pipeline.tool_calls import json

Emit = Callable[[str], None]


class SplitReader(Protocol):
    """What this module uses of `split.Split`."""

    syntax: ModelFormat
    source: Source
    writer: Writer
    tools: dict[str, Tool]
    openings: frozenset[str]

    def section(self, found: Found, emit: Emit, *, strict: bool) -> Reading[None]: ...


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER = re.compile(r"\A(?:<\|start\|>)?(?:assistant)?\s*(?:to=\S*\s*)?(?:<\|channel\|>\s*\w*)?")
IMPLIED = ("to=functions.", "assistant<|", "assistant to=")
"""How the rest of a header begins that the prompt has begun."""


def read_channels(split: SplitReader, channels: Channels, thinking: bool) -> Reading[None]:
    source, writer = split.source, split.writer
    known = markers(
        *(channels.open, channels.start, channels.message, *channels.ends), *split.syntax.silent, *split.openings
    )
    emit: Emit = writer.thought if thinking else writer.text
    if thinking:
        yield from source.space()
    elif channels.message:
        emit = yield from _implied_header(split, channels)
    while True:
        found = yield from source.until(known, emit)
        if not found.marker:
            return
        if found.marker in split.openings:
            yield from split.section(found, emit, strict=emit == writer.thought)
        elif found.marker in channels.ends:
            emit = writer.text
            yield from source.space()
        elif found.marker in (channels.open, channels.start):
            header = _header if channels.message else _named
            emit = yield from header(split, channels, found, emit)


def _implied_header(split: SplitReader, channels: Channels) -> Reading[Emit]:
    """The prompt may have begun a message, so that the reply begins with the rest of its header."""
    source, writer = split.source, split.writer
    source.record()
    yield from source.space()
    begun = yield from source.begins(IMPLIED)
    if not begun:
        source.put_back(source.recorded())
        return writer.text
    source.recorded()
    return (yield from _header(split, channels, Found(channels.start), writer.text))


def _named(split: SplitReader, channels: Channels, found: Found, emit: Emit) -> Reading[Emit]:
    """The channel that a name alone switches to."""
    source = split.source
    spaces = ""
    while (yield from source.next()) == " ":
        spaces += source.take(1)
    name = ""
    while (yield from source.next()) and (run := _NAME.match(source.window)):
        name += source.take(run.end())
    if not name:
        emit(found.text + spaces)
        return emit
    yield from source.space()
    return split.writer.thought if name.lower() in channels.hidden else split.writer.text


def _header(split: SplitReader, channels: Channels, found: Found, emit: Emit) -> Reading[Emit]:
    """What a header announces; the text of a call is read at once."""
    words: list[str] = []
    end = yield from split.source.until(markers(channels.message, *channels.ends), words.append)
    header = found.marker + "".join(words)
    if end.marker != channels.message:
        # There is no message, so whatever is not the role or the name of a channel is somebody's text.
        split.writer.text(_HEADER.sub("", header).strip())
        return split.writer.text
    name = re.search(re.escape(channels.open) + r"\s*(\w+)", header)
    tool = re.search(re.escape(channels.recipient) + r"([\w.:/-]+)", header) if channels.recipient else None
    is_hidden = name is not None and name[1].lower() in channels.hidden
    emit = split.writer.thought if is_hidden else split.writer.text
    yield from split.source.space()
    if tool is not None and split.tools and (not is_hidden or tool[1] in split.tools):
        yield from _call(split, channels, tool[1], emit)
    return emit


def _call(split: SplitReader, channels: Channels, name: str, emit: Emit) -> Reading[None]:
    source, writer = split.source, split.writer
    if (yield from source.next()) != "{":
        writer.warn("what looked like a tool call could not be read and was left as text")
        return
    writer.strict = False
    writer.start(name)
    yield from json.told(source, Calls(JsonCall(), close=channels.call_end), writer)
    writer.end()
    yield from source.space()

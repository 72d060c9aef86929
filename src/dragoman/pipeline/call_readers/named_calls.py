"""Reads calls that start with their name in a template, followed by JSON arguments.

call := begin object? end         begin: one of the templates of the syntax, with the name in it

A code fence that was opened in `begin` is closed before `end`, whichever template was used.
"""

import re
from functools import cache

from dragoman.formats.syntax import FIELD, CallSection, NamedJson
from dragoman.pipeline.call_readers import json_calls
from dragoman.pipeline.call_readers.call_sink import BoundedText, CallSink, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

MAX_HEADER = 1024
FENCE = "```"
_PATTERNS = {"{name}": r"(?P<name>[^\s<>\[\]{}]+?)", "{id}": r"[^\s<>\[\]{}]*", "{index}": r"\d+"}


def begins(buffer: TextBuffer, syntax: NamedJson, section: CallSection) -> Parser[bool]:
    heads = tuple(dict.fromkeys(literal_parts(template)[0] for template in syntax.begins))
    if all(heads):
        return bool((yield from buffer.starts_with(heads)))
    char = yield from buffer.peek()
    return char.isalnum() or char == "_"


def read(buffer: TextBuffer, syntax: NamedJson, section: CallSection, sink: CallSink) -> Parser[None]:
    header: list[str] = []
    end = syntax.end.strip().removeprefix(FENCE)
    stops = markers("{", section.open, section.close, end, gap="none")
    match = yield from buffer.read_until(stops, BoundedText(buffer, header, MAX_HEADER))
    if buffer.cut and not match.marker:
        raise MalformedCall
    sink.start(_name("".join(header) + match.gap, syntax))
    buffer.push_back(match.marker)
    if match.marker == "{":
        yield from json_calls.read_arguments(buffer, section, sink)
    else:
        sink.arguments("{}")
    yield from buffer.skip_space()
    if FENCE in "".join(header) and (yield from buffer.take_literal(FENCE)):
        yield from buffer.skip_space()
    yield from buffer.take_literal(end)
    sink.end()


def _name(header: str, syntax: NamedJson) -> str:
    for template in syntax.begins:
        match = _pattern(template).fullmatch(header)
        if match is not None:
            return match["name"]
    raise MalformedCall


def literal_parts(template: str) -> list[str]:
    """Return the literal texts of a template."""
    return FIELD.split(template)[::2] if template else []


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces = FIELD.split(template)
    pattern = ""
    for literal, field in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        pattern += re.escape(literal) + (_PATTERNS[field] if field else r"\s*")
    return re.compile(r"\s*" + pattern)

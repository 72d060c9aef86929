"""Calls that tell their name first, in a text of their own, and then their arguments as JSON.

call := begin object? end         begin: one of the templates of the syntax, with the name in it

A fence that was begun in `begin` is closed before `end`, whichever of the templates the syntax prefers.
"""

import re
from functools import cache

from dragoman.formats.syntax import FIELD, Calls, NamedJson
from dragoman.pipeline.text_buffer import Markers, Reading, Source, markers
from dragoman.pipeline.tool_calls import json
from dragoman.pipeline.tool_calls.sink import Bounded, Malformed, Sink

MOST_HEADER = 1024
FENCE = "```"
_PATTERNS = {
    "{name}": r"(?P<name>[^\s<>\[\]{}]+?)",
    "{id}": r"[^\s<>\[\]{}]*",
    "{index}": r"\d+",
}


def begins(source: Source, syntax: NamedJson, section: Calls) -> Reading[bool]:
    heads = tuple(dict.fromkeys(parts(template)[0] for template in syntax.begins))
    if all(heads):
        return bool((yield from source.begins(heads)))
    char = yield from source.next()
    return char.isalnum() or char == "_"


def read(source: Source, syntax: NamedJson, section: Calls, sink: Sink) -> Reading[None]:
    header: list[str] = []
    found = yield from source.until(_stops(syntax, section), Bounded(source, header, MOST_HEADER))
    if source.cut and not found.marker:
        raise Malformed
    sink.start(_name("".join(header) + found.gap, syntax))
    source.put_back(found.marker)
    if found.marker == "{":
        yield from json.told(source, section, sink)
    else:
        sink.arguments("{}")
    yield from source.space()
    if FENCE in "".join(header) and (yield from source.literal(FENCE)):
        yield from source.space()
    yield from source.literal(_end(syntax))
    sink.end()


def _name(header: str, syntax: NamedJson) -> str:
    for template in syntax.begins:
        found = _pattern(template).fullmatch(header)
        if found is not None:
            return found["name"]
    raise Malformed


def parts(template: str) -> list[str]:
    """The literal texts of a template."""
    return FIELD.split(template)[::2] if template else []


def _stops(syntax: NamedJson, section: Calls) -> Markers:
    """What ends the header: the arguments, or whatever shows that there are none."""
    return markers("{", section.open, section.close, _end(syntax), gap="none")


def _end(syntax: NamedJson) -> str:
    return syntax.end.strip().removeprefix(FENCE)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces = FIELD.split(template)
    pattern = ""
    for literal, field in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        pattern += re.escape(literal) + (_PATTERNS[field] if field else r"\s*")
    return re.compile(r"\s*" + pattern)

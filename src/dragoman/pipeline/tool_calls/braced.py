"""Calls as Gemma writes them: almost JSON, with strings between marks of their own.

call   := prefix NAME object
object := "{" (KEY ":" value ("," KEY ":" value)*)? "}"
value  := quote text quote | object | "[" value,* "]" | scalar

What cannot be read stays where it is; from there on the arguments are what the model wrote.
"""

import re

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import Braced, Calls
from dragoman.pipeline.text_buffer import Reading, Source, markers
from dragoman.pipeline.tool_calls.json import quoted, raw
from dragoman.pipeline.tool_calls.sink import NAME, Malformed, Sink

MOST_DEPTH = 64
_SCALAR_END = re.compile(r"[,}\]<]")


def begins(source: Source, syntax: Braced, section: Calls) -> Reading[bool]:
    return bool((yield from source.begins((syntax.prefix,))))


def read(source: Source, syntax: Braced, section: Calls, sink: Sink) -> Reading[None]:
    if not (yield from source.literal(syntax.prefix)):
        raise Malformed
    name: list[str] = []
    found = yield from source.until(markers("{", section.close, gap="none"), name.append)
    tool = "".join(name).strip()
    if not NAME.fullmatch(tool):
        raise Malformed
    sink.start(tool)
    source.put_back(found.marker)
    if found.marker != "{":
        sink.arguments("{}")
    elif not (yield from _value(source, syntax, section, sink, 0)):
        if not source.cut:
            sink.warn("the arguments of a tool call could not be read to their end")
        yield from raw(source, section, sink)
    sink.end()


def _value(source: Source, syntax: Braced, section: Calls, sink: Sink, depth: int) -> Reading[bool]:
    """Tells a value as JSON; False where the text cannot be read any further."""
    if depth > MOST_DEPTH:
        return False
    yield from source.space()
    if (yield from source.literal(syntax.quote)):
        return (yield from _string(source, syntax, sink))
    char = yield from source.next()
    if char == "{":
        return (yield from _object(source, syntax, section, sink, depth))
    if char == "[":
        return (yield from _array(source, syntax, section, sink, depth))
    return (yield from _scalar(source, sink))


def _string(source: Source, syntax: Braced, sink: Sink) -> Reading[bool]:
    sink.arguments('"')
    found = yield from source.until(markers(syntax.quote, gap="none"), lambda text: sink.arguments(quoted(text)[1:-1]))
    if found.marker:
        sink.arguments('"')
    return bool(found.marker)


def _object(source: Source, syntax: Braced, section: Calls, sink: Sink, depth: int) -> Reading[bool]:
    source.take(1)
    between = "{"
    yield from source.space()
    while not (yield from source.literal("}")):
        key: list[str] = []
        found = yield from source.until(markers(*":,{}[]", section.close, gap="none"), key.append)
        if found.marker != ":":
            sink.arguments(between)
            source.put_back("".join(key) + found.marker)
            return False
        name = "".join(key).replace(syntax.quote, "").strip().strip('"')
        sink.arguments(f"{between}{quoted(name)}: ")
        between = ", "
        if not (yield from _value(source, syntax, section, sink, depth + 1)):
            return False
        yield from _comma(source)
    sink.arguments("{}" if between == "{" else "}")
    return True


def _array(source: Source, syntax: Braced, section: Calls, sink: Sink, depth: int) -> Reading[bool]:
    sink.arguments(source.take(1))
    between = ""
    yield from source.space()
    while not (yield from source.literal("]")):
        sink.arguments(between)
        between = ", "
        if not (yield from _value(source, syntax, section, sink, depth + 1)):
            return False
        yield from _comma(source)
    sink.arguments("]")
    return True


def _scalar(source: Source, sink: Sink) -> Reading[bool]:
    kept: list[str] = []
    while (found := _SCALAR_END.search(source.window)) is None:
        kept.append(source.take(len(source.window)))
        if not (yield from source.next()):
            source.put_back("".join(kept))
            return False
    text = ("".join(kept) + source.take(found.start())).strip()
    if not text:
        return False
    try:
        msgspec.json.decode(text)
    except DECODE_ERRORS:
        text = quoted(text.strip('"'))
    sink.arguments(text)
    return True


def _comma(source: Source) -> Reading[None]:
    yield from source.space()
    yield from source.literal(",")
    yield from source.space()

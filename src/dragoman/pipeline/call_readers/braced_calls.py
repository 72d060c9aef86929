"""Reads calls as Gemma writes them: similar to JSON, with special quotes around strings.

call   := prefix NAME object
object := "{" (KEY ":" value ("," KEY ":" value)*)? "}"
value  := quote text quote | object | "[" value,* "]" | scalar

From the first unreadable place on, the arguments are passed on as the model wrote them.
"""

import re

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import Braced, CallSection
from dragoman.pipeline.call_readers.call_sink import TOOL_NAME, CallSink, MalformedCall, skip_comma
from dragoman.pipeline.call_readers.json_calls import quote_json, read_raw
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

MAX_DEPTH = 64
_SCALAR_END = re.compile(r"[,}\]<]")


def begins(buffer: TextBuffer, syntax: Braced, section: CallSection) -> Parser[bool]:
    return bool((yield from buffer.starts_with((syntax.prefix,))))


def read(buffer: TextBuffer, syntax: Braced, section: CallSection, sink: CallSink) -> Parser[None]:
    if not (yield from buffer.take_literal(syntax.prefix)):
        raise MalformedCall
    name: list[str] = []
    match = yield from buffer.read_until(markers("{", section.close, gap="none"), name.append)
    tool = "".join(name).strip()
    if not TOOL_NAME.fullmatch(tool):
        raise MalformedCall
    sink.start(tool)
    buffer.push_back(match.marker)
    if match.marker != "{":
        sink.arguments("{}")
    elif not (yield from _value(buffer, syntax, section, sink, 0)):
        if not buffer.cut:
            sink.warn("the arguments of a tool call are malformed")
        yield from read_raw(buffer, section, sink)
    sink.end()


def _value(buffer: TextBuffer, syntax: Braced, section: CallSection, sink: CallSink, depth: int) -> Parser[bool]:
    """Report a value as JSON. False if the text cannot be read further."""
    if depth > MAX_DEPTH:
        return False
    yield from buffer.skip_space()
    if (yield from buffer.take_literal(syntax.quote)):
        return (yield from _string(buffer, syntax, sink))
    char = yield from buffer.peek()
    if char == "{":
        return (yield from _object(buffer, syntax, section, sink, depth))
    if char == "[":
        return (yield from _array(buffer, syntax, section, sink, depth))
    return (yield from _scalar(buffer, sink))


def _string(buffer: TextBuffer, syntax: Braced, sink: CallSink) -> Parser[bool]:
    sink.arguments('"')
    match = yield from buffer.read_until(
        markers(syntax.quote, gap="none"), lambda text: sink.arguments(quote_json(text)[1:-1])
    )
    if match.marker:
        sink.arguments('"')
    return bool(match.marker)


def _object(buffer: TextBuffer, syntax: Braced, section: CallSection, sink: CallSink, depth: int) -> Parser[bool]:
    buffer.take(1)
    between = "{"
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("}")):
        key: list[str] = []
        match = yield from buffer.read_until(markers(*":,{}[]", section.close, gap="none"), key.append)
        if match.marker != ":":
            sink.arguments(between)
            buffer.push_back("".join(key) + match.marker)
            return False
        name = "".join(key).replace(syntax.quote, "").strip().strip('"')
        sink.arguments(f"{between}{quote_json(name)}: ")
        between = ", "
        if not (yield from _value(buffer, syntax, section, sink, depth + 1)):
            return False
        yield from skip_comma(buffer)
    sink.arguments("{}" if between == "{" else "}")
    return True


def _array(buffer: TextBuffer, syntax: Braced, section: CallSection, sink: CallSink, depth: int) -> Parser[bool]:
    sink.arguments(buffer.take(1))
    between = ""
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("]")):
        sink.arguments(between)
        between = ", "
        if not (yield from _value(buffer, syntax, section, sink, depth + 1)):
            return False
        yield from skip_comma(buffer)
    sink.arguments("]")
    return True


def _scalar(buffer: TextBuffer, sink: CallSink) -> Parser[bool]:
    collected: list[str] = []
    while (match := _SCALAR_END.search(buffer.window)) is None:
        collected.append(buffer.take(len(buffer.window)))
        if not (yield from buffer.peek()):
            buffer.push_back("".join(collected))
            return False
    text = ("".join(collected) + buffer.take(match.start())).strip()
    if not text:
        return False
    try:
        msgspec.json.decode(text)
    except DECODE_ERRORS:
        text = quote_json(text.strip('"'))
    sink.arguments(text)
    return True

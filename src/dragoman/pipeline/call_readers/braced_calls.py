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
from dragoman.pipeline.call_readers.json_calls import TOOL_NAME, quote_json, read_raw
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

MAX_DEPTH = 64
_SCALAR_END = re.compile(r"[,}\]<]")


def begins(buffer: TextBuffer, syntax: Braced, section: CallSection) -> Parser[bool]:
    return bool((yield from buffer.starts_with((syntax.prefix,))))


def read(buffer: TextBuffer, syntax: Braced, section: CallSection, writer: EventWriter) -> Parser[None]:
    if not (yield from buffer.take_literal(syntax.prefix)):
        raise MalformedCall
    name: list[str] = []
    match = yield from buffer.read_until(markers("{", section.close, gap="none"), name.append)
    tool = "".join(name).strip()
    if not TOOL_NAME.fullmatch(tool):
        raise MalformedCall
    writer.start_call(tool)
    buffer.push_back(match.marker)
    if match.marker != "{":
        writer.write_arguments("{}")
    elif not (yield from _value(buffer, syntax, section, writer, 0)):
        if not buffer.cut:
            writer.warn("the arguments of a tool call are malformed")
        yield from read_raw(buffer, section, writer)
    writer.end_call()


def _value(buffer: TextBuffer, syntax: Braced, section: CallSection, writer: EventWriter, depth: int) -> Parser[bool]:
    """Report a value as JSON. False if the text cannot be read further."""
    if depth > MAX_DEPTH:
        return False
    yield from buffer.skip_space()
    if (yield from buffer.take_literal(syntax.quote)):
        return (yield from _string(buffer, syntax, writer))
    char = yield from buffer.peek()
    if char == "{":
        return (yield from _object(buffer, syntax, section, writer, depth))
    if char == "[":
        return (yield from _array(buffer, syntax, section, writer, depth))
    return (yield from _scalar(buffer, writer))


def _string(buffer: TextBuffer, syntax: Braced, writer: EventWriter) -> Parser[bool]:
    writer.write_arguments('"')
    match = yield from buffer.read_until(
        markers(syntax.quote, gap="none"), lambda text: writer.write_arguments(quote_json(text)[1:-1])
    )
    if match.marker:
        writer.write_arguments('"')
    return bool(match.marker)


def _object(buffer: TextBuffer, syntax: Braced, section: CallSection, writer: EventWriter, depth: int) -> Parser[bool]:
    buffer.take(1)
    between = "{"
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("}")):
        key: list[str] = []
        match = yield from buffer.read_until(markers(*":,{}[]", section.close, gap="none"), key.append)
        if match.marker != ":":
            writer.write_arguments(between)
            buffer.push_back("".join(key) + match.marker)
            return False
        name = "".join(key).replace(syntax.quote, "").strip().strip('"')
        writer.write_arguments(f"{between}{quote_json(name)}: ")
        between = ", "
        if not (yield from _value(buffer, syntax, section, writer, depth + 1)):
            return False
        yield from buffer.skip_comma()
    writer.write_arguments("{}" if between == "{" else "}")
    return True


def _array(buffer: TextBuffer, syntax: Braced, section: CallSection, writer: EventWriter, depth: int) -> Parser[bool]:
    writer.write_arguments(buffer.take(1))
    between = ""
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("]")):
        writer.write_arguments(between)
        between = ", "
        if not (yield from _value(buffer, syntax, section, writer, depth + 1)):
            return False
        yield from buffer.skip_comma()
    writer.write_arguments("]")
    return True


def _scalar(buffer: TextBuffer, writer: EventWriter) -> Parser[bool]:
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
    writer.write_arguments(text)
    return True

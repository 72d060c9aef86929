"""Reads calls in which each parameter is between tags.

    call      := function parameter* function_end
    parameter := parameter value value_end

Rules
1. A parameter that is a string in the tool's schema is passed on as it arrives. Any other is read completely and
   becomes JSON if it is valid JSON, otherwise a string.
2. The end tag of a value counts only if a parameter, the end of the call or the end of the text follows, because file
   contents may contain the same tag.
3. Whitespace in the templates next to a value belongs to the tags: at most one line break.
"""

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import FIELD, CallSection, Tagged
from dragoman.pipeline.call_readers.call_sink import TOOL_NAME, CallSink, MalformedCall, ParameterKind, parameter_kind
from dragoman.pipeline.call_readers.json_calls import quote_json
from dragoman.pipeline.call_readers.named_calls import literal_parts
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

MISSING = "missing"
"""Key in the fields for a literal of the template that was missing."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def begins(buffer: TextBuffer, syntax: Tagged, section: CallSection) -> Parser[bool]:
    head = literal_parts(syntax.function)[0]
    if head:
        return bool((yield from buffer.starts_with((head,))))
    char = yield from buffer.peek()
    return char.isalnum() or char == "_"


def read(buffer: TextBuffer, syntax: Tagged, section: CallSection, sink: CallSink) -> Parser[None]:
    head = literal_parts(syntax.parameter)[0]
    fields = yield from _fields(buffer, syntax.function, ("\n", head, syntax.function_end, section.close))
    name = fields.get("{name}", "")
    if not TOOL_NAME.fullmatch(name) or not (buffer.window or not buffer.cut):
        raise MalformedCall
    sink.start(name)
    schemas = sink.parameters(name)
    between = "{"
    yield from buffer.skip_space()
    while (yield from buffer.starts_with((head,))):
        fields = yield from _fields(buffer, syntax.parameter, ())
        key = fields.get("{key}", "")
        sink.arguments(f"{between}{quote_json(key)}: ")
        between = ", "
        if MISSING in fields:
            sink.arguments("null")
            sink.warn("a parameter of a tool call has no value")
            yield from buffer.skip_space()
            continue
        yield from _value(buffer, syntax, section, sink, _kind(fields, schemas.get(key)))
        yield from buffer.skip_space()
    if buffer.window or not buffer.cut:
        sink.arguments("{}" if between == "{" else "}")
    if syntax.function_end:
        yield from buffer.take_literal(syntax.function_end)
    sink.end()


def _kind(fields: dict[str, str], schema: object) -> ParameterKind:
    if "{string}" in fields:
        return "text" if fields["{string}"] == "true" else "json"
    return parameter_kind(schema)


def _fields(buffer: TextBuffer, template: str, after: tuple[str, ...]) -> Parser[dict[str, str]]:
    """Consume a template and return its fields. A field without a following literal ends at one of `after`."""
    pieces = FIELD.split(template)
    fields: dict[str, str] = {}
    yield from buffer.take_literal(pieces[0])
    for field, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        if not field:
            if not (yield from _blank(buffer, literal)):
                fields[MISSING] = literal
            continue
        collected: list[str] = []
        match = yield from buffer.read_until(markers(*([literal] if literal else after), gap="none"), collected.append)
        fields[field] = ("".join(collected)).strip()
        if not literal:
            buffer.push_back(match.marker)
    return fields


def _blank(buffer: TextBuffer, literal: str) -> Parser[bool]:
    """Consume whitespace of a template and the literal after it. False if the literal is missing."""
    if literal:
        yield from buffer.skip_space()
        return (yield from buffer.take_literal(literal))
    if (yield from buffer.peek()) == "\n":
        buffer.take(1)
    return True


def _value(
    buffer: TextBuffer, syntax: Tagged, section: CallSection, sink: CallSink, kind: ParameterKind
) -> Parser[None]:
    collected: list[str] = []
    streams = kind == "text"

    def emit(text: str) -> None:
        if streams:
            sink.arguments(quote_json(text)[1:-1])
        else:
            collected.append(text)

    if streams:
        sink.arguments('"')
    end = markers(syntax.value_end.strip(), gap="line" if syntax.value_end[:1].isspace() else "none")
    while True:
        match = yield from buffer.read_until(end, emit)
        if not match.marker or (yield from _follows(buffer, syntax, section)):
            break
        emit(match.text)
    if not match.marker and buffer.cut:
        sink.arguments("".join(collected))
        return
    sink.arguments('"' if streams else _as_json("".join(collected), kind))


def _follows(buffer: TextBuffer, syntax: Tagged, section: CallSection) -> Parser[bool]:
    """Whether the call continues or ends after a possible end of a value."""
    space = 0
    while (yield from buffer.has_length(space + 1)) and buffer.window[space].isspace():
        space += 1
    if space >= len(buffer.window):
        return True
    ahead = [literal_parts(syntax.parameter)[0], syntax.function_end, section.close]
    while not buffer.ended:
        rest = buffer.window[space:]
        if not any(len(text) > len(rest) and text.startswith(rest) for text in ahead):
            break
        yield
    return any(text and buffer.window.startswith(text, space) for text in ahead)


def _as_json(text: str, kind: ParameterKind) -> str:
    stripped = text.strip()
    if kind == "optional" and stripped not in ("null", "None"):
        return quote_json(text)
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    try:
        msgspec.json.decode(stripped)
    except DECODE_ERRORS:
        return quote_json(text)
    return stripped

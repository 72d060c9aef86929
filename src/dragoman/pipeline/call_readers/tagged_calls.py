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

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import FIELD, CallSection, Tagged
from dragoman.pipeline.call_readers.json_calls import TOOL_NAME, begins_with_template, leading_text, quote_json
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

ParameterKind = Literal["text", "optional", "json", "either"]
"""How a parameter is written: a raw string, a raw string or null, JSON, or unknown."""

MISSING = "missing"
"""Key in the fields for a literal of the template that was missing."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def begins(buffer: TextBuffer, syntax: Tagged, section: CallSection) -> Parser[bool]:
    return (yield from begins_with_template(buffer, (syntax.function,)))


def read(buffer: TextBuffer, syntax: Tagged, section: CallSection, writer: EventWriter) -> Parser[None]:
    head = leading_text(syntax.parameter)
    fields = yield from _fields(buffer, syntax.function, ("\n", head, syntax.function_end, section.close))
    name = fields.get("{name}", "")
    if not TOOL_NAME.fullmatch(name) or not (buffer.window or not buffer.cut):
        raise MalformedCall
    writer.start_call(name)
    schemas = writer.parameter_schemas(name)
    between = "{"
    yield from buffer.skip_space()
    while (yield from buffer.starts_with((head,))):
        fields = yield from _fields(buffer, syntax.parameter, ())
        key = fields.get("{key}", "")
        writer.write_arguments(f"{between}{quote_json(key)}: ")
        between = ", "
        if MISSING in fields:
            writer.write_arguments("null")
            writer.warn("a parameter of a tool call has no value")
            yield from buffer.skip_space()
            continue
        yield from _value(buffer, syntax, section, writer, _parameter_kind(fields, schemas.get(key)))
        yield from buffer.skip_space()
    if buffer.window or not buffer.cut:
        writer.write_arguments("{}" if between == "{" else "}")
    if syntax.function_end:
        yield from buffer.take_literal(syntax.function_end)
    writer.end_call()


def _parameter_kind(fields: dict[str, str], schema: object) -> ParameterKind:
    """Return how a value of the schema is written if strings have no quotes."""
    if "{string}" in fields:
        return "text" if fields["{string}"] == "true" else "json"
    if not isinstance(schema, Mapping):
        return "either"
    types = _types(schema)
    if types == {"string"}:
        return "text"
    if types == {"string", "null"}:
        return "optional"
    return "json" if types and "string" not in types else "either"


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
    buffer: TextBuffer, syntax: Tagged, section: CallSection, writer: EventWriter, kind: ParameterKind
) -> Parser[None]:
    collected: list[str] = []
    streams = kind == "text"

    def emit(text: str) -> None:
        if streams:
            writer.write_arguments(quote_json(text)[1:-1])
        else:
            collected.append(text)

    if streams:
        writer.write_arguments('"')
    end = markers(syntax.value_end.strip(), gap="line" if syntax.value_end[:1].isspace() else "none")
    while True:
        match = yield from buffer.read_until(end, emit)
        if not match.marker or (yield from _follows(buffer, syntax, section)):
            break
        emit(match.text)
    if not match.marker and buffer.cut:
        writer.write_arguments("".join(collected))
        return
    writer.write_arguments('"' if streams else _as_json("".join(collected), kind))


def _follows(buffer: TextBuffer, syntax: Tagged, section: CallSection) -> Parser[bool]:
    """Whether the call continues or ends after a possible end of a value."""
    space = 0
    while (yield from buffer.has_length(space + 1)) and buffer.window[space].isspace():
        space += 1
    if space >= len(buffer.window):
        return True
    ahead = [leading_text(syntax.parameter), syntax.function_end, section.close]
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


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that the schema allows; empty if unknown."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list | tuple):
        return {name for name in declared if isinstance(name, str)}
    values = schema.get("enum")
    if isinstance(values, list | tuple) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    variants = schema.get("anyOf") or schema.get("oneOf")
    match = [_types(each) if isinstance(each, Mapping) else set[str]() for each in variants or ()]
    return set[str]().union(*match) if all(match) else set()

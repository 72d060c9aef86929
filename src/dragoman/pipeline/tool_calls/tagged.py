"""Calls in which each parameter stands between tags of its own.

    call      := function parameter* function_end
    parameter := parameter value value_end

Rules
1. A parameter that the tool's schema calls a string is handed on as it comes; any other is read to its end and is JSON
   if it can be, a string if not.
2. The end of a value counts only if a parameter, the end of the call or the end of the text follows it: file contents
   may well hold the same tag.
3. White space in the templates next to a value belongs to the tags: one line break at the most.
"""

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import FIELD, Calls, Tagged
from dragoman.pipeline.text_buffer import Markers, Reading, Source, markers
from dragoman.pipeline.tool_calls.json import quoted
from dragoman.pipeline.tool_calls.named import parts
from dragoman.pipeline.tool_calls.sink import NAME, Kind, Malformed, Sink, kind_of

MISSING = "missing"
"""Stands among the fields for a literal of the template that was not there."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def begins(source: Source, syntax: Tagged, section: Calls) -> Reading[bool]:
    head = parts(syntax.function)[0]
    if head:
        return bool((yield from source.begins((head,))))
    char = yield from source.next()
    return char.isalnum() or char == "_"


def read(source: Source, syntax: Tagged, section: Calls, sink: Sink) -> Reading[None]:
    fields = yield from _fields(source, syntax.function, _after_name(syntax, section))
    name = fields.get("{name}", "")
    if not NAME.fullmatch(name) or not (source.window or not source.cut):
        raise Malformed
    sink.start(name)
    schemas = sink.parameters(name)
    between = "{"
    head = parts(syntax.parameter)[0]
    yield from source.space()
    while (yield from source.begins((head,))):
        fields = yield from _fields(source, syntax.parameter, ())
        key = fields.get("{key}", "")
        sink.arguments(f"{between}{quoted(key)}: ")
        between = ", "
        if MISSING in fields:
            sink.arguments("null")
            sink.warn("a parameter of a tool call has no value")
            yield from source.space()
            continue
        yield from _value(source, syntax, section, sink, _kind(fields, schemas.get(key)))
        yield from source.space()
    if source.window or not source.cut:
        sink.arguments("{}" if between == "{" else "}")
    if syntax.function_end:
        yield from source.literal(syntax.function_end)
    sink.end()


def _kind(fields: dict[str, str], schema: object) -> Kind:
    if "{string}" in fields:
        return "text" if fields["{string}"] == "true" else "json"
    return kind_of(schema)


def _after_name(syntax: Tagged, section: Calls) -> tuple[str, ...]:
    """What may follow a name that its template does not close."""
    return ("\n", parts(syntax.parameter)[0], syntax.function_end, section.close)


def _fields(source: Source, template: str, after: tuple[str, ...]) -> Reading[dict[str, str]]:
    """The fields of a template, which is taken; where a field is not followed by a literal, one of `after` ends it."""
    pieces = FIELD.split(template)
    fields: dict[str, str] = {}
    yield from source.literal(pieces[0])
    for field, literal in zip(pieces[1::2], pieces[2::2], strict=True):
        if not field:
            if not (yield from _blank(source, literal)):
                fields[MISSING] = literal
            continue
        kept: list[str] = []
        found = yield from source.until(markers(*([literal] if literal else after), gap="none"), kept.append)
        fields[field] = ("".join(kept)).strip()
        if not literal:
            source.put_back(found.marker)
    return fields


def _blank(source: Source, literal: str) -> Reading[bool]:
    """White space of a template, with the literal after it; False where that is not there."""
    if literal:
        yield from source.space()
        return (yield from source.literal(literal))
    if (yield from source.next()) == "\n":
        source.take(1)
    return True


def _value(source: Source, syntax: Tagged, section: Calls, sink: Sink, kind: Kind) -> Reading[None]:
    kept: list[str] = []
    streams = kind == "text"

    def emit(text: str) -> None:
        if streams:
            sink.arguments(quoted(text)[1:-1])
        else:
            kept.append(text)

    if streams:
        sink.arguments('"')
    while True:
        found = yield from source.until(_ends(syntax.value_end), emit)
        if not found.marker or (yield from _follows(source, syntax, section)):
            break
        emit(found.text)
    if not found.marker and source.cut:
        sink.arguments("".join(kept))
        return
    sink.arguments('"' if streams else _as_json("".join(kept), kind))


def _ends(value_end: str) -> Markers:
    return markers(value_end.strip(), gap="line" if value_end[:1].isspace() else "none")


def _follows(source: Source, syntax: Tagged, section: Calls) -> Reading[bool]:
    """Whether the call goes on or ends after what was taken for the end of a value."""
    space = 0
    while (yield from source.has(space + 1)) and source.window[space].isspace():
        space += 1
    if space >= len(source.window):
        return True
    ahead = [parts(syntax.parameter)[0], syntax.function_end, section.close]
    while not source.ended:
        rest = source.window[space:]
        if not any(len(text) > len(rest) and text.startswith(rest) for text in ahead):
            break
        yield
    return any(text and source.window.startswith(text, space) for text in ahead)


def _as_json(text: str, kind: Kind) -> str:
    stripped = text.strip()
    if kind == "optional" and stripped not in ("null", "None"):
        return quoted(text)
    if stripped in _PYTHON:
        return _PYTHON[stripped]
    try:
        msgspec.json.decode(stripped)
    except DECODE_ERRORS:
        return quoted(text)
    return stripped

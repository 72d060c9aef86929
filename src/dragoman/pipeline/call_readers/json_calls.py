"""Reads calls with JSON arguments, which are passed on as they arrive.

    calls  := object | "[" object ("," object)* "]"
    object := {"name": string, "arguments": object, …}        in any order; also wrapped in {"function": {…}}
    named  := begin arguments? end         begin: one of the templates of the syntax, with the name in it

Rules
1. Arguments are passed on as written, with two common mistakes repaired: control characters in strings and invalid
   escapes are escaped.
2. Arguments that come before the name are held until the name is known.
3. Arguments given as a JSON string are decoded; null means no arguments.
4. The object around the arguments may be truncated, the arguments may not.
5. A code fence that was opened in `begin` is closed before `end`, whichever template was used.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import FIELD, CallSection, JsonCall, NamedJson
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Emit, Parser, TextBuffer, markers

TOOL_NAME = re.compile(r"[^\s<>{}\"]{1,256}")
"""A possible tool name."""
OTHER_KEYS = frozenset({"id", "type", "index", "function", "tool_call_id", "call_id"})
"""Other keys that a bare object may have and still be a call."""
MAX_NAME = 512
MAX_HEADER = 1024
FENCE = "```"

_HARMLESS = re.compile(r"[\s0-9A-Za-z+\-.,:]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}
_FIELD_PATTERNS = {"{name}": r"(?P<name>[^\s<>\[\]{}]+?)", "{id}": r"[^\s<>\[\]{}]*", "{index}": r"\d+"}


class BrokenJson(Exception):
    """The text is not JSON from here on. `missing` would close the open brackets; it is empty inside a string."""

    def __init__(self, missing: str = "") -> None:
        super().__init__(missing)
        self.missing = missing


class BoundedText:
    """Collects text up to a maximum length. Beyond it, the surplus is pushed back and `MalformedCall` is raised, so
    that the result does not depend on how the text was cut."""

    def __init__(self, buffer: TextBuffer, collected: list[str], max_length: int) -> None:
        self._buffer = buffer
        self._collected = collected
        self._remaining = max_length

    def __call__(self, text: str) -> None:
        self._collected.append(text)
        self._remaining -= len(text)
        if self._remaining < 0:
            # An escape sequence replaces other text, and always arrives alone.
            if not text.startswith("\\"):
                self._buffer.push_back(text[self._remaining :])
            raise MalformedCall


def begins_object(buffer: TextBuffer, syntax: JsonCall, section: CallSection) -> Parser[bool]:
    char = yield from buffer.peek()
    return char in ("{", "[")


def read_objects(buffer: TextBuffer, syntax: JsonCall, section: CallSection, writer: EventWriter) -> Parser[None]:
    yield from read_list(buffer, lambda: _call(buffer, syntax, section, writer))


def read_list(buffer: TextBuffer, read_call: Callable[[], Parser[None]]) -> Parser[None]:
    """Read one call, or several in brackets."""
    if not (yield from buffer.take_literal("[")):
        yield from read_call()
        return
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("]")):
        yield from read_call()
        yield from buffer.skip_comma()
        if not buffer.window:
            return


class _Draft(msgspec.Struct):
    """A call before its name and its arguments are both known."""

    name: str | None = None
    arguments: str | None = None
    wrapped: bool = False


def _call(buffer: TextBuffer, syntax: JsonCall, section: CallSection, writer: EventWriter) -> Parser[None]:
    draft = _Draft()
    try:
        yield from _members(buffer, syntax, section, writer, draft)
    except BrokenJson as error:
        if draft.name is None or (draft.arguments is None and not writer.has_started_call):
            raise MalformedCall from error
    if draft.name is None:
        raise MalformedCall
    if not writer.has_started_call:
        writer.start_call(draft.name)
        writer.write_arguments("{}" if draft.arguments is None else draft.arguments)
    writer.end_call()


def _members(
    buffer: TextBuffer, syntax: JsonCall, section: CallSection, writer: EventWriter, draft: _Draft
) -> Parser[None]:
    yield from _expect(buffer, "{")
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("}")):
        key = yield from read_string(buffer, MAX_NAME)
        yield from buffer.skip_space()
        yield from _expect(buffer, ":")
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if writer.has_started_call:
            # The call was already reported.
            yield from read_value(buffer, _ignore)
        elif key in syntax.arguments:
            yield from _arguments(buffer, section, writer, draft)
        elif char == '"' and (key in syntax.name or key == "function"):
            draft.name = yield from read_string(buffer, MAX_NAME)
            if not TOOL_NAME.fullmatch(draft.name):
                raise MalformedCall
            if draft.arguments is not None:
                writer.start_call(draft.name)
                writer.write_arguments(draft.arguments)
        elif key == "function" and char == "{" and not draft.wrapped:
            draft.wrapped = True
            yield from _members(buffer, syntax, section, writer, draft)
        elif writer.strict and key not in OTHER_KEYS:
            raise MalformedCall
        else:
            yield from read_value(buffer, _ignore)
        yield from buffer.skip_comma()


def _arguments(buffer: TextBuffer, section: CallSection, writer: EventWriter, draft: _Draft) -> Parser[None]:
    if draft.arguments is not None:
        raise BrokenJson
    if buffer.window[:1] != "{":
        draft.arguments = yield from _unusual_arguments(buffer)
    elif draft.name is None:
        collected: list[str] = []
        yield from read_value(buffer, collected.append)
        draft.arguments = "".join(collected)
        return
    if draft.name is None:
        return
    writer.start_call(draft.name)
    if draft.arguments is None:
        yield from read_arguments(buffer, section, writer)
    else:
        writer.write_arguments(draft.arguments)


def _unusual_arguments(buffer: TextBuffer) -> Parser[str]:
    if buffer.window[:1] == '"':
        text = (yield from read_string(buffer)).strip() or "{}"
        if not text.startswith("{"):
            raise MalformedCall
        return text
    collected: list[str] = []
    yield from read_value(buffer, collected.append)
    if "".join(collected) != "null":
        raise MalformedCall
    return "{}"


def begins_named(buffer: TextBuffer, syntax: NamedJson, section: CallSection) -> Parser[bool]:
    return (yield from begins_with_template(buffer, syntax.begins))


def begins_with_template(buffer: TextBuffer, templates: Sequence[str]) -> Parser[bool]:
    """Whether one of the templates may come next. A template that begins with a field needs a letter or digit."""
    heads = tuple(dict.fromkeys(map(leading_text, templates)))
    if all(heads):
        return bool((yield from buffer.starts_with(heads)))
    char = yield from buffer.peek()
    return char.isalnum() or char == "_"


def read_named(buffer: TextBuffer, syntax: NamedJson, section: CallSection, writer: EventWriter) -> Parser[None]:
    header: list[str] = []
    end = syntax.end.strip().removeprefix(FENCE)
    stops = markers("{", section.open, section.close, end, gap="none")
    match = yield from buffer.read_until(stops, BoundedText(buffer, header, MAX_HEADER))
    if buffer.cut and not match.marker:
        raise MalformedCall
    writer.start_call(_read_name("".join(header) + match.gap, syntax))
    buffer.push_back(match.marker)
    if match.marker == "{":
        yield from read_arguments(buffer, section, writer)
    else:
        writer.write_arguments("{}")
    yield from buffer.skip_space()
    if FENCE in "".join(header) and (yield from buffer.take_literal(FENCE)):
        yield from buffer.skip_space()
    yield from buffer.take_literal(end)
    writer.end_call()


def _read_name(header: str, syntax: NamedJson) -> str:
    for template in syntax.begins:
        match = _pattern(template).fullmatch(header)
        if match is not None:
            return match["name"]
    raise MalformedCall


def leading_text(template: str) -> str:
    """Return the text of a template before its first field or whitespace."""
    return FIELD.split(template)[0]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    pieces = FIELD.split(template)
    pattern = ""
    for literal, field in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        pattern += re.escape(literal) + (_FIELD_PATTERNS[field] if field else r"\s*")
    return re.compile(r"\s*" + pattern)


def read_arguments(buffer: TextBuffer, section: CallSection, writer: EventWriter) -> Parser[None]:
    """Report arguments as they arrive, even if they turn out not to be JSON."""
    try:
        yield from read_value(buffer, writer.write_arguments)
    except BrokenJson as error:
        ended = not (yield from buffer.peek())
        closed = not buffer.cut if ended else bool((yield from buffer.starts_with((section.close,))))
        if error.missing and closed:
            writer.write_arguments(error.missing)
            writer.warn("the arguments of a tool call are incomplete")
        elif not ended:
            writer.warn("the arguments of a tool call are not JSON")
            yield from read_raw(buffer, section, writer)
        elif not buffer.cut:
            writer.warn("the arguments of a tool call are incomplete")


def read_raw(buffer: TextBuffer, section: CallSection, writer: EventWriter) -> Parser[None]:
    """Report the rest of a call as the model wrote it."""
    match = yield from buffer.read_until(markers(section.close, gap="none"), writer.write_arguments)
    buffer.push_back(match.marker)


def read_value(buffer: TextBuffer, emit: Emit) -> Parser[None]:
    char = yield from buffer.peek()
    if char == '"':
        yield from _string(buffer, emit)
    elif char in _CLOSERS:
        yield from _container(buffer, emit)
    else:
        yield from _scalar(buffer, emit)


def _container(buffer: TextBuffer, emit: Emit) -> Parser[None]:
    missing: list[str] = []
    while True:
        char = yield from buffer.peek()
        if run := _HARMLESS.match(buffer.window):
            emit(buffer.take(run.end()))
            continue
        if char == '"':
            yield from _string(buffer, emit)
            continue
        if char in _CLOSERS:
            missing.append(_CLOSERS[char])
        elif missing and char == missing[-1]:
            missing.pop()
        else:
            raise BrokenJson("".join(reversed(missing)))
        emit(buffer.take(1))
        if not missing:
            return


def _scalar(buffer: TextBuffer, emit: Emit) -> Parser[None]:
    empty = True
    while run := _SCALAR.match(buffer.window):
        empty = False
        emit(buffer.take(run.end()))
        yield from buffer.peek()
    if empty:
        raise BrokenJson


def _string(buffer: TextBuffer, emit: Emit) -> Parser[None]:
    emit(buffer.take(1))
    while True:
        if run := _PLAIN.match(buffer.window):
            emit(buffer.take(run.end()))
        char = yield from buffer.peek()
        if not char:
            raise BrokenJson
        if char == '"':
            emit(buffer.take(1))
            return
        if char == "\\":
            if not (yield from buffer.has_length(2)):
                emit(buffer.take(1))
                raise BrokenJson
            emit(_escape(buffer.take(2)[1]))
        elif char < " ":
            emit(quote_json(buffer.take(1))[1:-1])


def _escape(char: str) -> str:
    if char in '"\\/bfnrtu':
        return "\\" + char
    return char if char == "'" else "\\\\" + quote_json(char)[1:-1]


def read_string(buffer: TextBuffer, most: int | None = None) -> Parser[str]:
    """Return the value of a string. Raises MalformedCall if it has more than `most` characters."""
    if (yield from buffer.peek()) != '"':
        raise BrokenJson
    collected: list[str] = []
    yield from _string(buffer, collected.append if most is None else BoundedText(buffer, collected, most))
    try:
        text: str = msgspec.json.decode("".join(collected), type=str)
    except DECODE_ERRORS as error:
        raise BrokenJson from error
    return text


def quote_json(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _expect(buffer: TextBuffer, text: str) -> Parser[None]:
    if not (yield from buffer.take_literal(text)):
        raise BrokenJson


def _ignore(text: str) -> None:
    pass

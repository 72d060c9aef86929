"""Reads calls that are JSON objects, and JSON arguments as they arrive.

    calls  := object | "[" object ("," object)* "]"
    object := {"name": string, "arguments": object, …}        in any order; also wrapped in {"function": {…}}

Rules
1. Arguments are passed on as written, with two common mistakes repaired: control characters in strings and invalid
   escapes are escaped.
2. Arguments that come before the name are held until the name is known.
3. Arguments given as a JSON string are decoded; null means no arguments.
4. The object around the arguments may be truncated, the arguments may not.
"""

import re
from collections.abc import Callable

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import CallSection, JsonCall
from dragoman.pipeline.call_readers.call_sink import (
    TOOL_NAME,
    BoundedText,
    CallSink,
    MalformedCall,
    read_list,
    skip_comma,
)
from dragoman.pipeline.text_buffer import Parser, TextBuffer, markers

Emit = Callable[[str], None]

OTHER_KEYS = frozenset({"id", "type", "index", "function", "tool_call_id", "call_id"})
"""Other keys that a bare object may have and still be a call."""
MAX_NAME = 512

_HARMLESS = re.compile(r"[\s0-9A-Za-z+\-.,:]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}


class BrokenJson(Exception):
    """The text is not JSON from here on. `missing` would close the open brackets; it is empty inside a string."""

    def __init__(self, missing: str = "") -> None:
        super().__init__(missing)
        self.missing = missing


def begins(buffer: TextBuffer, syntax: JsonCall, section: CallSection) -> Parser[bool]:
    char = yield from buffer.peek()
    return char in ("{", "[")


def read(buffer: TextBuffer, syntax: JsonCall, section: CallSection, sink: CallSink) -> Parser[None]:
    yield from read_list(buffer, lambda: _call(buffer, syntax, section, sink))


class _Draft:
    """A call before its name and its arguments are both known."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.wrapped = False


def _call(buffer: TextBuffer, syntax: JsonCall, section: CallSection, sink: CallSink) -> Parser[None]:
    draft = _Draft()
    try:
        yield from _members(buffer, syntax, section, sink, draft)
    except BrokenJson as error:
        if draft.name is None or (draft.arguments is None and not sink.started):
            raise MalformedCall from error
    if draft.name is None:
        raise MalformedCall
    if not sink.started:
        sink.start(draft.name)
        sink.arguments("{}" if draft.arguments is None else draft.arguments)
    sink.end()


def _members(buffer: TextBuffer, syntax: JsonCall, section: CallSection, sink: CallSink, draft: _Draft) -> Parser[None]:
    yield from _expect(buffer, "{")
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("}")):
        key = yield from read_string(buffer, MAX_NAME)
        yield from buffer.skip_space()
        yield from _expect(buffer, ":")
        yield from buffer.skip_space()
        char = yield from buffer.peek()
        if sink.started:
            # The call was already reported.
            yield from read_value(buffer, _ignore)
        elif key in syntax.arguments:
            yield from _arguments(buffer, section, sink, draft)
        elif char == '"' and (key in syntax.name or key == "function"):
            draft.name = yield from read_string(buffer, MAX_NAME)
            if not TOOL_NAME.fullmatch(draft.name):
                raise MalformedCall
            if draft.arguments is not None:
                sink.start(draft.name)
                sink.arguments(draft.arguments)
        elif key == "function" and char == "{" and not draft.wrapped:
            draft.wrapped = True
            yield from _members(buffer, syntax, section, sink, draft)
        elif sink.strict and key not in OTHER_KEYS:
            raise MalformedCall
        else:
            yield from read_value(buffer, _ignore)
        yield from skip_comma(buffer)


def _arguments(buffer: TextBuffer, section: CallSection, sink: CallSink, draft: _Draft) -> Parser[None]:
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
    sink.start(draft.name)
    if draft.arguments is None:
        yield from read_arguments(buffer, section, sink)
    else:
        sink.arguments(draft.arguments)


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


def read_arguments(buffer: TextBuffer, section: CallSection, sink: CallSink) -> Parser[None]:
    """Report arguments as they arrive, even if they turn out not to be JSON."""
    try:
        yield from read_value(buffer, sink.arguments)
    except BrokenJson as error:
        ended = not (yield from buffer.peek())
        closed = not buffer.cut if ended else bool((yield from buffer.starts_with((section.close,))))
        if error.missing and closed:
            sink.arguments(error.missing)
            sink.warn("the arguments of a tool call are incomplete")
        elif not ended:
            sink.warn("the arguments of a tool call are not JSON")
            yield from read_raw(buffer, section, sink)
        elif not buffer.cut:
            sink.warn("the arguments of a tool call are incomplete")


def read_raw(buffer: TextBuffer, section: CallSection, sink: CallSink) -> Parser[None]:
    """Report the rest of a call as the model wrote it."""
    match = yield from buffer.read_until(markers(section.close, gap="none"), sink.arguments)
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

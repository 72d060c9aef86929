"""Calls that are JSON objects, and the JSON of arguments as it comes.

    calls  := object | "[" object ("," object)* "]"
    object := {"name": string, "arguments": object, …}        in any order; {"function": {…}} around it is read too

Rules
1. Arguments are handed on as the model writes them, with two mistakes mended that models make: control characters in
   strings are escaped, and so is a backslash that escapes nothing JSON knows.
2. Arguments before their name are kept until the name is known.
3. Arguments given as a string of JSON are the object in it; null is no arguments.
4. The object around the arguments may be cut short, the arguments themselves may not.
"""

import re
from collections.abc import Callable

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.formats.syntax import Calls, JsonCall
from dragoman.pipeline.text_buffer import Reading, Source, markers
from dragoman.pipeline.tool_calls.sink import NAME, Bounded, Malformed, Sink

Emit = Callable[[str], None]

OTHER_KEYS = frozenset({"id", "type", "index", "function", "tool_call_id", "call_id"})
"""What a bare object may have beside name and arguments and still be a call."""
MOST_NAME = 512

_HARMLESS = re.compile(r"[\s0-9A-Za-z+\-.,:]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}


class Broken(Exception):
    """The text is not JSON from here on; `missing` would close what is open, nothing inside a string."""

    def __init__(self, missing: str = "") -> None:
        super().__init__(missing)
        self.missing = missing


def begins(source: Source, syntax: JsonCall, section: Calls) -> Reading[bool]:
    char = yield from source.next()
    return char in ("{", "[")


def read(source: Source, syntax: JsonCall, section: Calls, sink: Sink) -> Reading[None]:
    if not (yield from source.literal("[")):
        yield from _call(source, syntax, section, sink)
        return
    yield from source.space()
    while not (yield from source.literal("]")):
        yield from _call(source, syntax, section, sink)
        yield from source.space()
        yield from source.literal(",")
        yield from source.space()
        if not source.window:
            return


class _Draft:
    """A call before its name and its arguments are both known."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.wrapped = False


def _call(source: Source, syntax: JsonCall, section: Calls, sink: Sink) -> Reading[None]:
    draft = _Draft()
    try:
        yield from _members(source, syntax, section, sink, draft)
    except Broken as error:
        if draft.name is None or (draft.arguments is None and not sink.started):
            raise Malformed from error
    if draft.name is None:
        raise Malformed
    if not sink.started:
        sink.start(draft.name)
        sink.arguments("{}" if draft.arguments is None else draft.arguments)
    sink.end()


def _members(source: Source, syntax: JsonCall, section: Calls, sink: Sink, draft: _Draft) -> Reading[None]:
    yield from _expect(source, "{")
    yield from source.space()
    while not (yield from source.literal("}")):
        key = yield from string(source, MOST_NAME)
        yield from source.space()
        yield from _expect(source, ":")
        yield from source.space()
        char = yield from source.next()
        if sink.started:
            # It has been told, so nothing that follows can change it.
            yield from value(source, _ignore)
        elif key in syntax.arguments:
            yield from _arguments(source, section, sink, draft)
        elif char == '"' and (key in syntax.name or key == "function"):
            draft.name = yield from string(source, MOST_NAME)
            if not NAME.fullmatch(draft.name):
                raise Malformed
            if draft.arguments is not None:
                sink.start(draft.name)
                sink.arguments(draft.arguments)
        elif key == "function" and char == "{" and not draft.wrapped:
            draft.wrapped = True
            yield from _members(source, syntax, section, sink, draft)
        elif sink.strict and key not in OTHER_KEYS:
            raise Malformed
        else:
            yield from value(source, _ignore)
        yield from source.space()
        yield from source.literal(",")
        yield from source.space()


def _arguments(source: Source, section: Calls, sink: Sink, draft: _Draft) -> Reading[None]:
    if draft.arguments is not None:
        raise Broken
    if source.window[:1] != "{":
        draft.arguments = yield from _unusual_arguments(source)
    elif draft.name is None:
        kept: list[str] = []
        yield from value(source, kept.append)
        draft.arguments = "".join(kept)
        return
    if draft.name is None:
        return
    sink.start(draft.name)
    if draft.arguments is None:
        yield from told(source, section, sink)
    else:
        sink.arguments(draft.arguments)


def _unusual_arguments(source: Source) -> Reading[str]:
    if source.window[:1] == '"':
        text = (yield from string(source)).strip() or "{}"
        if not text.startswith("{"):
            raise Malformed
        return text
    kept: list[str] = []
    yield from value(source, kept.append)
    if "".join(kept) != "null":
        raise Malformed
    return "{}"


def told(source: Source, section: Calls, sink: Sink) -> Reading[None]:
    """Arguments that are told as they come, also where they turn out not to be JSON."""
    try:
        yield from value(source, sink.arguments)
    except Broken as error:
        ended = not (yield from source.next())
        closed = not source.cut if ended else bool((yield from source.begins((section.close,))))
        if error.missing and closed:
            sink.arguments(error.missing)
            sink.warn("the arguments of a tool call were not closed")
        elif not ended:
            sink.warn("the arguments of a tool call are not JSON")
            yield from raw(source, section, sink)
        elif not source.cut:
            sink.warn("the arguments of a tool call were not closed")


def raw(source: Source, section: Calls, sink: Sink) -> Reading[None]:
    """The rest of a call as the model wrote it."""
    found = yield from source.until(markers(section.close, gap="none"), sink.arguments)
    source.put_back(found.marker)


def value(source: Source, emit: Emit) -> Reading[None]:
    """One JSON value."""
    char = yield from source.next()
    if char == '"':
        yield from _string(source, emit)
    elif char in _CLOSERS:
        yield from _container(source, emit)
    else:
        yield from _scalar(source, emit)


def _container(source: Source, emit: Emit) -> Reading[None]:
    missing: list[str] = []
    while True:
        char = yield from source.next()
        if run := _HARMLESS.match(source.window):
            emit(source.take(run.end()))
            continue
        if char == '"':
            yield from _string(source, emit)
            continue
        if char in _CLOSERS:
            missing.append(_CLOSERS[char])
        elif missing and char == missing[-1]:
            missing.pop()
        else:
            raise Broken("".join(reversed(missing)))
        emit(source.take(1))
        if not missing:
            return


def _scalar(source: Source, emit: Emit) -> Reading[None]:
    empty = True
    while run := _SCALAR.match(source.window):
        empty = False
        emit(source.take(run.end()))
        yield from source.next()
    if empty:
        raise Broken


def _string(source: Source, emit: Emit) -> Reading[None]:
    emit(source.take(1))
    while True:
        if run := _PLAIN.match(source.window):
            emit(source.take(run.end()))
        char = yield from source.next()
        if not char:
            raise Broken
        if char == '"':
            emit(source.take(1))
            return
        if char == "\\":
            if not (yield from source.has(2)):
                emit(source.take(1))
                raise Broken
            emit(_escape(source.take(2)[1]))
        elif char < " ":
            emit(quoted(source.take(1))[1:-1])


def _escape(char: str) -> str:
    if char in '"\\/bfnrtu':
        return "\\" + char
    return char if char == "'" else "\\\\" + quoted(char)[1:-1]


def string(source: Source, most: int | None = None) -> Reading[str]:
    """What a string says; one of more than `most` characters is not what is looked for."""
    if (yield from source.next()) != '"':
        raise Broken
    kept: list[str] = []
    yield from _string(source, kept.append if most is None else Bounded(source, kept, most))
    try:
        text: str = msgspec.json.decode("".join(kept), type=str)
    except DECODE_ERRORS as error:
        raise Broken from error
    return text


def quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _expect(source: Source, text: str) -> Reading[None]:
    if not (yield from source.literal(text)):
        raise Broken


def _ignore(text: str) -> None:
    pass

"""Reads calls written as Python.

    calls := "[" call ("," call)* "]" | call                  call := NAME "(" arguments ")"

A call is collected up to its closing parenthesis and parsed with `ast`; it is never executed. Keyword arguments must be
literals. Positional arguments get the names of the tool's parameters in order.
"""

import ast
import re
import warnings
from typing import Any

import msgspec

from dragoman.formats.syntax import CallSection, Pythonic
from dragoman.pipeline.call_readers.json_calls import read_list
from dragoman.pipeline.event_writer import EventWriter, MalformedCall
from dragoman.pipeline.text_buffer import Parser, TextBuffer

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_STRING = re.compile(r"'''|\"\"\"|'|\"")
_CODE = re.compile(r"[^()\[\]{}'\"]+")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
MAX_NAME = 256


def begins(buffer: TextBuffer, syntax: Pythonic, section: CallSection) -> Parser[bool]:
    char = yield from buffer.peek()
    return char == "[" or bool(section.open and _NAME.match(char))


def read(buffer: TextBuffer, syntax: Pythonic, section: CallSection, writer: EventWriter) -> Parser[None]:
    yield from read_list(buffer, lambda: _call(buffer, writer))


def _call(buffer: TextBuffer, writer: EventWriter) -> Parser[None]:
    name = ""
    while (yield from buffer.peek()) and buffer.window[0] != "(":
        name += buffer.take(1)
        if len(name) > MAX_NAME or not _NAME.fullmatch(name.rstrip()):
            raise MalformedCall
    name = name.rstrip()
    if not name or not buffer.window:
        raise MalformedCall
    code: list[str] = []
    yield from _enclosed(buffer, code)
    arguments = _arguments("".join(code), list(writer.parameter_schemas(name)))
    writer.start_call(name)
    writer.write_arguments(arguments)
    writer.end_call()


def _enclosed(buffer: TextBuffer, code: list[str]) -> Parser[None]:
    """Collect the text from an opening parenthesis to the matching closing one."""
    missing: list[str] = []
    while True:
        if run := _CODE.match(buffer.window):
            code.append(buffer.take(run.end()))
        char = yield from buffer.peek()
        if not char:
            raise MalformedCall
        if char in "'\"":
            yield from _string(buffer, code)
            continue
        if char in _CLOSERS:
            missing.append(_CLOSERS[char])
        elif char in _CLOSERS.values():
            if char != missing.pop():
                raise MalformedCall
        else:
            continue
        code.append(buffer.take(1))
        if not missing:
            return


def _string(buffer: TextBuffer, code: list[str]) -> Parser[None]:
    """Collect a string literal."""
    yield from buffer.has_length(3)
    match = _STRING.match(buffer.window)
    assert match is not None
    quote = match[0]
    code.append(buffer.take(len(quote)))
    while not (yield from buffer.take_literal(quote)):
        if not (yield from buffer.has_length(1)):
            raise MalformedCall
        length = 2 if buffer.window[0] == "\\" else 1
        if not (yield from buffer.has_length(length)):
            raise MalformedCall
        code.append(buffer.take(length))
    code.append(quote)


def _arguments(code: str, parameters: list[str]) -> str:
    """Return the arguments as JSON."""
    try:
        with warnings.catch_warnings():
            # Models write invalid escapes, for which Python warns.
            warnings.simplefilter("ignore")
            call = ast.parse("_" + code, mode="eval").body
        assert isinstance(call, ast.Call)
        keys = [*parameters[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(keys) != len(values) or None in keys:
            raise MalformedCall
        return msgspec.json.encode({key: _literal(node) for key, node in zip(keys, values, strict=True)}).decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, msgspec.EncodeError) as error:
        raise MalformedCall from error


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _literal(node.operand)
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key_of(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise MalformedCall


def _key_of(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if isinstance(key, str | int | float):
        return str(key)
    raise MalformedCall

"""Calls written as Python.

    calls := "[" call ("," call)* "]" | call                  call := NAME "(" arguments ")"

A call is collected to its closing parenthesis and read by Python's own parser; nothing in it is run. Keyword arguments
are literals; positional ones get the names of the tool's parameters, in order.
"""

import ast
import re
import warnings
from typing import Any

import msgspec

from dragoman.formats.syntax import Calls, Pythonic
from dragoman.pipeline.text_buffer import Reading, Source
from dragoman.pipeline.tool_calls.sink import Malformed, Sink

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_STRING = re.compile(r"'''|\"\"\"|'|\"")
_CODE = re.compile(r"[^()\[\]{}'\"]+")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
MOST_NAME = 256


def begins(source: Source, syntax: Pythonic, section: Calls) -> Reading[bool]:
    char = yield from source.next()
    return char == "[" or bool(section.open and _NAME.match(char))


def read(source: Source, syntax: Pythonic, section: Calls, sink: Sink) -> Reading[None]:
    if not (yield from source.literal("[")):
        yield from _call(source, sink)
        return
    yield from source.space()
    while not (yield from source.literal("]")):
        yield from _call(source, sink)
        yield from source.space()
        yield from source.literal(",")
        yield from source.space()
        if not source.window:
            return


def _call(source: Source, sink: Sink) -> Reading[None]:
    name = ""
    while (yield from source.next()) and source.window[0] != "(":
        name += source.take(1)
        if len(name) > MOST_NAME or not _NAME.fullmatch(name.rstrip()):
            raise Malformed
    name = name.rstrip()
    if not name or not source.window:
        raise Malformed
    code: list[str] = []
    yield from _enclosed(source, code)
    arguments = _arguments("".join(code), list(sink.parameters(name)))
    sink.start(name)
    sink.arguments(arguments)
    sink.end()


def _enclosed(source: Source, code: list[str]) -> Reading[None]:
    """Everything from an opening parenthesis to the one that closes it."""
    missing: list[str] = []
    while True:
        if run := _CODE.match(source.window):
            code.append(source.take(run.end()))
        char = yield from source.next()
        if not char:
            raise Malformed
        if char in "'\"":
            yield from _string(source, code)
            continue
        if char in _CLOSERS:
            missing.append(_CLOSERS[char])
        elif char in _CLOSERS.values():
            if char != missing.pop():
                raise Malformed
        else:
            continue
        code.append(source.take(1))
        if not missing:
            return


def _string(source: Source, code: list[str]) -> Reading[None]:
    """A string literal, with the quotes that begin it."""
    yield from source.has(3)
    found = _STRING.match(source.window)
    assert found is not None
    quote = found[0]
    # Two quotes in a row are an empty string, unless a third one follows.
    code.append(source.take(len(quote)))
    while not (yield from source.literal(quote)):
        if not (yield from source.has(1)):
            raise Malformed
        length = 2 if source.window[0] == "\\" else 1
        if not (yield from source.has(length)):
            raise Malformed
        code.append(source.take(length))
    code.append(quote)


def _arguments(code: str, parameters: list[str]) -> str:
    """The arguments as JSON."""
    try:
        with warnings.catch_warnings():
            # Python has opinions on escapes that it does not know; models write them all the same.
            warnings.simplefilter("ignore")
            call = ast.parse("_" + code, mode="eval").body
        assert isinstance(call, ast.Call)
        keys = [*parameters[: len(call.args)], *(keyword.arg for keyword in call.keywords)]
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if len(keys) != len(values):
            raise Malformed
        return msgspec.json.encode({_key(key): _literal(node) for key, node in zip(keys, values, strict=True)}).decode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, msgspec.EncodeError) as error:
        raise Malformed from error


def _key(key: str | None) -> str:
    if key is None:
        raise Malformed
    return key


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
    raise Malformed


def _key_of(node: ast.expr | None) -> str:
    key = None if node is None else _literal(node)
    if isinstance(key, str | int | float):
        return str(key)
    raise Malformed

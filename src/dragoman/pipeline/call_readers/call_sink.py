"""The interface through which readers report calls, and helpers for all readers."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from dragoman.pipeline.text_buffer import Parser, TextBuffer

ParameterKind = Literal["text", "optional", "json", "either"]
"""How a parameter is written: a raw string, a raw string or null, JSON, or unknown."""

TOOL_NAME = re.compile(r"[^\s<>{}\"]{1,256}")
"""A possible tool name."""


class MalformedCall(Exception):
    """The text is not a call."""


class CallSink(Protocol):
    started: bool
    """Whether the current call was reported, so that it cannot be withdrawn."""
    strict: bool
    """Whether only calls of offered tools are accepted, because no marker announced the call."""

    def start(self, name: str) -> None:
        """Raises `MalformedCall` if a call of this tool is not allowed here."""

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...

    def warn(self, message: str) -> None: ...

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the known schemas of a tool's parameters."""


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


def read_list(buffer: TextBuffer, read_call: Callable[[], Parser[None]]) -> Parser[None]:
    """Read one call, or several in brackets."""
    if not (yield from buffer.take_literal("[")):
        yield from read_call()
        return
    yield from buffer.skip_space()
    while not (yield from buffer.take_literal("]")):
        yield from read_call()
        yield from skip_comma(buffer)
        if not buffer.window:
            return


def skip_comma(buffer: TextBuffer) -> Parser[None]:
    yield from buffer.skip_space()
    yield from buffer.take_literal(",")
    yield from buffer.skip_space()


def parameter_kind(schema: object) -> ParameterKind:
    """Return how a value of the schema is written if strings have no quotes."""
    if not isinstance(schema, Mapping):
        return "either"
    types = _types(schema)
    if types == {"string"}:
        return "text"
    if types == {"string", "null"}:
        return "optional"
    return "json" if types and "string" not in types else "either"


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

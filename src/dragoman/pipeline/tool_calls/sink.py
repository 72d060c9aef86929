"""What the readers of calls tell, and to whom."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from dragoman.pipeline.text_buffer import Source

Kind = Literal["text", "optional", "json", "either"]
"""How a parameter is written: a string as it is, such a string or null, JSON, or whatever it turns out to be."""

NAME = re.compile(r"[^\s<>{}\"]{1,256}")
"""What can be the name of a tool, whether there is such a tool or not."""


class Malformed(Exception):
    """This is not a call."""


class Sink(Protocol):
    started: bool
    """Whether the call at hand has been told of, so that it cannot be taken back."""
    strict: bool
    """Whether only what is beyond doubt is a call: nothing but its own look says that it is one."""

    def start(self, name: str) -> None:
        """Raises `Malformed` where there must be no call of that name."""

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...

    def warn(self, words: str) -> None: ...

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The schemas of a tool's parameters, as far as they are known."""


class Bounded:
    """Keeps text up to so many characters. With more of it, it is not what it was taken for: the rest is put back, so
    that it does not matter how much came at once."""

    def __init__(self, source: Source, kept: list[str], most: int) -> None:
        self._source = source
        self._kept = kept
        self._room = most

    def __call__(self, text: str) -> None:
        self._kept.append(text)
        self._room -= len(text)
        if self._room < 0:
            # What begins with a backslash was put for something else, and came alone.
            if not text.startswith("\\"):
                self._source.put_back(text[self._room :])
            raise Malformed


def kind_of(schema: object) -> Kind:
    """How a value of the schema is written where strings have no quotes."""
    if not isinstance(schema, Mapping):
        return "either"
    types = _types(schema)
    if types == {"string"}:
        return "text"
    if types == {"string", "null"}:
        return "optional"
    return "json" if types and "string" not in types else "either"


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, as far as the schema says; nothing where it does not."""
    told = schema.get("type")
    if isinstance(told, str):
        return {told}
    if isinstance(told, list | tuple):
        return {name for name in told if isinstance(name, str)}
    values = schema.get("enum")
    if isinstance(values, list | tuple) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    variants = schema.get("anyOf") or schema.get("oneOf")
    found = [_types(each) if isinstance(each, Mapping) else set[str]() for each in variants or ()]
    return set[str]().union(*found) if all(found) else set()

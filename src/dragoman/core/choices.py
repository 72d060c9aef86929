"""Finds the values that a type allows, to list them in an error. Used only after an error."""

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[[^\]]*\]")
"""A step of a path such as `.tools[0].type`."""


def find_choices(kind: Any, path: str = "") -> list[Any]:
    """Return the values of all literals and enums that the type has at a path."""
    kinds = list(_members(kind))
    for step in _STEP.finditer(path):
        kinds = [member for outer in kinds for inner in _inner_kinds(outer, step["name"]) for member in _members(inner)]
    found: list[Any] = []
    for member in kinds:
        if get_origin(member) is Literal:
            found += get_args(member)
        elif isinstance(member, type) and issubclass(member, Enum):
            found += [choice.value for choice in member]
    return list(dict.fromkeys(found))


def describe_choices(kind: Any, path: str = "") -> str:
    """Return `; expected a, b or c`; an empty text if there are no such values."""
    choices = find_choices(kind, path)
    return f"; expected {list_choices(choices)}" if choices else ""


def list_choices(choices: Sequence[Any]) -> str:
    """Return `a, b or c`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last


def _members(kind: Any) -> Iterable[Any]:
    """Yield the members of a union, or the type itself."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _inner_kinds(kind: Any, name: str | None) -> Iterable[Any]:
    """Yield the type of a field, or the types of the items of a container."""
    if name is None:
        return get_args(kind)
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ()
    return [field.type for field in msgspec.structs.fields(kind) if field.encode_name == name]

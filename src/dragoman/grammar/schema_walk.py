"""Where schemas stand inside schemas, and how a place in one is named.

children := (keyword, …) -> schema
place    := base ("." name | "[" index "]" | '["' other name '"]')*
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

Parts = tuple[str | int, ...]

ONE = (
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

_PLAIN = re.compile(r"[A-Za-z0-9_$-]+")


def children(schema: Any) -> Iterator[tuple[Parts, Any]]:
    """The schemas directly inside, each with its keyword and its name or index there."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in ONE and isinstance(value, Mapping | bool):
            yield (keyword,), value
        elif keyword in SEVERAL and isinstance(value, list | tuple):
            yield from (((keyword, at), inner) for at, inner in enumerate(value))
        elif keyword in NAMED and isinstance(value, Mapping):
            # In the old `dependencies` a list of names may stand where others have a schema.
            yield from (((keyword, name), inner) for name, inner in value.items() if not isinstance(inner, list))


def walk(schema: Any, parts: Parts = ()) -> Iterator[tuple[Parts, Any]]:
    """All schemas of a document, those inside before those around them."""
    for place, inner in children(schema):
        yield from walk(inner, parts + place)
    yield parts, schema


def named(base: str, parts: Parts) -> str:
    """A place as callers know it. It may end up in a header: nothing but printable ASCII."""
    return base + "".join(map(_step, parts))


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _PLAIN.fullmatch(part) else f"[{json.dumps(part)}]"


def pointer(parts: Parts) -> str:
    """The fragment of a `$ref` to a place."""
    return "".join("/" + quote(str(part).replace("~", "~0").replace("/", "~1"), safe="~$") for part in parts)


def anchors(document: Any) -> dict[str, Parts]:
    """The names that a document gives to places in it."""
    found = ((inner.get("$anchor"), parts) for parts, inner in walk(document) if isinstance(inner, Mapping))
    return {name: parts for name, parts in found if isinstance(name, str)}


def resolve(document: Any, reference: str, names: Mapping[str, Parts]) -> Parts | None:
    """The place that a reference inside its own document means: a pointer or an anchor. None: not in here."""
    if reference in ("#", "#/"):
        return ()
    if reference.startswith("#/"):
        return _follow(document, reference[2:].split("/"))
    if reference.startswith("#"):
        return names.get(reference[1:])
    return None


def _follow(document: Any, steps: list[str]) -> Parts | None:
    parts: list[str | int] = []
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(document, Mapping) and name in document:
            document = document[name]
            parts.append(name)
        elif isinstance(document, list | tuple) and name.isascii() and name.isdigit() and int(name) < len(document):
            document = document[int(name)]
            parts.append(int(name))
        else:
            return None
    return tuple(parts)


def at(document: Any, parts: Parts) -> Any:
    for part in parts:
        document = document[part]
    return document


def rebased(schema: Any, onto: str) -> Any:
    """A copy whose references into its own document mean the same after it has been moved to the fragment `onto`."""

    def refer(reference: str) -> str:
        if reference in ("#", "#/"):
            return f"#{onto}"
        return f"#{onto}{reference[1:]}" if reference.startswith("#/") else reference

    return referring(schema, refer)


def referring(schema: Any, refer: Callable[[str], str], keep: Callable[[str, Any], bool] = lambda *_: True) -> Any:
    """A copy with other references, of those keywords that are to be kept."""
    if not isinstance(schema, Mapping):
        return schema
    schema = {keyword: value for keyword, value in schema.items() if keep(keyword, value)}
    copy = dict(schema)
    for (keyword, *rest), inner in children(schema):
        moved = referring(inner, refer, keep)
        if not rest:
            copy[keyword] = moved
        else:
            if copy[keyword] is schema[keyword]:
                held = schema[keyword]
                copy[keyword] = dict(held) if isinstance(held, Mapping) else list(held)
            copy[keyword][rest[0]] = moved
    if isinstance(schema.get("$ref"), str):
        copy["$ref"] = refer(schema["$ref"])
    return copy

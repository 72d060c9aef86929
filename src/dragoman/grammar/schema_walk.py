"""Walks subschemas, formats paths, resolves references of JSON schemas, and finds schemas that refer to themselves
without end.

children := (keyword, name or index) -> schema
path     := base ("." name | "[" index "]" | '["' other name '"]')*
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

PathParts = tuple[str | int, ...]

SINGLE_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

ATOMS = frozenset({"null", "boolean", "number", "integer", "string"})

_PLAIN = re.compile(r"[A-Za-z0-9_$-]+")
_INDEX = re.compile(r"[0-9]{1,9}")


def children(schema: Any) -> Iterator[tuple[PathParts, Any]]:
    """Yield the direct subschemas, each with its keyword and its name or index."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        if keyword in SCHEMA_LISTS and isinstance(value, list | tuple):
            yield from (((keyword, index), inner) for index, inner in enumerate(value))
        elif keyword in SINGLE_SCHEMAS:
            yield (keyword,), value
        elif keyword in SCHEMA_MAPS and isinstance(value, Mapping):
            # In `dependencies`, a value may be a list of property names instead of a schema.
            schemas = (
                (name, inner) for name, inner in value.items() if keyword != "dependencies" or not are_names(inner)
            )
            yield from (((keyword, name), inner) for name, inner in schemas)


def are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def walk_schemas(schema: Any, parts: PathParts = ()) -> Iterator[tuple[PathParts, Any]]:
    """Yield all schemas of a document with their paths, inner schemas first."""
    for step, inner in children(schema):
        yield from walk_schemas(inner, parts + step)
    yield parts, schema


def format_path(base: str, parts: PathParts) -> str:
    """Format a path for error messages and headers: printable ASCII only."""
    return base + "".join(map(_format_step, parts))


def _format_step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _PLAIN.fullmatch(part) else f"[{json.dumps(part)}]"


def json_pointer(parts: PathParts) -> str:
    """Return the fragment of a `$ref` to a path."""
    return "".join("/" + quote(str(part).replace("~", "~0").replace("/", "~1"), safe="~$") for part in parts)


def find_anchors(document: Any) -> dict[str, PathParts]:
    """Return the paths of all `$anchor` names in a document."""
    found = ((inner.get("$anchor"), parts) for parts, inner in walk_schemas(document) if isinstance(inner, Mapping))
    return {name: parts for name, parts in found if isinstance(name, str)}


def resolve_ref(document: Any, reference: str, names: Mapping[str, PathParts]) -> PathParts | None:
    """Return the path that a reference points to (a JSON pointer or an anchor), or None if it is not in this
    document."""
    if reference in ("#", "#/"):
        return ()
    if reference.startswith("#/"):
        return _follow_pointer(document, reference[2:].split("/"))
    if reference.startswith("#"):
        return names.get(reference[1:])
    return None


def _follow_pointer(document: Any, steps: list[str]) -> PathParts | None:
    parts: list[str | int] = []
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(document, Mapping) and name in document:
            document = document[name]
            parts.append(name)
        elif isinstance(document, list | tuple) and _INDEX.fullmatch(name) and int(name) < len(document):
            document = document[int(name)]
            parts.append(int(name))
        else:
            return None
    return tuple(parts)


def lookup(document: Any, parts: PathParts) -> Any:
    for part in parts:
        document = document[part]
    return document


def rebase_refs(schema: Any, prefix: str) -> Any:
    """Return a copy whose local references stay valid after it is moved to the fragment `prefix`."""

    def refer(reference: str) -> str:
        if reference in ("#", "#/"):
            return f"#{prefix}"
        return f"#{prefix}{reference[1:]}" if reference.startswith("#/") else reference

    return rewrite_refs(schema, refer)


def rewrite_refs(schema: Any, refer: Callable[[str], str], keep: Callable[[str, Any], bool] = lambda *_: True) -> Any:
    """Return a copy with rewritten references that contains only the keywords accepted by `keep`."""
    if not isinstance(schema, Mapping):
        return schema
    schema = {keyword: value for keyword, value in schema.items() if keep(keyword, value)}
    copy = dict(schema)
    for (keyword, *rest), inner in children(schema):
        rewritten = rewrite_refs(inner, refer, keep)
        if not rest:
            copy[keyword] = rewritten
        else:
            if copy[keyword] is schema[keyword]:
                original = schema[keyword]
                copy[keyword] = dict(original) if isinstance(original, Mapping) else list(original)
            copy[keyword][rest[0]] = rewritten
    if isinstance(schema.get("$ref"), str):
        copy["$ref"] = refer(schema["$ref"])
    return copy


def needs_infinite_value(document: Any) -> bool:
    """Whether no finite value can satisfy the document: a `$ref` cycle in which each step requires another one.

    A tree whose children are an array is fine because the array may be empty. A list node that requires a list node is
    not. This computes the least fixed point of the schemas that have a finite value.
    """
    nodes = dict(walk_schemas(document))
    refs = {parts: node["$ref"] for parts, node in nodes.items() if isinstance(node, Mapping) and "$ref" in node}
    if not refs:
        return False
    names = find_anchors(document)
    targets = {parts: resolve_ref(document, ref, names) for parts, ref in refs.items()}
    return () not in _find_finite(nodes, targets)


def _find_finite(nodes: Mapping[PathParts, Any], targets: Mapping[PathParts, PathParts | None]) -> set[PathParts]:
    users: defaultdict[PathParts, list[PathParts]] = defaultdict(list)
    for parts, target in targets.items():
        if target is not None:
            users[target].append(parts)
    finite: set[PathParts] = set()
    # Inner schemas come first, so most are visited once. When a schema turns out finite, its users are visited again.
    pending = list(nodes)[::-1]
    while pending:
        parts = pending.pop()
        if parts not in finite and parts in nodes and _is_finite(parts, nodes[parts], finite, targets):
            finite.add(parts)
            pending += users[parts]
            pending += [parts[:length] for length in (len(parts) - 2, len(parts) - 1) if length >= 0]
    return finite


def _is_finite(
    parts: PathParts, node: Any, finite: set[PathParts], targets: Mapping[PathParts, PathParts | None]
) -> bool:
    if not isinstance(node, Mapping):
        return node is not False
    target = targets.get(parts)
    if target is not None and target not in finite:
        return False
    if any((*parts, "allOf", index) not in finite for index in range(len(node.get("allOf", ())))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any((*parts, keyword, index) in finite for index in range(len(node[keyword]))):
            return False
    return "enum" in node or "const" in node or _has_finite_type(parts, node, finite)


def _has_finite_type(parts: PathParts, node: Mapping[str, Any], finite: set[PathParts]) -> bool:
    declared = node.get("type")
    types = [declared] if isinstance(declared, str) else declared
    if types is None or not ATOMS.isdisjoint(types):
        return True
    required = [name for name in node.get("required", ()) if name in node.get("properties", {})]
    if "object" in types and all((*parts, "properties", name) in finite for name in required):
        return True
    return "array" in types and _has_finite_array(parts, node, finite)


def _has_finite_array(parts: PathParts, node: Mapping[str, Any], finite: set[PathParts]) -> bool:
    least = node.get("minItems", 0)
    first = len(node.get("prefixItems", ()))
    if any((*parts, "prefixItems", index) not in finite for index in range(min(first, least))):
        return False
    return least <= first or isinstance(node.get("items", True), bool | list) or (*parts, "items") in finite

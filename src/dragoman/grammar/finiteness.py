"""Finds schemas that no finite value can satisfy: `$ref` cycles in which each step requires another one.

A tree whose children are an array is fine because the array may be empty. A list node that requires a list node is
not. The module computes the least fixed point of the schemas that have a finite value.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dragoman.grammar.schema_walk import PathParts, find_anchors, resolve_ref, walk_schemas

ATOMS = frozenset({"null", "boolean", "number", "integer", "string"})


def needs_infinite_value(document: Any) -> bool:
    """Whether the document's schema has no finite value."""
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
    return ("object" in types and _has_finite_object(parts, node, finite)) or (
        "array" in types and _has_finite_array(parts, node, finite)
    )


def _has_finite_object(parts: PathParts, node: Mapping[str, Any], finite: set[PathParts]) -> bool:
    properties = node.get("properties", {})
    return all((*parts, "properties", name) in finite for name in node.get("required", ()) if name in properties)


def _has_finite_array(parts: PathParts, node: Mapping[str, Any], finite: set[PathParts]) -> bool:
    least = node.get("minItems", 0)
    first = len(node.get("prefixItems", ()))
    if any((*parts, "prefixItems", index) not in finite for index in range(min(first, least))):
        return False
    return least <= first or isinstance(node.get("items", True), bool | list) or (*parts, "items") in finite

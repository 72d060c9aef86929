"""Schemas that no finite text can satisfy: `$ref` cycles in which every round needs another one.

A tree whose children are an array is fine, because the array may be empty; a list node that requires a list node is
not. What is computed is the least set of schemas that have a finite value, one from the other, as long as it grows.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from dragoman.grammar.schema_walk import Parts, anchors, resolve, walk

ATOMS = frozenset({"null", "boolean", "number", "integer", "string"})


def endless(document: Any) -> bool:
    """Whether every value of the document's schema would have to be infinite."""
    nodes = dict(walk(document))
    if not any(isinstance(node, Mapping) and "$ref" in node for node in nodes.values()):
        return False
    names = anchors(document)
    targets = {parts: resolve(document, node["$ref"], names) for parts, node in nodes.items() if _refers(node)}
    return () not in _finite(nodes, targets)


def _refers(node: Any) -> bool:
    return isinstance(node, Mapping) and isinstance(node.get("$ref"), str)


def _finite(nodes: Mapping[Parts, Any], targets: Mapping[Parts, Parts | None]) -> set[Parts]:
    users: defaultdict[Parts, list[Parts]] = defaultdict(list)
    for parts, target in targets.items():
        if target is not None:
            users[target].append(parts)
    finite: set[Parts] = set()
    # Inner schemas come first, so that most need one look; a schema is looked at again when one that it uses is found.
    pending = list(nodes)[::-1]
    while pending:
        parts = pending.pop()
        if parts not in finite and parts in nodes and _has_finite(parts, nodes[parts], finite, targets):
            finite.add(parts)
            pending += users[parts]
            pending += [parts[:length] for length in (len(parts) - 2, len(parts) - 1) if length >= 0]
    return finite


def _has_finite(parts: Parts, node: Any, finite: set[Parts], targets: Mapping[Parts, Parts | None]) -> bool:
    if not isinstance(node, Mapping):
        return node is not False
    target = targets.get(parts)
    if target is not None and target not in finite:
        return False
    if any((*parts, "allOf", at) not in finite for at in range(len(node.get("allOf", ())))):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any((*parts, keyword, at) in finite for at in range(len(node[keyword]))):
            return False
    return "enum" in node or "const" in node or _type_finite(parts, node, finite)


def _type_finite(parts: Parts, node: Mapping[str, Any], finite: set[Parts]) -> bool:
    given = node.get("type")
    types = [given] if isinstance(given, str) else given
    if types is None or not ATOMS.isdisjoint(types):
        return True
    return ("object" in types and _object_finite(parts, node, finite)) or (
        "array" in types and _array_finite(parts, node, finite)
    )


def _object_finite(parts: Parts, node: Mapping[str, Any], finite: set[Parts]) -> bool:
    properties = node.get("properties", {})
    return all((*parts, "properties", name) in finite for name in node.get("required", ()) if name in properties)


def _array_finite(parts: Parts, node: Mapping[str, Any], finite: set[Parts]) -> bool:
    least = node.get("minItems", 0)
    first = len(node.get("prefixItems", ()))
    if any((*parts, "prefixItems", at) not in finite for at in range(min(first, least))):
        return False
    return least <= first or isinstance(node.get("items", True), bool | list) or (*parts, "items") in finite

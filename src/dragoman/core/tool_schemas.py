"""The schemas of the tools of MCP servers.

A schema that cannot be used (too large, too deep, not encodable, not of an object) is replaced by one that allows every
object. The server of the tool checks the arguments anyway.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.errors import ENCODE_ERRORS

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
MAX_SCHEMA = 64 * 1024
"""Bytes of a schema."""
MAX_SCHEMA_DEPTH = 32


def usable_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool, or one that allows every object."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        return ANY_OBJECT
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            break
    try:
        return schema if not level and len(msgspec.msgpack.encode(schema)) <= MAX_SCHEMA else ANY_OBJECT
    except ENCODE_ERRORS:
        return ANY_OBJECT

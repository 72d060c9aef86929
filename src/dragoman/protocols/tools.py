"""Checks that the tools of every protocol have in common: names, schemas and their number."""

import re
from collections.abc import Mapping
from typing import Any

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Tool
from dragoman.protocols import json_body

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MAX_TOOLS = 1024


def decode_tool(
    path: str,
    name: str | None,
    description: str | None,
    schema: Mapping[str, Any] | None,
    strict: bool | None,
    asked: list[Asked],
    schema_field: str = "parameters",
) -> Tool:
    """Check the fields of a tool. Its schema must allow an object; it may omit the type or allow other types too."""
    schema_path = f"{path}.{schema_field}"
    checked_name = check_name(name, f"{path}.name")
    kind = (schema or {}).get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadRequest(f"{schema_path}.type: must be 'object', not {quote(kind)}", param=f"{schema_path}.type")
    if strict:
        asked.append(Asked(Feature.STRICT_TOOLS, f"{path}.strict"))
    return Tool(checked_name, description or "", schema, bool(strict), schema_path)


def check_name(name: str | None, path: str) -> str:
    if name is None:
        raise json_body.missing_field(path)
    if not NAME.fullmatch(name):
        raise BadRequest(f"{path}: expected 1 to 128 letters, digits or . _ - : /", param=path)
    return name


def check_count(count: int, path: str) -> None:
    if count > MAX_TOOLS:
        raise BadRequest(f"{path}: at most {MAX_TOOLS} tools, not {count}", param=path)


def duplicate_error(name: str, path: str) -> BadRequest:
    return BadRequest(f"{path}.name: duplicate tool name {name!r}", param=f"{path}.name")


def no_tools_error(path: str) -> BadRequest:
    return BadRequest(f"{path}: a tool call is required, but the request has no tools", param=path)

"""Turns what MCP servers return into values: tools, and the text of results.

Rules
1. A result is text. Images, audio and binary resources are described, not passed on.
2. A text above the limit is cut off, with a note. Secrets that a server repeats are replaced by `***`.
"""

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

import mcp.types as wire
import msgspec

from dragoman.core.errors import ENCODE_ERRORS
from dragoman.core.tool_schemas import usable_schema
from dragoman.core.tool_servers import ListedTool
from dragoman.core.urls import redact_secrets

MAX_TOOL_NAME = 256
MAX_DESCRIPTION = 8192
"""Characters."""
MAX_ERROR = 1000
"""Characters of an error of a server."""


def read_tool(tool: wire.Tool) -> ListedTool | None:
    """Return None for a tool without a usable name."""
    if not 0 < len(tool.name) <= MAX_TOOL_NAME:
        return None
    is_read_only = tool.annotations is not None and tool.annotations.read_only_hint is True
    description = clean(tool.description or "")[:MAX_DESCRIPTION]
    return ListedTool(clean(tool.name), description, usable_schema(tool.input_schema), is_read_only)


def read_result(result: wire.CallToolResult, limit: int, secrets: Sequence[str]) -> str:
    parts = [_describe(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [_encode(result.structured_content)]
    return cut(redact_secrets(clean("\n".join(parts)), secrets), limit)


def _encode(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except ENCODE_ERRORS:
        return "[a result that cannot be shown]"


def _describe(block: wire.ContentBlock) -> str:
    if isinstance(block, wire.TextContent):
        return block.text
    if isinstance(block, wire.ImageContent | wire.AudioContent):
        kind = "image" if isinstance(block, wire.ImageContent) else "audio"
        return f"[{kind}, {block.mime_type}, {_decoded_size(block.data)} bytes, not shown]"
    if isinstance(block, wire.ResourceLink):
        return f"[resource {block.name}: {block.uri}]"
    resource = block.resource
    if isinstance(resource, wire.TextResourceContents):
        return f"[resource {resource.uri}]\n{resource.text}"
    return (
        f"[resource {resource.uri}, {resource.mime_type or 'binary'}, {_decoded_size(resource.blob)} bytes, not shown]"
    )


def _decoded_size(data: str) -> int:
    try:
        return len(base64.b64decode(data))
    except (binascii.Error, ValueError):
        return 0


def cut(text: str, limit: int) -> str:
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    kept = encoded[:limit].decode("utf-8", "ignore")
    return f"{kept}\n[cut off: the result has {len(encoded)} bytes, and the limit is {limit}]"


def error_text(message: str, secrets: Iterable[str]) -> str:
    return redact_secrets(clean(message)[:MAX_ERROR], secrets)


def clean(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()

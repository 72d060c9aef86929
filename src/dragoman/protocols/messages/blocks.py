"""The content blocks of a message, from the wire to parts.

    block := {type: one of READERS, …}

Rules
1. Documents, search results and what the tools of a server did are told to the model as text, between tags.
2. What no value carries is asked for and left out: the request is refused before anybody misses it.
3. A thought may come without a signature or with somebody else's. One of ours has to fit.
"""

import base64
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Image, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.protocols import json_body
from dragoman.protocols.messages import signature

Block = dict[str, Any]
Content = str | list[Block]


class TextBlock(msgspec.Struct, frozen=True):
    text: str


class Source(msgspec.Struct, frozen=True):
    """Of an image or a document; which fields it has is up to its type."""

    type: Literal["base64", "url", "file", "text", "content"]
    data: str | None = None
    media_type: str | None = None
    url: str | None = None
    content: Content | None = None


class ImageBlock(msgspec.Struct, frozen=True):
    source: Source


class Citations(msgspec.Struct, frozen=True):
    enabled: bool | None = None


class DocumentBlock(msgspec.Struct, frozen=True):
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(msgspec.Struct, frozen=True):
    source: str
    title: str
    content: list[TextBlock]
    citations: Citations | None = None


class ThinkingBlock(msgspec.Struct, frozen=True):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, frozen=True):
    data: str


class ToolUseBlock(msgspec.Struct, frozen=True):
    id: str
    name: str
    input: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, frozen=True):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class ServerCallBlock(msgspec.Struct, frozen=True):
    name: str
    input: dict[str, Any] | None = None


class CompactionBlock(msgspec.Struct, frozen=True):
    content: str | None = None


def decode(content: Content, path: str, asked: list[Asked], allowed: frozenset[str]) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)]
    parts = [_part(block, f"{path}[{at}]", asked, allowed) for at, block in enumerate(content)]
    return [part for part in parts if part is not None]


def _part(block: Block, path: str, asked: list[Asked], allowed: frozenset[str]) -> Part | None:
    kind = block.get("type")
    if kind is None:
        raise json_body.missing(f"{path}.type")
    read = READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise BadRequest(f"{path}.type: no block is of the type {quote(kind)}", param=f"{path}.type")
    if kind not in allowed:
        raise BadRequest(f"{path}.type: no {kind} block belongs here", param=f"{path}.type")
    return read(block, path, asked)


def _text(block: Block, path: str, asked: list[Asked]) -> Part:
    return Text(json_body.convert(block, TextBlock, path).text)


def _image(block: Block, path: str, asked: list[Asked]) -> Part:
    source = json_body.convert(block, ImageBlock, path).source
    if source.type == "url" and source.url is not None:
        asked.append(Asked("images", path))
        return Image(url=source.url)
    if source.type == "base64" and source.data is not None:
        asked.append(Asked("images", path))
        return Image(_bytes(source.data, f"{path}.source.data"), source.media_type)
    return _no_file(source, path, asked)


def _bytes(data: str, path: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise BadRequest(f"{path}: this is not base64", param=path) from None


def _no_file(source: Source, path: str, asked: list[Asked]) -> Part:
    """Instead of what would have to be read from a file: nothing."""
    needed = {"base64": "data", "url": "url", "text": "data", "content": "content"}.get(source.type)
    if needed is not None and getattr(source, needed) is None:
        raise json_body.missing(f"{path}.source.{needed}")
    asked.append(Asked("files", f"{path}.source"))
    return Text("")


def _document(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, DocumentBlock, path)
    source = given.source
    _note_citations(given.citations, path, asked)
    if source.type == "text" and source.data is not None:
        body = source.data
    elif source.type == "content" and source.content is not None:
        inner = decode(source.content, f"{path}.source.content", asked, frozenset({"text", "image"}))
        if any(isinstance(part, Image) for part in inner):
            return _no_file(source, path, asked)
        body = "\n".join(part.text for part in inner if isinstance(part, Text))
    else:
        return _no_file(source, path, asked)
    return _told("document", {"title": given.title, "context": given.context}, body)


def _search_result(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, SearchResultBlock, path)
    _note_citations(given.citations, path, asked)
    body = "\n".join(text.text for text in given.content)
    return _told("search_result", {"source": given.source, "title": given.title}, body)


def _note_citations(citations: Citations | None, path: str, asked: list[Asked]) -> None:
    if citations is not None and citations.enabled:
        asked.append(Asked("citations", f"{path}.citations"))


def _told(tag: str, facts: dict[str, str | None], body: str) -> Text:
    """Text that stands for something else, with what is known of it."""
    lines = [f"<{name}>{fact}</{name}>" for name, fact in facts.items() if fact]
    return Text("\n".join([f"<{tag}>", *lines, body, f"</{tag}>"]))


def _thinking(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, ThinkingBlock, path)
    if not signature.fits(given.signature or "", given.thinking):
        where = f"{path}.signature"
        raise BadRequest(f"{where}: this signature belongs to another thought than this one", param=where)
    return Reasoning(given.thinking, given.signature or None)


def _redacted_thinking(block: Block, path: str, asked: list[Asked]) -> Part:
    return Reasoning("", json_body.convert(block, RedactedThinkingBlock, path).data)


def _tool_use(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, ToolUseBlock, path)
    return ToolCall(given.id, given.name, _json(given.input or {}))


def _tool_result(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, ToolResultBlock, path)
    parts = [] if given.content is None else decode(given.content, f"{path}.content", asked, OF_RESULTS)
    shown = tuple(part for part in parts if isinstance(part, Text | Image))
    return ToolResult(given.tool_use_id, shown, bool(given.is_error))


def _tool_reference(block: Block, path: str, asked: list[Asked]) -> Part:
    return Text(str(block.get("tool_name", "")))


def _browser_state(block: Block, path: str, asked: list[Asked]) -> Part:
    return _told("browser_state", {}, _json({"tabs": block.get("tabs")}))


def _server_call(block: Block, path: str, asked: list[Asked]) -> Part:
    given = json_body.convert(block, ServerCallBlock, path)
    return _told("server_tool_use", {"name": given.name}, _json(given.input or {}))


def _server_result(block: Block, path: str, asked: list[Asked]) -> Part:
    return _told(block["type"], {}, _json(_readable(block.get("content"))))


def _readable(value: Any) -> Any:
    """Without what only Anthropic's servers can read."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items() if name not in SEALED}
    return value


def _compaction(block: Block, path: str, asked: list[Asked]) -> Part | None:
    summary = json_body.convert(block, CompactionBlock, path).content
    return None if summary is None else _told("summary", {}, summary)


def _container_upload(block: Block, path: str, asked: list[Asked]) -> Part | None:
    asked.append(Asked("files", path))
    return None


def _tool_change(block: Block, path: str, asked: list[Asked]) -> Part | None:
    asked.append(Asked("tool_changes", path))
    return None


def _notice(block: Block, path: str, asked: list[Asked]) -> Part | None:
    return None


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


SEALED = frozenset({"encrypted_content", "encrypted_index", "encrypted_stdout", "signature", "cache_control"})
OF_RESULTS: frozenset[str] = frozenset(
    {"text", "image", "document", "search_result", "tool_reference", "browser_state"}
)
OF_SYSTEM: frozenset[str] = frozenset({"text", "tool_addition", "tool_removal"})
OF_ASSISTANT: frozenset[str] = frozenset({"thinking", "redacted_thinking", "tool_use"})
"""What nobody else says."""
READERS: dict[str, Callable[[Block, str, list[Asked]], Part | None]] = {
    "text": _text,
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "thinking": _thinking,
    "redacted_thinking": _redacted_thinking,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "tool_reference": _tool_reference,
    "browser_state": _browser_state,
    "server_tool_use": _server_call,
    "mcp_tool_use": _server_call,
    "web_search_tool_result": _server_result,
    "web_fetch_tool_result": _server_result,
    "code_execution_tool_result": _server_result,
    "bash_code_execution_tool_result": _server_result,
    "text_editor_code_execution_tool_result": _server_result,
    "tool_search_tool_result": _server_result,
    "mcp_tool_result": _server_result,
    "advisor_tool_result": _server_result,
    "compaction": _compaction,
    "container_upload": _container_upload,
    "tool_addition": _tool_change,
    "tool_removal": _tool_change,
    "mcp_tool_listing": _notice,
    "fallback": _notice,
}
ALLOWED: dict[str, frozenset[str]] = {
    "system": OF_SYSTEM,
    "user": frozenset(READERS) - OF_ASSISTANT,
    "assistant": frozenset(READERS) - {"tool_result"},
}
"""The types of blocks that a message of this role may have."""

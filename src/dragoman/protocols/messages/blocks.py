"""Decodes the content blocks of a message.

    block     := {type: one of DECODERS, …}
    signature := "dgm1." base64(blake2b(thinking))

Rules
1. Documents, search results and the results of server tools become text between tags.
2. Content without a matching value is dropped and added to `asked`, which makes the server reject the request.
3. A thinking block may have no signature or one of another server. A signature of Dragoman must match the text.
"""

import base64
import hashlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Image, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.protocols import json_body

Block = dict[str, Any]
Content = str | list[Block]
Decoder = Callable[[Block, str, list[Asked]], Part | None]
SIGNATURE_PREFIX = "dgm1."
_SIGNATURE_KEY = b"dragoman thought signature 1"
"""The same for every server, so that a conversation can continue on another one. A signature detects changes only."""


class TextBlock(msgspec.Struct, frozen=True):
    text: str


class ContentSource(msgspec.Struct, frozen=True):
    """The source of an image or document; the fields depend on the type."""

    type: Literal["base64", "url", "file", "text", "content"]
    data: str | None = None
    media_type: str | None = None
    url: str | None = None
    content: Content | None = None


class ImageBlock(msgspec.Struct, frozen=True):
    source: ContentSource


class Citations(msgspec.Struct, frozen=True):
    enabled: bool | None = None


class DocumentBlock(msgspec.Struct, frozen=True):
    source: ContentSource
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


def sign(thinking: str) -> str:
    digest = hashlib.blake2b(thinking.encode(), key=_SIGNATURE_KEY, digest_size=24).digest()
    return SIGNATURE_PREFIX + base64.b64encode(digest).decode()


def decode(content: Content, path: str, asked: list[Asked], allowed: frozenset[str]) -> list[Part]:
    if isinstance(content, str):
        return [Text(content)]
    parts = [_part(block, f"{path}[{at}]", asked, allowed) for at, block in enumerate(content)]
    return [part for part in parts if part is not None]


def _part(block: Block, path: str, asked: list[Asked], allowed: frozenset[str]) -> Part | None:
    kind = block.get("type")
    if kind is None:
        raise json_body.missing_field(f"{path}.type")
    decoder = DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise BadRequest(f"{path}.type: unknown block type {quote(kind)}", param=f"{path}.type")
    if kind not in allowed:
        raise BadRequest(f"{path}.type: {kind} blocks are not allowed here", param=f"{path}.type")
    return decoder(block, path, asked)


def _image(block: Block, path: str, asked: list[Asked]) -> Part:
    source = json_body.convert(block, ImageBlock, path).source
    if source.type == "url" and source.url is not None:
        image = Image(url=source.url)
    elif source.type == "base64" and source.data is not None:
        try:
            image = Image(base64.b64decode(source.data, validate=True), source.media_type)
        except ValueError:
            raise BadRequest(f"{path}.source.data: invalid base64", param=f"{path}.source.data") from None
    else:
        return _unsupported_source(source, path, asked)
    asked.append(Asked("images", path))
    return image


def _unsupported_source(source: ContentSource, path: str, asked: list[Asked]) -> Part:
    """Return an empty text for a source that would have to be read from a file."""
    required = {"base64": "data", "url": "url", "text": "data", "content": "content"}.get(source.type)
    if required is not None and getattr(source, required) is None:
        raise json_body.missing_field(f"{path}.source.{required}")
    asked.append(Asked("files", f"{path}.source"))
    return Text("")


def _document(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, DocumentBlock, path)
    source = fields.source
    _note_citations(fields.citations, path, asked)
    if source.type == "text" and source.data is not None:
        body = source.data
    elif source.type == "content" and source.content is not None:
        inner = decode(source.content, f"{path}.source.content", asked, frozenset({"text", "image"}))
        if any(isinstance(part, Image) for part in inner):
            return _unsupported_source(source, path, asked)
        body = "\n".join(part.text for part in inner if isinstance(part, Text))
    else:
        return _unsupported_source(source, path, asked)
    return _tagged("document", {"title": fields.title, "context": fields.context}, body)


def _search_result(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, SearchResultBlock, path)
    _note_citations(fields.citations, path, asked)
    body = "\n".join(text.text for text in fields.content)
    return _tagged("search_result", {"source": fields.source, "title": fields.title}, body)


def _note_citations(citations: Citations | None, path: str, asked: list[Asked]) -> None:
    if citations is not None and citations.enabled:
        asked.append(Asked("citations", f"{path}.citations"))


def _tagged(tag: str, attributes: dict[str, str | None], body: str) -> Text:
    """Return the body as text between tags, after its attributes."""
    lines = [f"<{name}>{value}</{name}>" for name, value in attributes.items() if value]
    return Text("\n".join([f"<{tag}>", *lines, body, f"</{tag}>"]))


def _thinking(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, ThinkingBlock, path)
    signature = fields.signature or ""
    if signature.startswith(SIGNATURE_PREFIX) and signature != sign(fields.thinking):
        raise BadRequest(f"{path}.signature: does not match the thinking text", param=f"{path}.signature")
    return Reasoning(fields.thinking, fields.signature or None)


def _tool_use(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, ToolUseBlock, path)
    return ToolCall(fields.id, fields.name, _json(fields.input or {}))


def _tool_result(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, ToolResultBlock, path)
    parts = [] if fields.content is None else decode(fields.content, f"{path}.content", asked, RESULT_TYPES)
    shown = tuple(part for part in parts if isinstance(part, Text | Image))
    return ToolResult(fields.tool_use_id, shown, bool(fields.is_error))


def _server_call(block: Block, path: str, asked: list[Asked]) -> Part:
    fields = json_body.convert(block, ServerCallBlock, path)
    return _tagged("server_tool_use", {"name": fields.name}, _json(fields.input or {}))


def _server_result(block: Block, path: str, asked: list[Asked]) -> Part:
    return _tagged(block["type"], {}, _json(_without_encrypted(block.get("content"))))


def _without_encrypted(value: Any) -> Any:
    """Remove the fields that only Anthropic's servers can read."""
    if isinstance(value, list):
        return [_without_encrypted(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_encrypted(inner) for name, inner in value.items() if name not in ENCRYPTED}
    return value


def _compaction(block: Block, path: str, asked: list[Asked]) -> Part | None:
    summary = json_body.convert(block, CompactionBlock, path).content
    return None if summary is None else _tagged("summary", {}, summary)


def _drop(feature: str) -> Decoder:
    """Return a decoder that drops the block and reports the feature."""

    def decode_block(block: Block, path: str, asked: list[Asked]) -> None:
        asked.append(Asked(feature, path))

    return decode_block


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


ENCRYPTED = frozenset({"encrypted_content", "encrypted_index", "encrypted_stdout", "signature", "cache_control"})
RESULT_TYPES = frozenset({"text", "image", "document", "search_result", "tool_reference", "browser_state"})
DECODERS: dict[str, Decoder] = {
    "text": lambda block, path, asked: Text(json_body.convert(block, TextBlock, path).text),
    "image": _image,
    "document": _document,
    "search_result": _search_result,
    "thinking": _thinking,
    "redacted_thinking": lambda block, path, asked: Reasoning(
        "", json_body.convert(block, RedactedThinkingBlock, path).data
    ),
    "tool_use": _tool_use,
    "tool_result": _tool_result,
    "tool_reference": lambda block, path, asked: Text(str(block.get("tool_name", ""))),
    "browser_state": lambda block, path, asked: _tagged("browser_state", {}, _json({"tabs": block.get("tabs")})),
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
    "container_upload": _drop("files"),
    "tool_addition": _drop("tool_changes"),
    "tool_removal": _drop("tool_changes"),
    "mcp_tool_listing": lambda block, path, asked: None,
    "fallback": lambda block, path, asked: None,
}
ALLOWED: dict[str, frozenset[str]] = {
    "system": frozenset({"text", "tool_addition", "tool_removal"}),
    "user": frozenset(DECODERS) - {"thinking", "redacted_thinking", "tool_use"},
    "assistant": frozenset(DECODERS) - {"tool_result"},
}
"""The block types that a message of each role may have."""

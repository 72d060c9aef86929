"""The content blocks of messages, in both directions, and their `cache_control`.

    block         := {type: one of DECODERS, cache_control?, …}
    signature     := that of `Seal.THINKING_SIGNATURE`, or of `Seal.COMPACTION_SIGNATURE` (see `sealed`)
    cache_control := {type: ephemeral, ttl?: 5m | 1h}        of the request, a tool, or a block of system or messages

Rules
1. Documents, search results and the results of server tools become text between tags.
2. Content without a matching value is dropped and added to `asked`, which makes the server reject the request.
3. A thinking block may have no signature or one of another server. A signature of Dragoman must match the text.
4. Call arguments that are not a JSON object, as in a truncated reply, are encoded as {"INVALID_JSON": text}.
5. The whole prompt is cached, for the longest time that any `cache_control` requests. For upstream servers, the parts
   of the prompt that have one are recorded. It is a hint: an engine without a cache answers all the same.
"""

import base64
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from dragoman.core.choices import list_choices
from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Image, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.core.summary import summary_message
from dragoman.protocols import json_body
from dragoman.protocols.messages.context import CompactionBlock, check_block
from dragoman.protocols.sealed import Seal

Block = dict[str, Any]
Content = str | list[Block]
SIGNATURE = Seal.THINKING_SIGNATURE


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


class OtherBlock(msgspec.Struct, frozen=True):
    """A block of which no field is required."""

    type: str
    content: Any = None
    tabs: Any = None
    tool_name: Any = ""


def encode_part(part: Part) -> Block:
    """Encode a part of a message, for a request or a reply."""
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Reasoning):
        if part.signature and not part.text:
            return {"type": "redacted_thinking", "data": part.signature}
        return {"type": "thinking", "thinking": part.text, "signature": part.signature or SIGNATURE.sign(part.text)}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _encode_input(part.arguments)}
    if isinstance(part, Image):
        return {"type": "image", "source": _encode_source(part)}
    block: Block = {"type": "tool_result", "tool_use_id": part.call_id}
    content = [encode_part(inner) for inner in part.content if inner != Text("")]
    return block | ({"content": content} if content else {}) | ({"is_error": True} if part.is_error else {})


def _encode_source(image: Image) -> dict[str, Any]:
    if image.data is not None:
        data = base64.b64encode(image.data).decode()
        return {"type": "base64", "media_type": image.media_type or "image/png", "data": data}
    head, comma, data = (image.url or "").partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return {"type": "base64", "media_type": head[5:-7], "data": data}
    return {"type": "url", "url": image.url}


def _encode_input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """Return the JSON as the model wrote it, without decoding its values."""
    if not arguments.strip():
        return {}
    return msgspec.Raw(arguments.encode()) if json_body.is_object(arguments) else {"INVALID_JSON": arguments}


def decode(content: Content, path: str, asked: list[Asked], allowed: frozenset[str], first: int = 0) -> list[Part]:
    """Decode the blocks from `first` on."""
    if isinstance(content, str):
        return [Text(content)]
    parts = [_part(content[at], f"{path}[{at}]", asked, allowed) for at in range(first, len(content))]
    return [part for part in parts if part is not None]


def _part(block: Block, path: str, asked: list[Asked], allowed: frozenset[str]) -> Part | None:
    kind = block.get("type")
    if kind is None:
        raise json_body.missing_field(f"{path}.type")
    if not isinstance(kind, str) or kind not in DECODERS:
        expected = list_choices(sorted(allowed))
        raise BadRequest(f"{path}.type: unknown block type {quote(kind)}; expected {expected}", param=f"{path}.type")
    if kind not in allowed:
        raise BadRequest(f"{path}.type: {kind} blocks are not allowed here", param=f"{path}.type")
    struct, decoder = DECODERS[kind]
    return decoder(json_body.convert(block, struct, path), path, asked)


def _image(block: ImageBlock, path: str, asked: list[Asked]) -> Part:
    source = block.source
    if source.type == "url" and source.url is not None:
        image = Image(url=source.url)
    elif source.type == "base64" and source.data is not None:
        try:
            image = Image(base64.b64decode(source.data, validate=True), source.media_type)
        except ValueError:
            raise BadRequest(f"{path}.source.data: invalid base64", param=f"{path}.source.data") from None
    else:
        return _unsupported_source(source, path, asked)
    asked.append(Asked(Feature.IMAGES, path))
    return image


def _unsupported_source(source: ContentSource, path: str, asked: list[Asked]) -> Part:
    """Return an empty text for a source that would have to be read from a file."""
    required = {"base64": "data", "url": "url", "text": "data", "content": "content"}.get(source.type)
    if required is not None and getattr(source, required) is None:
        raise json_body.missing_field(f"{path}.source.{required}")
    asked.append(Asked(Feature.FILES, f"{path}.source"))
    return Text("")


def _document(block: DocumentBlock, path: str, asked: list[Asked]) -> Part:
    source = block.source
    _note_citations(block.citations, path, asked)
    if source.type == "text" and source.data is not None:
        body = source.data
    elif source.type == "content" and source.content is not None:
        inner = decode(source.content, f"{path}.source.content", asked, frozenset({"text", "image"}))
        if any(isinstance(part, Image) for part in inner):
            return _unsupported_source(source, path, asked)
        body = "\n".join(part.text for part in inner if isinstance(part, Text))
    else:
        return _unsupported_source(source, path, asked)
    return _tagged("document", body, title=block.title, context=block.context)


def _search_result(block: SearchResultBlock, path: str, asked: list[Asked]) -> Part:
    _note_citations(block.citations, path, asked)
    body = "\n".join(text.text for text in block.content)
    return _tagged("search_result", body, source=block.source, title=block.title)


def _note_citations(citations: Citations | None, path: str, asked: list[Asked]) -> None:
    if citations is not None and citations.enabled:
        asked.append(Asked(Feature.CITATIONS, f"{path}.citations"))


def _tagged(tag: str, body: str, **attributes: str | None) -> Text:
    """Return the body as text between tags, after its attributes."""
    lines = [f"<{name}>{value}</{name}>" for name, value in attributes.items() if value]
    return Text("\n".join([f"<{tag}>", *lines, body, f"</{tag}>"]))


def _thinking(block: ThinkingBlock, path: str, asked: list[Asked]) -> Part:
    signature = block.signature or ""
    if SIGNATURE.is_broken(signature, block.thinking):
        raise BadRequest(f"{path}.signature: does not match the thinking text", param=f"{path}.signature")
    return Reasoning(block.thinking, signature or None)


def _compaction(block: CompactionBlock, path: str, asked: list[Asked]) -> Part | None:
    check_block(block, path)
    return None if block.content is None else summary_message(block.content).parts[0]


def _tool_result(block: ToolResultBlock, path: str, asked: list[Asked]) -> Part:
    parts = [] if block.content is None else decode(block.content, f"{path}.content", asked, RESULT_TYPES)
    shown = tuple(part for part in parts if isinstance(part, Text | Image))
    return ToolResult(block.tool_use_id, shown, bool(block.is_error))


def _without_encrypted(value: Any) -> Any:
    """Remove the fields that only Anthropic's servers can read."""
    if isinstance(value, list):
        return [_without_encrypted(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_encrypted(inner) for name, inner in value.items() if name not in ENCRYPTED}
    return value


def _drop(feature: Feature | None = None) -> "Decoder":
    """Return a decoder that drops the block and reports the feature, if any."""

    def decode_block(block: Any, path: str, asked: list[Asked]) -> None:
        if feature is not None:
            asked.append(Asked(feature, path))

    return OtherBlock, decode_block


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


Decoder = tuple[type[msgspec.Struct], Callable[[Any, str, list[Asked]], Part | None]]
ENCRYPTED = frozenset({"encrypted_content", "encrypted_index", "encrypted_stdout", "signature", "cache_control"})
RESULT_TYPES = frozenset({"text", "image", "document", "search_result", "tool_reference", "browser_state"})
SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
SERVER_RESULTS = (
    *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result", "mcp_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    "advisor_tool_result",
)
_server_call: Decoder = (
    ServerCallBlock,
    lambda block, path, asked: _tagged("server_tool_use", _json(block.input or {}), name=block.name),
)
_server_result: Decoder = (
    OtherBlock,
    lambda block, path, asked: _tagged(block.type, _json(_without_encrypted(block.content))),
)
DECODERS: dict[str, Decoder] = {
    "text": (TextBlock, lambda block, path, asked: Text(block.text)),
    "image": (ImageBlock, _image),
    "document": (DocumentBlock, _document),
    "search_result": (SearchResultBlock, _search_result),
    "thinking": (ThinkingBlock, _thinking),
    "redacted_thinking": (RedactedThinkingBlock, lambda block, path, asked: Reasoning("", block.data)),
    "tool_use": (ToolUseBlock, lambda block, path, asked: ToolCall(block.id, block.name, _json(block.input or {}))),
    "tool_result": (ToolResultBlock, _tool_result),
    "tool_reference": (OtherBlock, lambda block, path, asked: Text(str(block.tool_name))),
    "browser_state": (OtherBlock, lambda block, path, asked: _tagged("browser_state", _json({"tabs": block.tabs}))),
    **dict.fromkeys(SERVER_CALLS, _server_call),
    **dict.fromkeys(SERVER_RESULTS, _server_result),
    "compaction": (CompactionBlock, _compaction),
    "container_upload": _drop(Feature.FILES),
    "tool_addition": _drop(Feature.TOOL_CHANGES),
    "tool_removal": _drop(Feature.TOOL_CHANGES),
    "mcp_tool_listing": _drop(),
    "fallback": _drop(),
}
ALLOWED: dict[str, frozenset[str]] = {
    "system": frozenset({"text", "tool_addition", "tool_removal"}),
    "user": frozenset(DECODERS) - {"thinking", "redacted_thinking", "tool_use"},
    "assistant": frozenset(DECODERS) - {"tool_result"},
}
"""The block types that a message of each role may have."""

SHORT_SECONDS, LONG_SECONDS = 300.0, 3600.0
TTL_SECONDS = {"5m": SHORT_SECONDS, "1h": LONG_SECONDS}
PromptPart = Literal["tools", "system", "messages"]


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def decode_cache_control(parsed: dict[str, Any]) -> tuple[float, tuple[PromptPart, ...]]:
    """Return how many seconds to cache the prompt, and the parts of the prompt with a `cache_control`.

    The `cache_control` of the request itself belongs to the messages. Blocks that are not objects are skipped.
    """
    blocks: dict[PromptPart, Iterator[tuple[str, Block]]] = {
        "tools": _objects(parsed.get("tools"), "tools"),
        "system": _objects(parsed.get("system"), "system"),
        "messages": _message_blocks(parsed),
    }
    seconds = {
        part: max([_cache_seconds(block, path) for path, block in found], default=0.0) for part, found in blocks.items()
    }
    return max(seconds.values()), tuple(part for part in seconds if seconds[part])


def _message_blocks(parsed: dict[str, Any]) -> Iterator[tuple[str, Block]]:
    yield "", parsed
    for outer, message in _objects(parsed.get("messages"), "messages"):
        for path, block in _objects(message.get("content"), f"{outer}.content"):
            yield path, block
            yield from _objects(block.get("content"), f"{path}.content")


def _objects(content: Any, path: str) -> Iterator[tuple[str, Block]]:
    if isinstance(content, list):
        yield from ((f"{path}[{at}]", entry) for at, entry in enumerate(content) if isinstance(entry, dict))


def _cache_seconds(block: Block, path: str) -> float:
    control = block.get("cache_control")
    if control is None:
        return 0.0
    where = f"{path}.cache_control".lstrip(".")
    if not isinstance(control, dict):
        raise BadRequest(f'{where}: expected an object such as {{"type": "ephemeral"}}', param=where)
    return TTL_SECONDS[json_body.convert(control, CacheControl, where).ttl or "5m"]

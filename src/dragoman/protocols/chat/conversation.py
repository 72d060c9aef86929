"""The messages of a chat, from the wire to values.

    content   := text | part* | null
    assistant := thought? content call*

A thought may be told as `reasoning_content`, `reasoning`, `reasoning_details` or `thinking_blocks`: whichever comes
first in this order and has text. A tool's result needs no call that it belongs to.
"""

from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, Image, Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.protocols import json_body


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ImageAddress(msgspec.Struct, frozen=True):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageAddress


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: dict[str, Any]


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    file: dict[str, Any]


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallField(msgspec.Struct, frozen=True):
    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = None


class MessageField(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    is_error: bool | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    thinking_blocks: list[dict[str, Any]] | None = None


def decode(field: MessageField, path: str, asked: list[Asked]) -> Message:
    content = _content(field.content, f"{path}.content", asked)
    if field.role == "tool" or field.role == "function":
        call_id = field.tool_call_id or field.name or ""
        shown = tuple(part for part in content if isinstance(part, Text | Image))
        return Message("tool", (ToolResult(call_id, shown, bool(field.is_error)),), field.name)
    if field.role != "assistant":
        if field.content is None:
            raise BadRequest(f"{path}.content: a {field.role} message needs content", param=f"{path}.content")
        return Message(field.role, content, field.name)
    thought = _thought(field)
    thoughts = (Reasoning(thought),) if thought else ()
    return Message("assistant", (*thoughts, *content, *_calls(field, path, asked)), field.name)


def _thought(field: MessageField) -> str:
    told = field.reasoning_content or field.reasoning
    return told or _text_of(field.reasoning_details) or _text_of(field.thinking_blocks)


def _text_of(blocks: list[dict[str, Any]] | None) -> str:
    texts = [block.get(word) for block in blocks or () for word in ("text", "thinking", "summary")]
    return "".join(text for text in texts if isinstance(text, str))


def _calls(field: MessageField, path: str, asked: list[Asked]) -> list[ToolCall]:
    calls = []
    for at, call in enumerate(field.tool_calls or ()):
        inner = f"{path}.tool_calls[{at}]"
        if call.function is not None:
            calls.append(_call(call.id or f"call_{at}", call.function))
        elif call.type in (None, "function"):
            raise json_body.missing(f"{inner}.function")
        else:
            # No value carries a call of another kind: the request is refused before anybody misses it.
            asked.append(Asked("custom_tools", f"{inner}.type"))
    if field.function_call is not None:
        calls.append(_call(field.function_call.name, field.function_call))
    return calls


def _call(call_id: str, function: CalledFunction) -> ToolCall:
    given = function.arguments
    arguments = msgspec.json.encode(given).decode() if isinstance(given, dict) else given or "{}"
    return ToolCall(call_id, function.name, arguments)


def _content(field: str | list[ContentPart] | None, path: str, asked: list[Asked]) -> tuple[Part, ...]:
    if field is None:
        return ()
    if isinstance(field, str):
        return (Text(field),)
    return tuple(_part(part, f"{path}[{at}]", asked) for at, part in enumerate(field))


def _part(part: ContentPart, path: str, asked: list[Asked]) -> Part:
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, RefusalPart):
        return Text(part.refusal)
    if isinstance(part, ImagePart):
        asked.append(Asked("images", path))
        return Image(url=part.image_url.url)
    # No value carries audio or files: the request is refused before anybody looks at the empty text.
    asked.append(Asked("audio" if isinstance(part, AudioPart) else "files", path))
    return Text("")

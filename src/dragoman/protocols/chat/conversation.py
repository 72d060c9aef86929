"""Decodes the messages of a chat.

    content   := text | part* | null
    assistant := reasoning? content call*

Reasoning is read from the first of `reasoning_content`, `reasoning`, `reasoning_details` and `thinking_blocks` that has
text. A tool result does not need a matching call.
"""

from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, Image, Message, Part, Reasoning, Text, ToolCall, ToolResult
from dragoman.protocols import json_body


class ChatTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
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


ContentPart = ChatTextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallField(msgspec.Struct, frozen=True):
    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
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


def decode(field: ChatMessage, path: str, asked: list[Asked]) -> Message:
    content = _content(field.content, f"{path}.content", asked)
    if field.role == "tool" or field.role == "function":
        call_id = field.tool_call_id or field.name or ""
        shown = tuple(part for part in content if isinstance(part, Text | Image))
        return Message("tool", (ToolResult(call_id, shown, bool(field.is_error)),), field.name)
    if field.role != "assistant":
        if field.content is None:
            raise BadRequest(f"{path}.content: a {field.role} message needs content", param=f"{path}.content")
        return Message(field.role, content, field.name)
    text = field.reasoning_content or field.reasoning
    text = text or _join_text(field.reasoning_details) or _join_text(field.thinking_blocks)
    reasoning = (Reasoning(text),) if text else ()
    return Message("assistant", (*reasoning, *content, *_calls(field, path, asked)), field.name)


def _join_text(blocks: list[dict[str, Any]] | None) -> str:
    texts = [block.get(name) for block in blocks or () for name in ("text", "thinking", "summary")]
    return "".join(text for text in texts if isinstance(text, str))


def _calls(field: ChatMessage, path: str, asked: list[Asked]) -> list[ToolCall]:
    calls = []
    for at, call in enumerate(field.tool_calls or ()):
        inner = f"{path}.tool_calls[{at}]"
        if call.function is not None:
            calls.append(_call(call.id or f"call_{at}", call.function))
        elif call.type in (None, "function"):
            raise json_body.missing_field(f"{inner}.function")
        else:
            # There is no value for other kinds of calls; the feature makes the server reject the request.
            asked.append(Asked("custom_tools", f"{inner}.type"))
    if field.function_call is not None:
        calls.append(_call(field.function_call.name, field.function_call))
    return calls


def _call(call_id: str, function: CalledFunction) -> ToolCall:
    arguments = function.arguments
    text = msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or "{}"
    return ToolCall(call_id, function.name, text)


def _content(field: str | list[ContentPart] | None, path: str, asked: list[Asked]) -> tuple[Part, ...]:
    if field is None:
        return ()
    if isinstance(field, str):
        return (Text(field),)
    return tuple(_part(part, f"{path}[{at}]", asked) for at, part in enumerate(field))


def _part(part: ContentPart, path: str, asked: list[Asked]) -> Part:
    if isinstance(part, ChatTextPart):
        return Text(part.text)
    if isinstance(part, RefusalPart):
        return Text(part.refusal)
    if isinstance(part, ImagePart):
        asked.append(Asked("images", path))
        return Image(url=part.image_url.url)
    # There is no value for audio and files; the feature makes the server reject the request.
    asked.append(Asked("audio" if isinstance(part, AudioPart) else "files", path))
    return Text("")

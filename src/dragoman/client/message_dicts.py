"""Converts messages and tools that are dicts in the format of OpenAI or Anthropic.

    message := {role, content?, name?, tool_calls?, tool_call_id?, reasoning_content?}
    content := null | text | part*
    part    := text | {type: text | input_text | output_text, text} | {type: image_url | input_image, image_url}
             | {type: image, source} | {type: thinking, thinking, signature?}
             | {type: tool_use, id, name, input} | {type: tool_result, tool_use_id, content, is_error?}
    tool    := {type: function, function: {name, description?, parameters?, strict?}}        chat completions
             | {type: function, name, description?, parameters?, strict?}                    Responses
             | {name, description?, input_schema}                                            Messages

Anything else raises `BadRequest` with the path of the value.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Image, Message, Part, Reasoning, Role, Text, Tool, ToolCall, ToolResult

Dict = Mapping[str, Any]
TEXT_TYPES = ("text", "input_text", "output_text")


def message(value: Dict, path: str) -> Message:
    role: Any = value.get("role")
    if role not in get_args(Role):
        raise _error(path, f"role: expected one of {', '.join(get_args(Role))}, not {role!r:.100}")
    if role == "tool":
        call_id = value.get("tool_call_id")
        if not isinstance(call_id, str):
            raise _error(path, "a message with the role tool needs a tool_call_id")
        parts: tuple[Part, ...] = (ToolResult(call_id, _result_content(value.get("content"), path)),)
    else:
        text = value.get("reasoning_content")
        reasoning = [Reasoning(text)] if isinstance(text, str) and text else []
        parts = (*reasoning, *_parts(value.get("content"), path), *_tool_calls(value, path))
    if not parts and value.get("content") is None:
        raise _error(path, "a message needs content (text or parts) or tool_calls")
    return Message(role, parts, _string(value, "name", path, None))


def tool(value: Dict, path: str) -> Tool:
    inner = value.get("function")
    entry: Dict = inner if isinstance(inner, Mapping) else value
    name = entry.get("name")
    if not isinstance(name, str) or not name or value.get("type", "function") not in ("function", "custom"):
        raise _error(path, "expected {type: function, function: {name, description, parameters}}")
    schema = entry.get("parameters", entry.get("input_schema"))
    if not isinstance(schema, Mapping | None):
        raise _error(path, "the parameters must be a JSON schema")
    return Tool(name, _string(entry, "description", path, "") or "", schema, strict=entry.get("strict") is True)


def _tool_calls(value: Dict, path: str) -> list[Part]:
    calls = value.get("tool_calls")
    if not isinstance(calls, list | tuple | None):
        raise _error(path, "tool_calls: expected a list")
    return [_tool_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(calls or ())]


def _tool_call(value: object, path: str) -> ToolCall:
    inner = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(inner, Mapping):
        raise _error(path, "expected {id, type: function, function: {name, arguments}}")
    return _make_call(value.get("id"), inner.get("name"), inner.get("arguments", "{}"), path)


def _make_call(call_id: object, name: object, arguments: object, path: str) -> ToolCall:
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise _error(path, "a tool call needs an id and a name")
    if isinstance(arguments, str):
        return ToolCall(call_id, name, arguments)
    try:
        return ToolCall(call_id, name, msgspec.json.encode(arguments).decode())
    except (TypeError, ValueError) as error:
        raise _error(path, f"the arguments cannot be encoded as JSON: {error}") from error


def _parts(content: object, path: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    if not isinstance(content, list | tuple):
        raise _error(path, f"content: expected text or a list of parts, not {type(content).__name__}")
    return tuple(_part(part, f"{path}.content[{at}]") for at, part in enumerate(content))


def _part(value: object, path: str) -> Part:
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Text | Image | Reasoning | ToolCall | ToolResult):
        return value
    if not isinstance(value, Mapping):
        raise _error(path, f"expected a dict with a type, not {type(value).__name__}")
    kind = value.get("type")
    if kind in TEXT_TYPES and isinstance(value.get("text"), str):
        return Text(value["text"])
    if kind in ("image_url", "input_image", "image"):
        return _image(value, path)
    if kind == "thinking" and isinstance(value.get("thinking"), str):
        return Reasoning(value["thinking"], _string(value, "signature", path, None))
    if kind == "tool_use":
        return _make_call(value.get("id"), value.get("name"), value.get("input", {}), path)
    if kind == "tool_result" and isinstance(value.get("tool_use_id"), str):
        return ToolResult(
            value["tool_use_id"], _result_content(value.get("content"), path), value.get("is_error") is True
        )
    raise _error(path, f"a part of type {kind!r:.100} is unknown or lacks a required field")


def _result_content(content: object, path: str) -> tuple[Text | Image, ...]:
    parts = _parts(content, path)
    if not all(isinstance(part, Text | Image) for part in parts):
        raise _error(path, "a tool result may contain only text and images")
    return tuple(part for part in parts if isinstance(part, Text | Image))


def _image(value: Dict, path: str) -> Image:
    source = value.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        try:
            return Image(base64.b64decode(source["data"], validate=True), source.get("media_type"))
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise _error(path, "the image data is not valid base64") from error
    inner = source if isinstance(source, Mapping) else value.get("image_url")
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    if not isinstance(url, str):
        raise _error(path, "an image needs a URL (http:, https: or data:)")
    return Image(url=url)


def _string(fields: Dict, name: str, path: str, default: str | None) -> str | None:
    value = fields.get(name, default)
    if not isinstance(value, str | None):
        raise _error(path, f"{name}: expected a string")
    return value


def _error(path: str, message: str) -> BadRequest:
    return BadRequest(f"{path}: {message}", param=path)

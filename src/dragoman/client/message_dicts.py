"""Messages and tools as programs for OpenAI's and Anthropic's own clients have them: dicts, in either's words.

    message := {role, content?, name?, tool_calls?, tool_call_id?, reasoning_content?}
    content := null | text | part*
    part    := text | {type: text | input_text | output_text, text} | {type: image_url | input_image, image_url}
             | {type: image, source} | {type: thinking, thinking, signature?}
             | {type: tool_use, id, name, input} | {type: tool_result, tool_use_id, content, is_error?}
    tool    := {type: function, function: {name, description?, parameters?, strict?}}        chat completions
             | {type: function, name, description?, parameters?, strict?}                    Responses
             | {name, description?, input_schema}                                            Messages

What is not among these is a `BadRequest` that says where it stands.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Image, Message, Part, Reasoning, Role, Text, Tool, ToolCall, ToolResult

Dict = Mapping[str, Any]
WRITTEN = ("text", "input_text", "output_text")


def message(given: Dict, path: str) -> Message:
    role: Any = given.get("role")
    if role not in get_args(Role):
        raise _wrong(path, f"role: expected one of {', '.join(get_args(Role))}, not {role!r:.100}")
    if role == "tool":
        parts: tuple[Part, ...] = (_answer(given, path),)
    else:
        parts = (*_thought(given), *_parts(given.get("content"), path), *_calls(given, path))
    if not parts and given.get("content") is None:
        raise _wrong(path, "a message needs a content (text or parts), or tool_calls")
    return Message(role, parts, _word(given, "name", path, None))


def tool(given: Dict, path: str) -> Tool:
    inner = given.get("function")
    entry: Dict = inner if isinstance(inner, Mapping) else given
    name = entry.get("name")
    if not isinstance(name, str) or not name or given.get("type", "function") not in ("function", "custom"):
        raise _wrong(path, "expected {type: function, function: {name, description, parameters}}")
    schema = entry.get("parameters", entry.get("input_schema"))
    if not isinstance(schema, Mapping | None):
        raise _wrong(path, "the parameters are no JSON schema")
    return Tool(name, _word(entry, "description", path, "") or "", schema, strict=entry.get("strict") is True)


def _thought(given: Dict) -> list[Part]:
    told = given.get("reasoning_content")
    return [Reasoning(told)] if isinstance(told, str) and told else []


def _answer(given: Dict, path: str) -> ToolResult:
    call_id = given.get("tool_call_id")
    if not isinstance(call_id, str):
        raise _wrong(path, "the result of a tool needs the tool_call_id of the call")
    return ToolResult(call_id, _shown(given.get("content"), path))


def _calls(given: Dict, path: str) -> list[Part]:
    calls = given.get("tool_calls")
    if not isinstance(calls, list | tuple | None):
        raise _wrong(path, "tool_calls: expected a list")
    return [_call(call, f"{path}.tool_calls[{at}]") for at, call in enumerate(calls or ())]


def _call(given: object, path: str) -> ToolCall:
    inner = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(inner, Mapping):
        raise _wrong(path, "expected {id, type: function, function: {name, arguments}}")
    return _made(given.get("id"), inner.get("name"), inner.get("arguments", "{}"), path)


def _made(call_id: object, name: object, arguments: object, path: str) -> ToolCall:
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise _wrong(path, "a call needs an id and a name")
    return ToolCall(call_id, name, arguments if isinstance(arguments, str) else _json(arguments, path))


def _json(arguments: object, path: str) -> str:
    try:
        return msgspec.json.encode(arguments).decode()
    except (TypeError, ValueError) as error:
        raise _wrong(path, f"the arguments are no JSON: {error}") from error


def _parts(content: object, path: str) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    if not isinstance(content, list | tuple):
        raise _wrong(path, f"content: expected text or a list of parts, not {type(content).__name__}")
    return tuple(_part(part, f"{path}.content[{at}]") for at, part in enumerate(content))


def _part(given: object, path: str) -> Part:
    if isinstance(given, str):
        return Text(given)
    if isinstance(given, Text | Image | Reasoning | ToolCall | ToolResult):
        return given
    if not isinstance(given, Mapping):
        raise _wrong(path, f"expected a dict with a type, not {type(given).__name__}")
    kind = given.get("type")
    if kind in WRITTEN and isinstance(given.get("text"), str):
        return Text(given["text"])
    if kind in ("image_url", "input_image", "image"):
        return _image(given, path)
    if kind == "thinking" and isinstance(given.get("thinking"), str):
        return Reasoning(given["thinking"], _word(given, "signature", path, None))
    if kind == "tool_use":
        return _made(given.get("id"), given.get("name"), given.get("input", {}), path)
    if kind == "tool_result" and isinstance(given.get("tool_use_id"), str):
        return ToolResult(given["tool_use_id"], _shown(given.get("content"), path), given.get("is_error") is True)
    raise _wrong(path, f"a part of type {kind!r:.100} is not known here, or lacks what belongs to it")


def _shown(content: object, path: str) -> tuple[Text | Image, ...]:
    parts = _parts(content, path)
    if not all(isinstance(part, Text | Image) for part in parts):
        raise _wrong(path, "the result of a tool is made of text and images")
    return tuple(part for part in parts if isinstance(part, Text | Image))


def _image(given: Dict, path: str) -> Image:
    source = given.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        try:
            return Image(base64.b64decode(source["data"], validate=True), source.get("media_type"))
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise _wrong(path, "the data of the image is no base64") from error
    inner = source if isinstance(source, Mapping) else given.get("image_url")
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    if not isinstance(url, str):
        raise _wrong(path, "an image needs an address, also one that begins with data:")
    return Image(url=url)


def _word(given: Dict, name: str, path: str, default: str | None) -> str | None:
    value = given.get(name, default)
    if not isinstance(value, str | None):
        raise _wrong(path, f"{name}: expected text")
    return value


def _wrong(path: str, words: str) -> BadRequest:
    return BadRequest(f"{path}: {words}", param=path)

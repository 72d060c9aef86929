"""Messages and tools as chat templates know them: the mappings of Hugging Face's templates.

    message := {role, content, name?, tool_calls?, tool_call_id?, thought?}
    tool    := {type: "function", function: {name, description, parameters}}

Every string that comes from a request passes through `data`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.request import Message, Reasoning, Tool, ToolCall, ToolResult
from dragoman.prompt.template_capabilities import Habits

Change = Callable[[str], str]

SCHEMA_WORDS = {
    *("type", "properties", "required", "items", "enum", "const", "default", "description", "title", "format", "name"),
    *("parameters", "additionalProperties", "anyOf", "oneOf", "allOf", "$ref", "$defs"),
    *("object", "array", "string", "integer", "number", "boolean", "null"),
}
"""Templates read these in a tool's schema, so they stay themselves; none of them is a piece to be afraid of."""


def entries(messages: Iterable[Message], habits: Habits, data: Change) -> Iterator[dict[str, Any]]:
    for message in messages:
        # Parts are joined before they are changed: two of them may be the halves of a control text.
        entry: dict[str, Any] = {"role": message.role, "content": _content(data(message.text), habits)}
        if message.name is not None:
            entry["name"] = data(message.name)
        entry |= _belongings(message, habits, data)
        yield entry


def _content(text: str, habits: Habits) -> Any:
    return [{"type": "text", "text": text}] if habits.parts else text


def _belongings(message: Message, habits: Habits, data: Change) -> dict[str, Any]:
    found: dict[str, Any] = {}
    calls = [_call(part, habits, data) for part in message.parts if isinstance(part, ToolCall)]
    if calls:
        found["tool_calls"] = calls
        if habits.null_content and not message.text:
            found["content"] = None
    thoughts = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    if thoughts and habits.reasoning is not None:
        found[habits.reasoning] = data(thoughts)
    for part in message.parts:
        if isinstance(part, ToolResult):
            found["tool_call_id"] = data(part.call_id)
    return found


def _call(call: ToolCall, habits: Habits, data: Change) -> dict[str, Any]:
    arguments = call.arguments.strip() or "{}" if habits.arguments_as_text else arguments_of(call)
    return {
        "id": data(call.id),
        "type": "function",
        "function": {"name": data(call.name), "arguments": changed(arguments, data)},
    }


def arguments_of(call: ToolCall) -> Any:
    """The object they are; the text itself if a model wrote something else."""
    if not call.arguments.strip():
        return {}
    try:
        parsed = msgspec.json.decode(call.arguments)
    except DECODE_ERRORS:
        return call.arguments
    return parsed if isinstance(parsed, dict) else call.arguments


def function(tool: Tool, data: Change) -> dict[str, Any]:
    schema = {"type": "object", "properties": {}} if tool.parameters is None else changed(dict(tool.parameters), data)
    described = {"name": data(tool.name), "description": data(tool.description), "parameters": schema}
    return {"type": "function", "function": described}


def changed(value: Any, data: Change) -> Any:
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else data(value)
    if isinstance(value, dict):
        return {changed(key, data): changed(inner, data) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [changed(inner, data) for inner in value]
    return value

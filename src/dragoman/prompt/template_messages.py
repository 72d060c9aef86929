"""Converts messages and tools to the dicts that Hugging Face chat templates expect.

    message := {role, content, name?, tool_calls?, tool_call_id?, reasoning?}
    tool    := {type: "function", function: {name, description, parameters}}

Every string from a request is passed through `mark`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.core.request import Message, Role, Text, Tool, ToolCall, ToolResult

TextTransform = Callable[[str], str]

SCHEMA_WORDS = {
    *("type", "properties", "required", "items", "enum", "const", "default", "description", "title", "format", "name"),
    *("parameters", "additionalProperties", "anyOf", "oneOf", "allOf", "$ref", "$defs"),
    *("object", "array", "string", "integer", "number", "boolean", "null"),
}
"""Templates look for these in schemas, so they are not marked. They cannot form control texts."""


class Capabilities(msgspec.Struct, frozen=True):
    """What a template accepts and shows. `content_parts`: it requires content as a list of parts."""

    content_parts: bool = False
    system: bool = True
    multiple_systems: bool = True
    """Several system messages at the beginning."""
    system_with_results: bool = True
    """Some templates show the system message only before a question, not after tool results."""
    late_system: bool = True
    repeated_roles: bool = True
    """Consecutive messages of the same role."""
    assistant_first: bool = True
    tools: bool = True
    calls: bool = True
    parallel_calls: bool = True
    text_with_calls: bool = True
    text_with_thought: bool = True
    """Text next to calls if there is also reasoning."""
    arguments_as_text: bool = False
    null_content: bool = False
    """It shows calls only if the content is null, not an empty string."""
    results: bool = True
    names: bool = True
    reasoning_key: str | None = "reasoning_content"
    """The message key from which it reads the reasoning of earlier turns, if any."""
    effort_levels: frozenset[str] = frozenset()
    """The values it accepts for `reasoning_effort`."""


def text_message(role: Role, text: str) -> Message:
    return Message(role, (Text(text),))


def to_template_messages(
    messages: Iterable[Message], capabilities: Capabilities, mark: TextTransform
) -> Iterator[dict[str, Any]]:
    for message in messages:
        # Join the parts first: a control text may be split across two of them.
        text = mark(message.text)
        content = [{"type": "text", "text": text}] if capabilities.content_parts else text
        entry: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            entry["name"] = mark(message.name)
        if message.tool_calls:
            entry["tool_calls"] = [_call(call, capabilities, mark) for call in message.tool_calls]
            if capabilities.null_content and not message.text:
                entry["content"] = None
        if message.reasoning and capabilities.reasoning_key is not None:
            entry[capabilities.reasoning_key] = mark(message.reasoning)
        for part in message.parts:
            if isinstance(part, ToolResult):
                entry["tool_call_id"] = mark(part.call_id)
        yield entry


def _call(call: ToolCall, capabilities: Capabilities, mark: TextTransform) -> dict[str, Any]:
    arguments = call.arguments.strip() or "{}" if capabilities.arguments_as_text else parse_arguments(call)
    return {
        "id": mark(call.id),
        "type": "function",
        "function": {"name": mark(call.name), "arguments": transform_strings(arguments, mark)},
    }


def parse_arguments(call: ToolCall) -> Any:
    """Return the arguments as an object, or the text itself if it is not a JSON object."""
    if not call.arguments.strip():
        return {}
    try:
        parsed = msgspec.json.decode(call.arguments)
    except DECODE_ERRORS:
        return call.arguments
    return parsed if isinstance(parsed, dict) else call.arguments


def to_template_tool(tool: Tool, mark: TextTransform) -> dict[str, Any]:
    schema = (
        {"type": "object", "properties": {}}
        if tool.parameters is None
        else transform_strings(dict(tool.parameters), mark)
    )
    described = {"name": mark(tool.name), "description": mark(tool.description), "parameters": schema}
    return {"type": "function", "function": described}


def transform_strings(value: Any, mark: TextTransform) -> Any:
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else mark(value)
    if isinstance(value, dict):
        return {transform_strings(key, mark): transform_strings(inner, mark) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [transform_strings(inner, mark) for inner in value]
    return value

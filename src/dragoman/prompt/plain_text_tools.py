"""Writes tools, calls and results as plain text, for templates that do not support them.

Calls use the syntax of the model's format, because the model's own calls are parsed with it.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from dragoman.core.request import Message, Reasoning, Text, Tool, ToolCall
from dragoman.formats.syntax import (
    Braced,
    CallSection,
    CallSyntax,
    JsonCall,
    ModelFormat,
    NamedJson,
    Tagged,
    split_fields,
)
from dragoman.prompt.template_messages import Capabilities, parse_arguments, text_message, to_template_tool

EXAMPLE = ToolCall("", "NAME", '{"PARAMETER": "value"}')


def write_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], capabilities: Capabilities, model_format: ModelFormat
) -> list[Message]:
    """Move everything that the template does not show into the text of the messages."""
    folded = [_message_as_text(message, capabilities, model_format) for message in messages]
    if tools and not capabilities.tools:
        description = _describe_tools(tools, model_format)
        if not folded or folded[0].role != "system":
            return [text_message("system", description), *folded]
        folded[0] = replace(folded[0], parts=(*folded[0].parts, Text(f"\n\n{description}")))
    return folded


def format_calls(calls: Sequence[ToolCall], model_format: ModelFormat) -> str:
    section = _call_section(model_format)
    texts = [_format_call(call, index, section.call) for index, call in enumerate(calls)]
    if section.is_list:
        texts = [f"[{', '.join(texts)}]"]
    if section.multiple:
        return f"{section.open}{(section.separator or chr(10)).join(texts)}{section.close}"
    return "\n".join(f"{section.open}{text}{section.close}" for text in texts)


def _describe_tools(tools: Iterable[Tool], model_format: ModelFormat) -> str:
    offered = "\n".join(_dump(to_template_tool(tool, str)) for tool in tools)
    section = _call_section(model_format)
    if section.open or not isinstance(section.call, JsonCall):
        how = f"To call a function, write\n{format_calls([EXAMPLE], model_format)}"
    else:
        how = f"To call a function, answer with JSON and nothing else: {format_calls([EXAMPLE], model_format)}"
    return f"You may call these functions:\n<tools>\n{offered}\n</tools>\n{how}"


def _message_as_text(message: Message, capabilities: Capabilities, model_format: ModelFormat) -> Message:
    if not capabilities.results and message.role == "tool":
        name = f' name="{message.name}"' if message.name else ""
        return text_message("user", f"<tool_response{name}>\n{message.text}\n</tool_response>")
    if capabilities.calls or not message.tool_calls:
        return message
    rest = [part for part in message.parts if isinstance(part, Reasoning)]
    text = "\n".join(filter(None, [message.text, format_calls(message.tool_calls, model_format)]))
    return Message("assistant", (*rest, Text(text)), message.name)


def _call_section(model_format: ModelFormat) -> CallSection:
    return model_format.calls[0] if model_format.calls else CallSection(JsonCall())


def _format_call(call: ToolCall, index: int, syntax: CallSyntax) -> str:
    arguments = parse_arguments(call)
    if isinstance(syntax, JsonCall):
        return _dump({syntax.name[0]: call.name, syntax.arguments[0]: arguments})
    if isinstance(syntax, NamedJson):
        fields = {"{name}": call.name, "{index}": str(index), "{id}": call.id}
        text = arguments if isinstance(arguments, str) else _dump(arguments)
        return _fill_template(syntax.begins[0], fields) + text + syntax.end
    parameters = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    if isinstance(syntax, Tagged):
        body = "".join(_format_parameter(key, value, syntax) for key, value in parameters.items())
        return _fill_template(syntax.function, {"{name}": call.name}) + body + syntax.function_end
    if isinstance(syntax, Braced):
        inner = ",".join(f"{key}:{_format_braced(value, syntax)}" for key, value in parameters.items())
        return f"{syntax.prefix}{call.name}{{{inner}}}"
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in parameters.items())})"


def _format_parameter(key: str, value: Any, syntax: Tagged) -> str:
    plain = isinstance(value, str)
    begin = _fill_template(syntax.parameter, {"{key}": key, "{string}": "true" if plain else "false"})
    return f"{begin}{value if plain else _dump(value)}{syntax.value_end}"


def _format_braced(value: Any, syntax: Braced) -> str:
    if isinstance(value, str):
        return f"{syntax.quote}{value}{syntax.quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_format_braced(inner, syntax)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_format_braced(inner, syntax) for inner in value) + "]"
    return _dump(value)


def _fill_template(template: str, fields: dict[str, str]) -> str:
    return "".join(fields.get(piece, piece) for piece in split_fields(template))


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

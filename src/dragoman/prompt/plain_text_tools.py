"""Tools, calls and results as plain text, for templates that know nothing of them.

A call is written as the model's format declares it, since that is how the model's own calls will be read.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dragoman.core.request import Message, Reasoning, Text, Tool, ToolCall
from dragoman.formats.syntax import (
    Braced,
    Calls,
    CallSyntax,
    JsonCall,
    ModelFormat,
    NamedJson,
    Pythonic,
    Tagged,
    cut_at_fields,
)
from dragoman.prompt.message_folding import text_message
from dragoman.prompt.template_capabilities import Habits
from dragoman.prompt.template_messages import arguments_of, function

EXAMPLE = ToolCall("", "NAME", '{"PARAMETER": "value"}')


def told(messages: Sequence[Message], tools: Sequence[Tool], habits: Habits, form: ModelFormat) -> list[Message]:
    """What the template would not show is part of the text."""
    found = [_spoken(message, habits, form) for message in messages]
    if tools and not habits.tools:
        found = _described(found, _description(tools, form))
    return found


def written(calls: Sequence[ToolCall], form: ModelFormat) -> str:
    section = _section(form)
    texts = [_call(call, at, section.call) for at, call in enumerate(calls)]
    if (isinstance(section.call, JsonCall) and section.call.array) or isinstance(section.call, Pythonic):
        texts = [f"[{', '.join(texts)}]"]
    if section.several:
        return f"{section.open}{(section.between or chr(10)).join(texts)}{section.close}"
    return "\n".join(f"{section.open}{text}{section.close}" for text in texts)


def _described(messages: list[Message], description: str) -> list[Message]:
    if messages and messages[0].role == "system":
        lead = Message("system", (*messages[0].parts, Text(f"\n\n{description}")), messages[0].name)
        return [lead, *messages[1:]]
    return [text_message("system", description), *messages]


def _description(tools: Iterable[Tool], form: ModelFormat) -> str:
    offered = "\n".join(_json(function(tool, str)) for tool in tools)
    section = _section(form)
    if section.open or not isinstance(section.call, JsonCall):
        how = f"To call a function, write\n{written([EXAMPLE], form)}"
    else:
        how = f"To call a function, answer with JSON and nothing else: {written([EXAMPLE], form)}"
    return f"You may call these functions:\n<tools>\n{offered}\n</tools>\n{how}"


def _spoken(message: Message, habits: Habits, form: ModelFormat) -> Message:
    if not habits.results and message.role == "tool":
        name = f' name="{message.name}"' if message.name else ""
        return text_message("user", f"<tool_response{name}>\n{message.text}\n</tool_response>")
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    if habits.calls or not calls:
        return message
    rest = tuple(part for part in message.parts if isinstance(part, Reasoning))
    text = "\n".join(filter(None, [message.text, written(calls, form)]))
    return Message("assistant", (*rest, Text(text)), message.name)


def _section(form: ModelFormat) -> Calls:
    return form.calls[0] if form.calls else Calls(JsonCall())


def _call(call: ToolCall, index: int, syntax: CallSyntax) -> str:
    arguments = arguments_of(call)
    if isinstance(syntax, JsonCall):
        return _json({syntax.name[0]: call.name, syntax.arguments[0]: arguments})
    if isinstance(syntax, NamedJson):
        fields = {"{name}": call.name, "{index}": str(index), "{id}": call.id}
        text = arguments if isinstance(arguments, str) else _json(arguments)
        return _filled(syntax.begins[0], fields) + text + syntax.end
    given = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    if isinstance(syntax, Tagged):
        body = "".join(_parameter(key, value, syntax) for key, value in given.items())
        return _filled(syntax.function, {"{name}": call.name}) + body + syntax.function_end
    if isinstance(syntax, Braced):
        inner = ",".join(f"{key}:{_braced(value, syntax)}" for key, value in given.items())
        return f"{syntax.prefix}{call.name}{{{inner}}}"
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _parameter(key: str, value: Any, syntax: Tagged) -> str:
    plain = isinstance(value, str)
    begin = _filled(syntax.parameter, {"{key}": key, "{string}": "true" if plain else "false"})
    return f"{begin}{value if plain else _json(value)}{syntax.value_end}"


def _braced(value: Any, syntax: Braced) -> str:
    if isinstance(value, str):
        return f"{syntax.quote}{value}{syntax.quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braced(inner, syntax)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_braced(inner, syntax) for inner in value) + "]"
    return _json(value)


def _filled(template: str, fields: dict[str, str]) -> str:
    return "".join(fields.get(piece, piece) for piece in cut_at_fields(template))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

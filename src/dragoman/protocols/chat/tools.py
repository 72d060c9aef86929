"""Decodes the tools of a chat and the tool choice.

    tools       := ({type: function, function: {name, description, parameters, strict}})*
    tool_choice := none | auto | required | {type: function, function: {name}}
                 | {type: allowed_tools, allowed_tools: {mode: auto | required, tools: ({function: {name}})*}}

`functions` and `function_call` are the older fields for the same. A request that uses only those gets its reply in the
older form: see `LEGACY_TOOLS` in `server.py`. Tools of other types are valid but unsupported.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.tools import check_count, decode_tool, duplicate_error, no_tools_error


class FunctionField(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatToolField(msgspec.Struct, frozen=True):
    type: str
    function: FunctionField | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTools(msgspec.Struct, frozen=True):
    tools: "list[ChatToolChoice]"
    mode: Literal["auto", "required"] = "auto"


class ChatToolChoice(msgspec.Struct, frozen=True):
    """A tool, or several if the type is `allowed_tools`."""

    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ToolFields(msgspec.Struct, frozen=True):
    tools: list[ChatToolField] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionField] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None


FIELDS = frozenset(ToolFields.__struct_fields__)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools that the choice allows, and the choice."""
    fields = json_body.convert(parsed, ToolFields)
    asked_before = len(asked)
    if fields.tools or fields.functions:
        name = "tools" if fields.tools else "functions"
        check_count(len(fields.tools or ()) + len(fields.functions or ()), name)
        asked.append(Asked(Feature.TOOLS, name))
    tools: dict[str, Tool] = {}
    for path, function in _functions(fields, asked):
        tool = decode_tool(path, function.name, function.description, function.parameters, function.strict, asked)
        if tool.name in tools:
            raise duplicate_error(tool.name, path)
        tools[tool.name] = tool
    choice, allowed = _choice(fields, tools, asked)
    if not any(entry.feature == Feature.CUSTOM_TOOLS for entry in asked[asked_before:]):
        path = _choice_field_name(fields)
        if choice.mode in ("required", "named") and not allowed:
            raise no_tools_error(path)
        if choice.mode == "named" and choice.name not in allowed:
            raise BadRequest(f"{path}: no tool named {quote(choice.name)}", param=path)
    return tuple(allowed.values()), choice


def _functions(fields: ToolFields, asked: list[Asked]) -> Iterator[tuple[str, FunctionField]]:
    """Yield the functions of both fields with their paths."""
    for at, tool in enumerate(fields.tools or ()):
        path = f"tools[{at}]"
        if tool.type != "function":
            asked.append(Asked(Feature.CUSTOM_TOOLS, f"{path}.type"))
        elif tool.function is None:
            raise json_body.missing_field(f"{path}.function")
        else:
            yield f"{path}.function", tool.function
    for at, function in enumerate(fields.functions or ()):
        yield f"functions[{at}]", function


def _choice(fields: ToolFields, tools: dict[str, Tool], asked: list[Asked]) -> tuple[ToolChoice, dict[str, Tool]]:
    """Return the tool choice and the tools that it allows."""
    # `function_call` cannot express a second call.
    parallel = fields.parallel_tool_calls is not False and (bool(fields.tools) or not fields.functions)
    choice = fields.tool_choice or fields.function_call
    if isinstance(choice, ChatToolChoice):
        if choice.type == "allowed_tools":
            return _allowed(choice.allowed_tools, tools, parallel, asked)
        if choice.type != "function":
            asked.append(Asked(Feature.CUSTOM_TOOLS, "tool_choice.type"))
            return ToolChoice(parallel=parallel), tools
        if choice.function is None:
            raise json_body.missing_field("tool_choice.function")
        choice = choice.function
    if choice == "required" or isinstance(choice, NamedFunction):
        asked.append(Asked(Feature.CONSTRAINT, _choice_field_name(fields)))
    if isinstance(choice, NamedFunction):
        return ToolChoice("named", choice.name, parallel), tools
    return ToolChoice(choice or "auto", None, parallel), tools


def _choice_field_name(fields: ToolFields) -> str:
    return "tool_choice" if fields.tool_choice is not None else "function_call"


def _allowed(
    field: AllowedTools | None, tools: dict[str, Tool], parallel: bool, asked: list[Asked]
) -> tuple[ToolChoice, dict[str, Tool]]:
    if field is None:
        raise json_body.missing_field("tool_choice.allowed_tools")
    check_count(len(field.tools), "tool_choice.allowed_tools.tools")
    names: set[str] = set()
    for at, allowed in enumerate(field.tools):
        path = f"tool_choice.allowed_tools.tools[{at}]"
        if allowed.type != "function":
            asked.append(Asked(Feature.CUSTOM_TOOLS, f"{path}.type"))
        elif allowed.function is None or allowed.function.name not in tools:
            raise BadRequest(f"{path}: not a tool of this request", param=path)
        else:
            names.add(allowed.function.name)
    if field.mode == "required":
        asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
    return ToolChoice(field.mode, None, parallel), {name: tool for name, tool in tools.items() if name in names}

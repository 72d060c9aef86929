"""Decodes the tools of a chat and the tool choice.

    tools       := ({type: function, function: {name, description, parameters, strict}})*
    tool_choice := none | auto | required | {type: function, function: {name}}
                 | {type: allowed_tools, allowed_tools: {mode: auto | required, tools: ({function: {name}})*}}

`functions` and `function_call` are the older fields for the same. A request that uses only those gets its reply in the
older form: see `is_legacy`. Tools of other types are valid but unsupported.

The checks used by every protocol are here too: tool names, the number of tools, and the schema of the arguments.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, GenerationRequest, Tool, ToolChoice
from dragoman.protocols import json_body

Mode = Literal["auto", "none", "required", "named"]
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
MAX_TOOLS = 1024


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


class NamedTool(msgspec.Struct, frozen=True):
    function: NamedFunction | None = None
    type: str = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ChatToolChoice(msgspec.Struct, frozen=True):
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
AUTO = ToolChoice()


def check_name(name: str | None, path: str) -> str:
    if name is None:
        raise json_body.missing_field(path)
    if not NAME.fullmatch(name):
        raise BadRequest(f"{path}: expected 1 to 128 letters, digits or . _ - : /", param=path)
    return name


def check_schema(schema: Mapping[str, Any] | None, path: str) -> None:
    """Check that the schema allows an object; it may omit the type or allow other types too."""
    kind = (schema or {}).get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        where = f"{path}.type"
        raise BadRequest(f"{where}: must be 'object', not {quote(kind)}", param=where)


def check_count(count: int, path: str) -> None:
    if count > MAX_TOOLS:
        raise BadRequest(f"{path}: at most {MAX_TOOLS} tools, not {count}", param=path)


def no_tools_error(path: str) -> BadRequest:
    return BadRequest(f"{path}: a tool call is required, but the request has no tools", param=path)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> tuple[tuple[Tool, ...], ToolChoice]:
    if parsed.keys().isdisjoint(FIELDS):
        return (), AUTO
    fields = json_body.convert(parsed, ToolFields)
    asked_before = len(asked)
    if fields.tools or fields.functions:
        name = "tools" if fields.tools else "functions"
        check_count(len(fields.tools or ()) + len(fields.functions or ()), name)
        asked.append(Asked("tools", name))
    tools = _tools(fields, asked)
    choice, tools = _choice(fields, tools, asked)
    if not any(entry.feature == "custom_tools" for entry in asked[asked_before:]):
        _check(choice, tools, _choice_field_name(fields))
    return tools, choice


def is_legacy(request: GenerationRequest) -> bool:
    """Whether the reply must report calls as `function_call`."""
    return "functions" in [asked.param for asked in request.asked]


def _tools(fields: ToolFields, asked: list[Asked]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for path, function in _functions(fields, asked):
        where = f"{path}.name"
        if check_name(function.name, where) in tools:
            raise BadRequest(f"{where}: duplicate tool name {function.name!r}", param=where)
        if function.strict:
            asked.append(Asked("strict_tools", f"{path}.strict"))
        schema_path = f"{path}.parameters"
        check_schema(function.parameters, schema_path)
        description, is_strict = function.description or "", bool(function.strict)
        tools[function.name] = Tool(function.name, description, function.parameters, is_strict, schema_path)
    return tuple(tools.values())


def _functions(fields: ToolFields, asked: list[Asked]) -> Iterator[tuple[str, FunctionField]]:
    """Yield the functions of both fields with their paths."""
    for at, tool in enumerate(fields.tools or ()):
        path = f"tools[{at}]"
        if tool.type != "function":
            asked.append(Asked("custom_tools", f"{path}.type"))
        elif tool.function is None:
            raise json_body.missing_field(f"{path}.function")
        else:
            yield f"{path}.function", tool.function
    for at, function in enumerate(fields.functions or ()):
        yield f"functions[{at}]", function


def _choice(fields: ToolFields, tools: tuple[Tool, ...], asked: list[Asked]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the tool choice and the tools that it allows."""
    # `function_call` cannot express a second call.
    parallel = fields.parallel_tool_calls is not False and (bool(fields.tools) or not fields.functions)
    field = fields.tool_choice
    if isinstance(field, ChatToolChoice) and field.type == "allowed_tools":
        return _allowed(field.allowed_tools, tools, parallel, asked)
    mode, name = _mode(fields, asked)
    return ToolChoice(mode, name, parallel), tools


def _mode(fields: ToolFields, asked: list[Asked]) -> tuple[Mode, str | None]:
    """Return the mode and the name of the required function."""
    choice = fields.tool_choice or fields.function_call
    if isinstance(choice, ChatToolChoice):
        if choice.type != "function":
            asked.append(Asked("custom_tools", "tool_choice.type"))
            return "auto", None
        if choice.function is None:
            raise json_body.missing_field("tool_choice.function")
        choice = choice.function
    if choice == "required" or isinstance(choice, NamedFunction):
        asked.append(Asked("constraint", _choice_field_name(fields)))
    return ("named", choice.name) if isinstance(choice, NamedFunction) else (choice or "auto", None)


def _choice_field_name(fields: ToolFields) -> str:
    return "tool_choice" if fields.tool_choice is not None else "function_call"


def _allowed(
    field: AllowedTools | None, tools: tuple[Tool, ...], parallel: bool, asked: list[Asked]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    if field is None:
        raise json_body.missing_field("tool_choice.allowed_tools")
    check_count(len(field.tools), "tool_choice.allowed_tools.tools")
    known = {tool.name for tool in tools}
    names: set[str] = set()
    for at, allowed in enumerate(field.tools):
        path = f"tool_choice.allowed_tools.tools[{at}]"
        if allowed.type != "function":
            asked.append(Asked("custom_tools", f"{path}.type"))
        elif allowed.function is None or allowed.function.name not in known:
            raise BadRequest(f"{path}: not a tool of this request", param=path)
        else:
            names.add(allowed.function.name)
    if field.mode == "required":
        asked.append(Asked("constraint", "tool_choice"))
    return ToolChoice(field.mode, None, parallel), tuple(tool for tool in tools if tool.name in names)


def _check(choice: ToolChoice, tools: Sequence[Tool], path: str) -> None:
    if choice.mode in ("required", "named") and not tools:
        raise no_tools_error(path)
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise BadRequest(f"{path}: no tool named {quote(choice.name)}", param=path)

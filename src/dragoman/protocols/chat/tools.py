"""The tools of a chat, and which of them the model may or must call.

    tools       := ({type: function, function: {name, description, parameters, strict}})*
    tool_choice := none | auto | required | {type: function, function: {name}}
                 | {type: allowed_tools, allowed_tools: {mode: auto | required, tools: ({function: {name}})*}}

`functions` and `function_call` are the older words for the same. Who uses only those is answered in them: see
`is_legacy`. Tools that are no functions are not a mistake, just nothing that is offered here.

The rules that hold in every protocol are here too: what a tool may be called, how many there may be, that its arguments
are an object, and that one must be there if one must be called.
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
MOST = 1024
"""Tools of one request."""


class FunctionField(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, frozen=True):
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


class ChoiceField(msgspec.Struct, frozen=True):
    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ToolFields(msgspec.Struct, frozen=True):
    tools: list[ToolField] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionField] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None


FIELDS = frozenset(ToolFields.__struct_fields__)
AUTO = ToolChoice()


def checked_name(name: str | None, path: str) -> str:
    if name is None:
        raise json_body.missing(path)
    if not NAME.fullmatch(name):
        raise BadRequest(f"{path}: a name has 1 to 128 letters, digits and . _ - : / only", param=path)
    return name


def check_schema(schema: Mapping[str, Any] | None, path: str) -> None:
    """A schema may leave its type out, or allow others besides: arguments are an object all the same."""
    kind = (schema or {}).get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        where = f"{path}.type"
        raise BadRequest(f"{where}: the arguments of a tool are an object, not {quote(kind)}", param=where)


def check_count(count: int, path: str) -> None:
    if count > MOST:
        raise BadRequest(f"{path}: at most {MOST} tools, not {count}", param=path)


def nothing_to_call(path: str) -> BadRequest:
    return BadRequest(f"{path}: a call is required, but there are no tools", param=path)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> tuple[tuple[Tool, ...], ToolChoice]:
    if parsed.keys().isdisjoint(FIELDS):
        return (), AUTO
    fields = json_body.convert(parsed, ToolFields)
    noted = len(asked)
    if fields.tools or fields.functions:
        word = "tools" if fields.tools else "functions"
        check_count(len(fields.tools or ()) + len(fields.functions or ()), word)
        asked.append(Asked("tools", word))
    tools = _tools(fields, asked)
    choice, tools = _choice(fields, tools, asked)
    if not any(entry.feature == "custom_tools" for entry in asked[noted:]):
        _check(choice, tools, _word(fields))
    return tools, choice


def is_legacy(request: GenerationRequest) -> bool:
    """Whether calls are to be told as `function_call`."""
    return "functions" in [asked.param for asked in request.asked]


def _tools(fields: ToolFields, asked: list[Asked]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for path, function in _functions(fields, asked):
        where = f"{path}.name"
        if checked_name(function.name, where) in tools:
            raise BadRequest(f"{where}: another tool is called {function.name!r} already", param=where)
        if function.strict:
            asked.append(Asked("strict_tools", f"{path}.strict"))
        schema = f"{path}.parameters"
        check_schema(function.parameters, schema)
        words, strict = function.description or "", bool(function.strict)
        tools[function.name] = Tool(function.name, words, function.parameters, strict, schema)
    return tuple(tools.values())


def _functions(fields: ToolFields, asked: list[Asked]) -> Iterator[tuple[str, FunctionField]]:
    """Every function with its path, whichever word it came by."""
    for at, tool in enumerate(fields.tools or ()):
        path = f"tools[{at}]"
        if tool.type != "function":
            asked.append(Asked("custom_tools", f"{path}.type"))
        elif tool.function is None:
            raise json_body.missing(f"{path}.function")
        else:
            yield f"{path}.function", tool.function
    for at, function in enumerate(fields.functions or ()):
        yield f"functions[{at}]", function


def _choice(fields: ToolFields, tools: tuple[Tool, ...], asked: list[Asked]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it leaves."""
    # The older words have no way to tell of a second call.
    parallel = fields.parallel_tool_calls is not False and (bool(fields.tools) or not fields.functions)
    field = fields.tool_choice
    if isinstance(field, ChoiceField) and field.type == "allowed_tools":
        return _allowed(field.allowed_tools, tools, parallel, asked)
    mode, name = _mode(fields, asked)
    return ToolChoice(mode, name, parallel), tools


def _mode(fields: ToolFields, asked: list[Asked]) -> tuple[Mode, str | None]:
    """What is chosen, and the name of the function that must be called."""
    choice = fields.tool_choice or fields.function_call
    if isinstance(choice, ChoiceField):
        if choice.type != "function":
            asked.append(Asked("custom_tools", "tool_choice.type"))
            return "auto", None
        if choice.function is None:
            raise json_body.missing("tool_choice.function")
        choice = choice.function
    if choice == "required" or isinstance(choice, NamedFunction):
        asked.append(Asked("constraint", _word(fields)))
    return ("named", choice.name) if isinstance(choice, NamedFunction) else (choice or "auto", None)


def _word(fields: ToolFields) -> str:
    return "tool_choice" if fields.tool_choice is not None else "function_call"


def _allowed(
    field: AllowedTools | None, tools: tuple[Tool, ...], parallel: bool, asked: list[Asked]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    if field is None:
        raise json_body.missing("tool_choice.allowed_tools")
    check_count(len(field.tools), "tool_choice.allowed_tools.tools")
    known = {tool.name for tool in tools}
    names: set[str] = set()
    for at, allowed in enumerate(field.tools):
        path = f"tool_choice.allowed_tools.tools[{at}]"
        if allowed.type != "function":
            asked.append(Asked("custom_tools", f"{path}.type"))
        elif allowed.function is None or allowed.function.name not in known:
            raise BadRequest(f"{path}: names no tool of this request", param=path)
        else:
            names.add(allowed.function.name)
    if field.mode == "required":
        asked.append(Asked("constraint", "tool_choice"))
    return ToolChoice(field.mode, None, parallel), tuple(tool for tool in tools if tool.name in names)


def _check(choice: ToolChoice, tools: Sequence[Tool], path: str) -> None:
    if choice.mode in ("required", "named") and not tools:
        raise nothing_to_call(path)
    if choice.mode == "named" and choice.name not in {tool.name for tool in tools}:
        raise BadRequest(f"{path}: no tool is called {quote(choice.name)}", param=path)

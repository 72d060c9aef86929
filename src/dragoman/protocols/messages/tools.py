"""The tools of a request, and which of them the model may or must call.

tool        := {name, input_schema, …}                         the client runs it
             | {type: one that `typed` knows, name, …}         the client runs it, Anthropic has described it
             | {type, …}                                       a server would run it: not offered, and reported
tool_choice := {type: auto | any | tool | none, name?, disable_parallel_tool_use?}
"""

from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.chat import tools as functions
from dragoman.protocols.messages import anthropic_tools


class ToolField(msgspec.Struct, frozen=True):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ChoiceField(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def decode(
    fields: list[dict[str, Any]], choice: ChoiceField | None, asked: list[Asked]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    functions.check_count(len(fields), "tools")
    tools: dict[str, Tool] = {}
    for at, given in enumerate(fields):
        path = f"tools[{at}]"
        tool = _tool(given, path, asked)
        if tool is not None:
            if tool.name in tools:
                where = f"{path}.name"
                raise BadRequest(f"{where}: another tool is called {tool.name!r} already", param=where)
            tools[tool.name] = tool
    if tools:
        asked.append(Asked("tools", "tools"))
    return tuple(tools.values()), _choice(choice, tools, fields, asked)


def _tool(given: dict[str, Any], path: str, asked: list[Asked]) -> Tool | None:
    field = json_body.convert(given, ToolField, path)
    kind = field.type or "custom"
    described = None if kind == "custom" else anthropic_tools.describe(kind, given)
    if kind != "custom" and described is None:
        asked.append(Asked("server_tools", f"{path}.type"))
        return None
    name = functions.checked_name(field.name, f"{path}.name")
    if described is None and field.input_schema is None:
        raise json_body.missing(f"{path}.input_schema")
    functions.check_schema(field.input_schema, f"{path}.input_schema")
    if field.strict:
        asked.append(Asked("strict_tools", f"{path}.strict"))
    description, schema = described or (field.description or "", field.input_schema)
    return Tool(name, description, schema, bool(field.strict), f"{path}.input_schema")


def _choice(
    field: ChoiceField | None, tools: dict[str, Tool], given: list[dict[str, Any]], asked: list[Asked]
) -> ToolChoice:
    if field is None:
        return ToolChoice()
    parallel = not field.disable_parallel_tool_use
    if field.type in ("auto", "none"):
        return ToolChoice("none" if field.type == "none" else "auto", None, parallel)
    if field.type == "tool" and field.name is None:
        raise json_body.missing("tool_choice.name")
    if _is_not_offered(field, tools, given):
        asked.append(Asked("server_tools", "tool_choice"))
        return ToolChoice("auto", None, parallel)
    asked.append(Asked("constraint", "tool_choice"))
    if not tools:
        raise functions.nothing_to_call("tool_choice")
    if field.type == "any":
        return ToolChoice("required", None, parallel)
    if field.name not in tools:
        raise BadRequest(f"tool_choice.name: no tool is called {quote(field.name)}", param="tool_choice.name")
    return ToolChoice("named", field.name, parallel)


def _is_not_offered(field: ChoiceField, tools: dict[str, Tool], given: list[dict[str, Any]]) -> bool:
    """Whether what must be called is there, but would be run by a server."""
    names = {tool.get("name") for tool in given}
    return bool(given) and (not tools if field.type == "any" else field.name in names and field.name not in tools)

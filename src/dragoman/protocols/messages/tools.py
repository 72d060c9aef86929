"""Decodes the tools of a request and the tool choice.

tool        := {name, input_schema, …}                            run by the client
             | {type: one of `anthropic_tools`, name, …}          run by the client, defined by Anthropic
             | {type, …}                                          run by a server: unsupported, added to `asked`
tool_choice := {type: auto | any | tool | none, name?, disable_parallel_tool_use?}
"""

from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.chat import tools as functions
from dragoman.protocols.messages import anthropic_tools


class AnthropicTool(msgspec.Struct, frozen=True):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def decode(
    fields: list[dict[str, Any]], choice: AnthropicToolChoice | None, asked: list[Asked]
) -> tuple[tuple[Tool, ...], ToolChoice]:
    functions.check_count(len(fields), "tools")
    tools: dict[str, Tool] = {}
    for at, raw in enumerate(fields):
        path = f"tools[{at}]"
        tool = _tool(raw, path, asked)
        if tool is not None:
            if tool.name in tools:
                raise BadRequest(f"{path}.name: duplicate tool name {tool.name!r}", param=f"{path}.name")
            tools[tool.name] = tool
    if tools:
        asked.append(Asked("tools", "tools"))
    return tuple(tools.values()), _choice(choice, tools, fields, asked)


def _tool(raw: dict[str, Any], path: str, asked: list[Asked]) -> Tool | None:
    field = json_body.convert(raw, AnthropicTool, path)
    kind = field.type or "custom"
    definition = None if kind == "custom" else anthropic_tools.find_definition(kind, raw)
    if kind != "custom" and definition is None:
        asked.append(Asked("server_tools", f"{path}.type"))
        return None
    name = functions.check_name(field.name, f"{path}.name")
    if definition is None and field.input_schema is None:
        raise json_body.missing_field(f"{path}.input_schema")
    functions.check_schema(field.input_schema, f"{path}.input_schema")
    if field.strict:
        asked.append(Asked("strict_tools", f"{path}.strict"))
    description, schema = definition or (field.description or "", field.input_schema)
    return Tool(name, description, schema, bool(field.strict), f"{path}.input_schema")


def _choice(
    field: AnthropicToolChoice | None, tools: dict[str, Tool], raw: list[dict[str, Any]], asked: list[Asked]
) -> ToolChoice:
    if field is None:
        return ToolChoice()
    parallel = not field.disable_parallel_tool_use
    if field.type in ("auto", "none"):
        return ToolChoice("none" if field.type == "none" else "auto", None, parallel)
    if field.type == "tool" and field.name is None:
        raise json_body.missing_field("tool_choice.name")
    if _requires_server_tool(field, tools, raw):
        asked.append(Asked("server_tools", "tool_choice"))
        return ToolChoice("auto", None, parallel)
    asked.append(Asked("constraint", "tool_choice"))
    if not tools:
        raise functions.no_tools_error("tool_choice")
    if field.type == "any":
        return ToolChoice("required", None, parallel)
    if field.name not in tools:
        raise BadRequest(f"tool_choice.name: no tool named {quote(field.name)}", param="tool_choice.name")
    return ToolChoice("named", field.name, parallel)


def _requires_server_tool(field: AnthropicToolChoice, tools: dict[str, Tool], raw: list[dict[str, Any]]) -> bool:
    """Whether the required tool exists but would run on a server."""
    if field.type == "any":
        return bool(raw) and not tools
    return field.name not in tools and field.name in {tool.get("name") for tool in raw}

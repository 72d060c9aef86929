"""Decodes the tools of a request and the tool choice.

tool        := {name, input_schema, …}                            run by the client
             | {type: bash_* | text_editor_* | …, name, …}        run by the client, defined by Anthropic
             | {type: mcp_toolset, …}                             run by a server, see `mcp`
             | {type, …}                                          run by another server: unsupported, added to `asked`
tool_choice := {type: auto | any | tool | none, name?, disable_parallel_tool_use?}

The types of Anthropic's own tools are bash_*, text_editor_*, computer_* and memory_*, where * is the date of a version.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.messages.mcp import TOOLSET
from dragoman.protocols.tools import check_count, decode_tool, duplicate_error, no_tools_error

Schema = dict[str, Any]
Definition = tuple[str, Schema]
"""A description and the schema of the input."""


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
    fields: list[dict[str, Any]], choice: AnthropicToolChoice | None, asked: list[Asked], has_servers: bool = False
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """`has_servers`: whether servers have more tools, which are not known yet."""
    check_count(len(fields), "tools")
    tools: dict[str, Tool] = {}
    for at, raw in enumerate(fields):
        path = f"tools[{at}]"
        tool = _tool(raw, path, asked)
        if tool is not None:
            if tool.name in tools:
                raise duplicate_error(tool.name, path)
            tools[tool.name] = tool
    if tools:
        asked.append(Asked(Feature.TOOLS, "tools"))
    return tuple(tools.values()), _choice(choice, tools, fields, asked, has_servers)


def _tool(raw: dict[str, Any], path: str, asked: list[Asked]) -> Tool | None:
    field = json_body.convert(raw, AnthropicTool, path)
    description, schema = field.description, field.input_schema
    if field.type == TOOLSET:
        return None
    if field.type not in (None, "custom"):
        definition = _definition(field.type or "", raw)
        if definition is None:
            asked.append(Asked(Feature.SERVER_TOOLS, f"{path}.type"))
            return None
        description, schema = definition
    elif schema is None and field.name is not None:
        raise json_body.missing_field(f"{path}.input_schema")
    return decode_tool(path, field.name, description, schema, field.strict, asked, "input_schema")


def _choice(
    field: AnthropicToolChoice | None,
    tools: dict[str, Tool],
    raw: list[dict[str, Any]],
    asked: list[Asked],
    has_servers: bool,
) -> ToolChoice:
    if field is None:
        return ToolChoice()
    parallel = not field.disable_parallel_tool_use
    if field.type in ("auto", "none"):
        return ToolChoice("none" if field.type == "none" else "auto", None, parallel)
    if field.type == "tool" and field.name is None:
        raise json_body.missing_field("tool_choice.name")
    if has_servers:
        asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
        return ToolChoice("required" if field.type == "any" else "named", field.name, parallel)
    if field.type == "any":
        runs_on_server = bool(raw) and not tools
    else:
        runs_on_server = field.name not in tools and field.name in {tool.get("name") for tool in raw}
    if runs_on_server:
        asked.append(Asked(Feature.SERVER_TOOLS, "tool_choice"))
        return ToolChoice("auto", None, parallel)
    asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
    if not tools:
        raise no_tools_error("tool_choice")
    if field.type == "any":
        return ToolChoice("required", None, parallel)
    if field.name not in tools:
        raise BadRequest(f"tool_choice.name: no tool named {quote(field.name)}", param="tool_choice.name")
    return ToolChoice("named", field.name, parallel)


def _definition(kind: str, field: Mapping[str, Any]) -> Definition | None:
    """Return None for a tool that a server runs and for a set of tools."""
    if "_toolset_" in kind:
        return None
    if kind.startswith("bash_"):
        return BASH
    if kind.startswith("memory_"):
        return MEMORY
    if kind.startswith("text_editor_"):
        return _text_editor(kind)
    return _computer(field) if kind.startswith("computer_") else None


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _string(description: str) -> Schema:
    return {"type": "string", "description": description}


def _enum(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _integers(count: int) -> Schema:
    return {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": count}


BASH: Definition = (
    "Run a command in a bash shell that stays open between calls, and return its output.",
    _object(
        {
            "command": _string("The command to run. Required unless `restart` is set."),
            "restart": {"type": "boolean", "description": "Restart the shell instead of running a command."},
        }
    ),
)
FILES: Schema = {
    "path": {"type": "string"},
    "view_range": _integers(2) | {"description": "For view: the first and the last line to show, -1 for the end."},
    "file_text": _string("For create: the text of the file."),
    "old_str": _string("For str_replace: the text to replace; it must occur exactly once."),
    "new_str": _string("For str_replace: the replacement text."),
    "insert_line": {"type": "integer", "description": "For insert: the number of the line to insert after."},
    "insert_text": _string("For insert: the text to insert."),
}
PATHS = {"old_path": _string("For rename: the current path."), "new_path": _string("For rename: the new path.")}
COMMANDS = ("view", "create", "str_replace", "insert")
MEMORY: Definition = (
    "Keep notes in files under /memories that outlive this conversation. Read them first, save what matters.",
    _object({"command": _enum(*COMMANDS, "delete", "rename")} | FILES | PATHS, "command"),
)
OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")


def _text_editor(kind: str) -> Definition:
    commands, files = _enum(*COMMANDS), FILES
    if kind in OLD_EDITORS:
        commands = _enum(*COMMANDS, "undo_edit")
        files = FILES | {"new_str": _string("For str_replace and insert: the new text.")}
        del files["insert_text"]
    return "View, create and edit text files.", _object({"command": commands} | files, "command", "path")


ACTIONS = (
    *("screenshot", "key", "type", "hold_key", "wait"),
    *("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag"),
    *("left_mouse_down", "left_mouse_up", "mouse_move", "cursor_position", "scroll"),
)


def _computer(field: Mapping[str, Any]) -> Definition:
    fields: Schema = {
        "action": _enum(*ACTIONS),
        "coordinate": _integers(2) | {"description": "Pixels from the left and from the top."},
        "start_coordinate": _integers(2) | {"description": "For left_click_drag: the start."},
        "text": _string("The text to type, the keys to press, or the keys held during a click."),
        "scroll_direction": _enum("up", "down", "left", "right"),
        "scroll_amount": {"type": "integer"},
        "duration": {"type": "number", "description": "Seconds, for hold_key and wait."},
    }
    if field.get("enable_zoom"):
        fields |= {"action": _enum(*ACTIONS, "zoom"), "region": _integers(4)}
    width, height = field.get("display_width_px"), field.get("display_height_px")
    size = f" The screen is {width} by {height} pixels." if width and height else ""
    return f"View the screen and use the mouse and keyboard of a computer.{size}", _object(fields, "action")

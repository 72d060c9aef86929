"""Descriptions and schemas of the tools that Anthropic defines and clients run.

bash_*, text_editor_*, computer_*, memory_*        the rest of the type is the version date
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]
Definition = tuple[str, Schema]
"""A description and the schema of the input."""

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
POINT: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def find_definition(kind: str, field: Mapping[str, Any]) -> Definition | None:
    """Return None for a tool that a server runs and for a set of tools."""
    if "_toolset_" in kind:
        return None
    return next((define(kind, field) for prefix, define in DEFINITIONS.items() if kind.startswith(prefix)), None)


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _bash(kind: str, field: Mapping[str, Any]) -> Definition:
    restart = {"type": "boolean", "description": "Restart the shell instead of running a command."}
    command = {"type": "string", "description": "The command to run. Required unless `restart` is set."}
    return "Run a command in a bash shell that stays open between calls, and return its output.", _object(
        {"command": command, "restart": restart}
    )


FILES: Schema = {
    "path": STRING,
    "view_range": POINT | {"description": "For view: the first and the last line to show, -1 for the end."},
    "file_text": {"type": "string", "description": "For create: the text of the file."},
    "old_str": {"type": "string", "description": "For str_replace: the text to replace; it must occur exactly once."},
    "new_str": {"type": "string", "description": "For str_replace: the text to put there."},
    "insert_line": {"type": "integer", "description": "For insert: the number of the line to insert after."},
    "insert_text": {"type": "string", "description": "For insert: the text to insert."},
}
OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")


def _text_editor(kind: str, field: Mapping[str, Any]) -> Definition:
    description = "View, create and edit text files."
    if kind not in OLD_EDITORS:
        commands = _commands("view", "create", "str_replace", "insert")
        return description, _object({"command": commands} | FILES, "command", "path")
    commands = _commands("view", "create", "str_replace", "insert", "undo_edit")
    inserted = {"type": "string", "description": "For str_replace and insert: the text to put there."}
    fields = {name: field for name, field in FILES.items() if name != "insert_text"} | {"new_str": inserted}
    return description, _object({"command": commands} | fields, "command", "path")


def _memory(kind: str, field: Mapping[str, Any]) -> Definition:
    commands = _commands("view", "create", "str_replace", "insert", "delete", "rename")
    renamed = {
        "old_path": {"type": "string", "description": "For rename: the current path."},
        "new_path": {"type": "string", "description": "For rename: the new path."},
    }
    description = (
        "Keep notes in files under /memories that outlive this conversation. Read them first; save what matters."
    )
    return description, _object({"command": commands} | FILES | renamed, "command")


POINTER = (
    *("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag"),
    *("left_mouse_down", "left_mouse_up", "mouse_move", "cursor_position", "scroll"),
)


def _computer(kind: str, field: Mapping[str, Any]) -> Definition:
    actions = ["screenshot", "key", "type", "hold_key", "wait", *POINTER]
    fields: Schema = {
        "action": {"type": "string", "enum": actions},
        "coordinate": POINT | {"description": "Pixels from the left and from the top."},
        "start_coordinate": POINT | {"description": "For left_click_drag: the start."},
        "text": {
            "type": "string",
            "description": "The text to type, keys to press, or keys held during a click.",
        },
        "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
        "scroll_amount": INTEGER,
        "duration": {"type": "number", "description": "Seconds, for hold_key and wait."},
    }
    if field.get("enable_zoom"):
        actions.append("zoom")
        fields["region"] = {"type": "array", "items": INTEGER, "minItems": 4, "maxItems": 4}
    width, height = field.get("display_width_px"), field.get("display_height_px")
    size = f" The screen is {width} by {height} pixels." if width and height else ""
    return f"View the screen and use the mouse and keyboard of a computer.{size}", _object(fields, "action")


DEFINITIONS: dict[str, Callable[[str, Mapping[str, Any]], Definition]] = {
    "bash_": _bash,
    "text_editor_": _text_editor,
    "computer_": _computer,
    "memory_": _memory,
}

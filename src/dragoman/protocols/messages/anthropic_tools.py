"""Descriptions and schemas of the tools that Anthropic defines and clients run.

bash_*, text_editor_*, computer_*, memory_*        the rest of the type is the version date
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]
Definition = tuple[str, Schema]
"""A description and the schema of the input."""


def find_definition(kind: str, field: Mapping[str, Any]) -> Definition | None:
    """Return None for a tool that a server runs and for a set of tools."""
    if "_toolset_" in kind:
        return None
    return next((define(kind, field) for prefix, define in DEFINITIONS.items() if kind.startswith(prefix)), None)


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _string(description: str) -> Schema:
    return {"type": "string", "description": description}


def _enum(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _integers(count: int) -> Schema:
    return {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": count}


def _bash(kind: str, field: Mapping[str, Any]) -> Definition:
    fields = {
        "command": _string("The command to run. Required unless `restart` is set."),
        "restart": {"type": "boolean", "description": "Restart the shell instead of running a command."},
    }
    return "Run a command in a bash shell that stays open between calls, and return its output.", _object(fields)


FILES: Schema = {
    "path": {"type": "string"},
    "view_range": _integers(2) | {"description": "For view: the first and the last line to show, -1 for the end."},
    "file_text": _string("For create: the text of the file."),
    "old_str": _string("For str_replace: the text to replace; it must occur exactly once."),
    "new_str": _string("For str_replace: the replacement text."),
    "insert_line": {"type": "integer", "description": "For insert: the number of the line to insert after."},
    "insert_text": _string("For insert: the text to insert."),
}
OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")


def _text_editor(kind: str, field: Mapping[str, Any]) -> Definition:
    commands, files = ["view", "create", "str_replace", "insert"], FILES
    if kind in OLD_EDITORS:
        commands.append("undo_edit")
        files = FILES | {"new_str": _string("For str_replace and insert: the new text.")}
        del files["insert_text"]
    return "View, create and edit text files.", _object({"command": _enum(*commands)} | files, "command", "path")


def _memory(kind: str, field: Mapping[str, Any]) -> Definition:
    commands = _enum("view", "create", "str_replace", "insert", "delete", "rename")
    paths = {"old_path": _string("For rename: the current path."), "new_path": _string("For rename: the new path.")}
    description = (
        "Keep notes in files under /memories that outlive this conversation. Read them first, save what matters."
    )
    return description, _object({"command": commands} | FILES | paths, "command")


ACTIONS = (
    *("screenshot", "key", "type", "hold_key", "wait"),
    *("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag"),
    *("left_mouse_down", "left_mouse_up", "mouse_move", "cursor_position", "scroll"),
)


def _computer(kind: str, field: Mapping[str, Any]) -> Definition:
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


DEFINITIONS: dict[str, Callable[[str, Mapping[str, Any]], Definition]] = {
    "bash_": _bash,
    "text_editor_": _text_editor,
    "computer_": _computer,
    "memory_": _memory,
}

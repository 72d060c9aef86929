"""Tools that Anthropic has schemas for, and that a client runs: what the model is told of them.

bash_*, text_editor_*, computer_*, memory_*        the rest of the type is the day of its version
"""

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]
Described = tuple[str, Schema]
"""A description, and the schema of the input."""

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
POINT: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}


def describe(kind: str, given: Mapping[str, Any]) -> Described | None:
    """None for a type that a client does not run, or that it runs as a set of tools."""
    if "_toolset_" in kind:
        return None
    return next((tell(kind, given) for prefix, tell in TOLD.items() if kind.startswith(prefix)), None)


def _object(properties: Schema, *required: str) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def _bash(kind: str, given: Mapping[str, Any]) -> Described:
    restart = {"type": "boolean", "description": "Start the shell anew instead of running a command."}
    command = {"type": "string", "description": "The command to run. Needed unless the shell is started anew."}
    words = "Run a command in a bash shell that stays open between calls, and see what it prints."
    return words, _object({"command": command, "restart": restart})


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


def _text_editor(kind: str, given: Mapping[str, Any]) -> Described:
    words = "View, create and edit text files."
    if kind not in OLD_EDITORS:
        commands = _commands("view", "create", "str_replace", "insert")
        return words, _object({"command": commands} | FILES, "command", "path")
    commands = _commands("view", "create", "str_replace", "insert", "undo_edit")
    inserted = {"type": "string", "description": "For str_replace and insert: the text to put there."}
    fields = {name: field for name, field in FILES.items() if name != "insert_text"} | {"new_str": inserted}
    return words, _object({"command": commands} | fields, "command", "path")


def _memory(kind: str, given: Mapping[str, Any]) -> Described:
    commands = _commands("view", "create", "str_replace", "insert", "delete", "rename")
    renamed = {
        "old_path": {"type": "string", "description": "For rename: the path as it is."},
        "new_path": {"type": "string", "description": "For rename: the path as it shall be."},
    }
    words = "Keep notes in files below /memories that outlive this conversation: look there first, write what matters."
    return words, _object({"command": commands} | FILES | renamed, "command")


POINTER = (
    *("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag"),
    *("left_mouse_down", "left_mouse_up", "mouse_move", "cursor_position", "scroll"),
)


def _computer(kind: str, given: Mapping[str, Any]) -> Described:
    actions = [
        "screenshot",
        "key",
        "type",
        "hold_key",
        "wait",
        *POINTER,
        *(["zoom"] if given.get("enable_zoom") else []),
    ]
    fields: Schema = {
        "action": {"type": "string", "enum": actions},
        "coordinate": POINT | {"description": "Pixels from the left and from the top."},
        "start_coordinate": POINT | {"description": "For left_click_drag: where it begins."},
        "text": {"type": "string", "description": "The text to type, the keys to press, or those held during a click."},
        "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
        "scroll_amount": INTEGER,
        "duration": {"type": "number", "description": "Seconds, for hold_key and wait."},
    }
    if given.get("enable_zoom"):
        fields["region"] = {"type": "array", "items": INTEGER, "minItems": 4, "maxItems": 4}
    width, height = given.get("display_width_px"), given.get("display_height_px")
    size = f" The screen is {width} by {height} pixels." if width and height else ""
    return f"See the screen and use the mouse and the keyboard of a computer.{size}", _object(fields, "action")


TOLD: dict[str, Callable[[str, Mapping[str, Any]], Described]] = {
    "bash_": _bash,
    "text_editor_": _text_editor,
    "computer_": _computer,
    "memory_": _memory,
}

"""Tools that have items of their own for a call and its result. To the model every tool is a function.

    tool         what the model sees                          the call on the wire
    function     itself                                       function_call
    custom       a function of one text, `input`              custom_tool_call: the text
    local_shell  command, working_directory, timeout_ms       local_shell_call: an action
    shell        commands, timeout_ms, max_output_length      shell_call: an action
    apply_patch  type, path, diff                             apply_patch_call: an operation
    tool_search  the parameters it comes with                 tool_search_call: arguments as an object

A call whose arguments do not fit its item is told as a function_call: nothing that the model wrote is lost.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.protocols.responses import custom_tool_text

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]


class Called(msgspec.Struct, frozen=True):
    """A tool as the caller knows it."""

    kind: Kind
    name: str
    namespace: str | None = None


PREFIXES: dict[Kind, str] = {
    "function": "fc_",
    "custom": "ctc_",
    "local_shell": "lsh_",
    "shell": "sh_",
    "apply_patch": "apc_",
    "tool_search": "tsc_",
}
_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}


def _object(required: tuple[str, ...], **properties: Any) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SCHEMAS: dict[Kind, Mapping[str, Any]] = {
    "custom": _object((custom_tool_text.NAME,), **{custom_tool_text.NAME: _TEXT}),
    "local_shell": _object(("command",), command=_TEXTS, working_directory=_TEXT, timeout_ms=_NUMBER),
    "shell": _object(("commands",), commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
    "apply_patch": _object(
        ("type", "path"),
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path=_TEXT,
        diff=_TEXT,
    ),
    "tool_search": _object(("query",), query=_TEXT),
}
DESCRIPTIONS: dict[Kind, str] = {
    "local_shell": "Runs a command, given as a list of its words, on the user's machine.",
    "shell": "Runs shell commands on the user's machine and returns what they print.",
    "apply_patch": "Creates, updates or deletes one file. `diff` is a V4A diff: lines that begin with +, - or a space.",
    "tool_search": "Finds further tools.",
}


class LocalShellArguments(msgspec.Struct, frozen=True):
    command: list[str] | str
    working_directory: str | None = None
    timeout_ms: int | None = None


class ShellArguments(msgspec.Struct, frozen=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchArguments(msgspec.Struct, frozen=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


def encode_call(called: Called, call_id: str, arguments: str, item: str, status: str) -> dict[str, Any]:
    """The item of a call; `item` is the end of its id."""
    if called.kind == "custom":
        return encode_custom(called, call_id, custom_tool_text.peeled(arguments), item, status)
    told = _told(called.kind, arguments)
    if told is None:
        return encode_function(called, call_id, arguments, item, status)
    opening = {"type": f"{called.kind}_call", "id": PREFIXES[called.kind] + item, "call_id": call_id}
    # Arguments that can be read are complete, wherever the reply was cut off.
    return {**opening, "status": "completed" if status == "incomplete" else status, **told}


def encode_function(called: Called, call_id: str, arguments: str, item: str, status: str) -> dict[str, Any]:
    call = {"type": "function_call", "id": PREFIXES["function"] + item, "call_id": call_id, "name": called.name}
    return {**call, **_space(called), "arguments": arguments, "status": status}


def encode_custom(called: Called, call_id: str, text: str, item: str, status: str) -> dict[str, Any]:
    call = {"type": "custom_tool_call", "id": PREFIXES["custom"] + item, "call_id": call_id, "name": called.name}
    return {**call, **_space(called), "input": text, "status": status}


def _space(called: Called) -> dict[str, str]:
    return {} if called.namespace is None else {"namespace": called.namespace}


def _told(kind: Kind, arguments: str) -> dict[str, Any] | None:
    tell = TELLERS.get(kind)
    try:
        return None if tell is None else tell(arguments)
    except DECODE_ERRORS:
        return None


def _local_shell(arguments: str) -> dict[str, Any]:
    read = msgspec.json.decode(arguments, type=LocalShellArguments)
    command = ["bash", "-lc", read.command] if isinstance(read.command, str) else read.command
    limits = {"working_directory": read.working_directory, "timeout_ms": read.timeout_ms}
    return {"action": {"type": "exec", "command": command, "env": {}, **_given(limits)}}


def _shell(arguments: str) -> dict[str, Any]:
    read = msgspec.json.decode(arguments, type=ShellArguments)
    limits = {"timeout_ms": read.timeout_ms, "max_output_length": read.max_output_length}
    return {"action": {"commands": read.commands, **_given(limits)}, "environment": None}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Some clients take a field that is not there, and none that is null."""
    return {name: value for name, value in fields.items() if value is not None}


def _apply_patch(arguments: str) -> dict[str, Any]:
    read = msgspec.json.decode(arguments, type=PatchArguments)
    operation = {"type": read.type, "path": read.path}
    return {"operation": operation if read.type == "delete_file" else {**operation, "diff": read.diff or ""}}


def _tool_search(arguments: str) -> dict[str, Any]:
    return {"arguments": msgspec.json.decode(arguments, type=dict[str, Any]), "execution": "client"}


TELLERS: dict[Kind, Callable[[str], dict[str, Any]]] = {
    "local_shell": _local_shell,
    "shell": _shell,
    "apply_patch": _apply_patch,
    "tool_search": _tool_search,
}

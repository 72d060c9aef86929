"""Encodes tool calls. The model sees every tool as a function; the client sees calls of the tool's own type.

    tool         parameters of the function                   item of the call
    function     its own                                      function_call
    custom       one string, `input`                          custom_tool_call: the string
    local_shell  command, working_directory, timeout_ms       local_shell_call: an action
    shell        commands, timeout_ms, max_output_length      shell_call: an action
    apply_patch  type, path, diff                             apply_patch_call: an operation
    tool_search  its own                                      tool_search_call: arguments as an object

A call whose arguments do not fit its item is encoded as a function_call, so that the model's output is not lost.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.protocols.responses import custom_tool_text

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]


class ClientTool(msgspec.Struct, frozen=True):
    """The identity of a tool in the request."""

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
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}


def _object(required: tuple[str, ...], **properties: Any) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SCHEMAS: dict[Kind, Mapping[str, Any]] = {
    "custom": _object((custom_tool_text.NAME,), **{custom_tool_text.NAME: _STRING}),
    "local_shell": _object(("command",), command=_STRINGS, working_directory=_STRING, timeout_ms=_INTEGER),
    "shell": _object(("commands",), commands=_STRINGS, timeout_ms=_INTEGER, max_output_length=_INTEGER),
    "apply_patch": _object(
        ("type", "path"),
        type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        path=_STRING,
        diff=_STRING,
    ),
    "tool_search": _object(("query",), query=_STRING),
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


def encode_call(tool: ClientTool, call_id: str, arguments: str, item: str, status: str) -> dict[str, Any]:
    """Return the item of a call; `item` is the suffix of its id."""
    if tool.kind == "custom":
        return encode_custom(tool, call_id, custom_tool_text.extract_text(arguments), item, status)
    fields = _encode_arguments(tool.kind, arguments)
    if fields is None:
        return encode_function(tool, call_id, arguments, item, status)
    call = {"type": f"{tool.kind}_call", "id": PREFIXES[tool.kind] + item, "call_id": call_id}
    # Arguments that can be parsed are complete, even if the reply was cut off.
    return {**call, "status": "completed" if status == "incomplete" else status, **fields}


def encode_function(tool: ClientTool, call_id: str, arguments: str, item: str, status: str) -> dict[str, Any]:
    call = {"type": "function_call", "id": PREFIXES["function"] + item, "call_id": call_id, "name": tool.name}
    return {**call, **_namespace(tool), "arguments": arguments, "status": status}


def encode_custom(tool: ClientTool, call_id: str, text: str, item: str, status: str) -> dict[str, Any]:
    call = {"type": "custom_tool_call", "id": PREFIXES["custom"] + item, "call_id": call_id, "name": tool.name}
    return {**call, **_namespace(tool), "input": text, "status": status}


def _namespace(tool: ClientTool) -> dict[str, str]:
    return {} if tool.namespace is None else {"namespace": tool.namespace}


def _encode_arguments(kind: Kind, arguments: str) -> dict[str, Any] | None:
    encode = ENCODERS.get(kind)
    try:
        return None if encode is None else encode(arguments)
    except DECODE_ERRORS:
        return None


def _local_shell(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=LocalShellArguments)
    command = ["bash", "-lc", parsed.command] if isinstance(parsed.command, str) else parsed.command
    limits = {"working_directory": parsed.working_directory, "timeout_ms": parsed.timeout_ms}
    return {"action": {"type": "exec", "command": command, "env": {}, **_without_nulls(limits)}}


def _shell(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=ShellArguments)
    limits = {"timeout_ms": parsed.timeout_ms, "max_output_length": parsed.max_output_length}
    return {"action": {"commands": parsed.commands, **_without_nulls(limits)}, "environment": None}


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Some clients accept a missing field but not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _apply_patch(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=PatchArguments)
    operation = {"type": parsed.type, "path": parsed.path}
    return {"operation": operation if parsed.type == "delete_file" else {**operation, "diff": parsed.diff or ""}}


def _tool_search(arguments: str) -> dict[str, Any]:
    return {"arguments": msgspec.json.decode(arguments, type=dict[str, Any]), "execution": "client"}


ENCODERS: dict[Kind, Callable[[str], dict[str, Any]]] = {
    "local_shell": _local_shell,
    "shell": _shell,
    "apply_patch": _apply_patch,
    "tool_search": _tool_search,
}

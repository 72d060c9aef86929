"""Tool calls in both directions. The model sees every tool as a function; the client sees calls of the tool's own type.

    tool         parameters of the function                   item of the call
    function     its own                                      function_call
    custom       one string, `input`                          custom_tool_call: the string
    local_shell  command, working_directory, timeout_ms       local_shell_call: an action
    shell        commands, timeout_ms, max_output_length      shell_call: an action
    apply_patch  type, path, diff                             apply_patch_call: an operation
    tool_search  its own                                      tool_search_call: arguments as an object

Rules
1. A call whose arguments do not fit its item is encoded as a function_call, so that the model's output is not lost.
2. The text of a custom call is extracted while its arguments arrive. It does not depend on how they are split.
3. Arguments that start differently than {"input": "…" are parsed when complete. The text is their `input`, or their
   only string, or the arguments unchanged. If the reply is cut off, the text is the part of the string that arrived.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.protocols.json_body import without_nulls

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]
INPUT = "input"


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
ITEM_TYPES: dict[Kind, str] = {kind: f"{kind}_call" for kind in PREFIXES} | {"custom": "custom_tool_call"}
CALLS = {item_type: kind for kind, item_type in ITEM_TYPES.items()}
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}


def _object(required: tuple[str, ...], **properties: Any) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SCHEMAS: dict[Kind, Mapping[str, Any]] = {
    "custom": _object((INPUT,), **{INPUT: _STRING}),
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


class LocalShellArguments(msgspec.Struct, frozen=True, omit_defaults=True):
    command: list[str] | str
    working_directory: str | None = None
    timeout_ms: int | None = None


class ShellArguments(msgspec.Struct, frozen=True, omit_defaults=True):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchArguments(msgspec.Struct, frozen=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class CallFields(msgspec.Struct, frozen=True):
    """The item of a call; the fields depend on the type."""

    call_id: str | None = None
    id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str = ""
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


def decode_arguments(kind: Kind, item: CallFields) -> str:
    """Return the arguments of the function with which the model makes this call."""
    if kind == "custom":
        return json.dumps({INPUT: item.input}, ensure_ascii=False)
    if kind in ("function", "tool_search"):
        return to_text(item.arguments) if isinstance(item.arguments, dict) else item.arguments or "{}"
    fields = (item.operation if kind == "apply_patch" else item.action) or {}
    hidden = ("type", "env", "user") if kind == "local_shell" else ()
    return to_text({name: value for name, value in fields.items() if value is not None and name not in hidden})


def to_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def encode_call(tool: ClientTool, call_id: str, text: str, item: str, status: str) -> dict[str, Any]:
    """Return the item of a call. `text` is its arguments or the input of a custom tool, `item` the suffix of its id."""
    try:
        fields = ENCODERS[tool.kind](text)
    except DECODE_ERRORS:
        tool, fields = ClientTool("function", tool.name, tool.namespace), {"arguments": text}
    call = {"type": ITEM_TYPES[tool.kind], "id": PREFIXES[tool.kind] + item, "call_id": call_id, **fields}
    if tool.kind in ("function", "custom"):
        return call | {"name": tool.name, "status": status} | without_nulls({"namespace": tool.namespace})
    # Arguments that can be parsed are complete, even if the reply was cut off.
    return call | {"status": "completed" if status == "incomplete" else status}


def _local_shell(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=LocalShellArguments)
    command = ["bash", "-lc", parsed.command] if isinstance(parsed.command, str) else parsed.command
    return {"action": {"type": "exec", "env": {}, **msgspec.to_builtins(parsed), "command": command}}


def _shell(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=ShellArguments)
    return {"action": msgspec.to_builtins(parsed), "environment": None}


def _apply_patch(arguments: str) -> dict[str, Any]:
    parsed = msgspec.json.decode(arguments, type=PatchArguments)
    operation = {"type": parsed.type, "path": parsed.path}
    return {"operation": operation if parsed.type == "delete_file" else {**operation, "diff": parsed.diff or ""}}


def _tool_search(arguments: str) -> dict[str, Any]:
    return {"arguments": msgspec.json.decode(arguments, type=dict[str, Any]), "execution": "client"}


ENCODERS: dict[Kind, Callable[[str], dict[str, Any]]] = {
    "function": lambda arguments: {"arguments": arguments},
    "custom": lambda text: {"input": text},
    "local_shell": _local_shell,
    "shell": _shell,
    "apply_patch": _apply_patch,
    "tool_search": _tool_search,
}

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_OPENING = 64
_CHARACTERS = re.compile(r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]|\\(?=u(?![0-9a-fA-F]{0,3}\Z)))*', re.DOTALL)
"""Characters and complete escape sequences, up to the end of the string or an incomplete sequence."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([^u]))", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class TextExtractor:
    """Extracts the text in the arguments of a custom tool while they arrive."""

    def __init__(self) -> None:
        self._prefix: list[str] | None = []
        """The arguments before the string; None once it has started."""
        self._may_start = True
        self._rest = ""
        """An incomplete escape sequence, or the end of the string and what follows."""

    def feed(self, arguments: str) -> str:
        """Return the next piece of the text."""
        if self._prefix is None:
            return self._read(arguments)
        self._prefix.append(arguments)
        if not self._may_start:
            return ""
        start = "".join(self._prefix)
        opening = _OPENING.match(start)
        if opening is None or opening.end() > _MAX_OPENING:
            self._may_start = len(start) < _MAX_OPENING
            return ""
        self._prefix = None
        return self._read(start[opening.end() :])

    def end(self) -> str:
        return "" if self._prefix is None else _parse_complete("".join(self._prefix))

    def _read(self, text: str) -> str:
        if self._rest.startswith('"'):
            return ""
        text = self._rest + text
        found = _CHARACTERS.match(text)
        assert found is not None
        characters, self._rest = found[0], text[found.end() :]
        if "\\" not in characters:
            return characters
        decoded = _ESCAPE.sub(_decode_escape, characters)
        if "\ud800" <= decoded[-1] <= "\udbff" and not self._rest.startswith('"'):
            # The other half of the character may follow.
            decoded, self._rest = decoded[:-1], characters[-6:] + self._rest
        return decoded.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _decode_escape(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else _SHORT.get(found[2], found[2])


def _parse_complete(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, dict):
        values = [parsed[INPUT]] if INPUT in parsed else list(parsed.values())
        if len(values) == 1 and isinstance(values[0], str):
            parsed = values[0]
    return parsed.encode("utf-8", "replace").decode() if isinstance(parsed, str) else arguments

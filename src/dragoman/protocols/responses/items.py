"""The items of a conversation, from the wire to messages.

    turn  := reasoning* message? call*              all of it one message of the assistant
    input := (message | turn | output)*

Rules
1. What the assistant does between two other items is one message: its thoughts, its text, its calls.
2. An item needs neither id nor status, a message no type, an output no call that it belongs to.
3. An item that says nothing to a model (a search that a server ran, what somebody else encrypted) is left out, and the
   response's headers say so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, Image, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult
from dragoman.protocols import json_body
from dragoman.protocols.responses import custom_tool_text, parts
from dragoman.protocols.responses.calls import Kind
from dragoman.protocols.responses.encrypted_reasoning import unseal
from dragoman.protocols.responses.tools import Offered

Item = Mapping[str, Any]
Placed = tuple[str, dict[str, Any]]
"""An item, and the path at which the request has it."""
MOST = 16_384
"""Items of one conversation."""


class Identified(msgspec.Struct, frozen=True):
    """What every item has in common. Those of some servers have ids of several hundred characters."""

    id: Annotated[str, msgspec.Meta(max_length=1024)] | None = None


class MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: parts.Content = None


class ReasoningItem(msgspec.Struct, frozen=True):
    summary: list[parts.ContentPart] | None = None
    content: list[parts.ContentPart] | None = None
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, frozen=True):
    call_id: str | None = None
    id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str = ""
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


class ShellOutput(msgspec.Struct, frozen=True):
    stdout: str = ""
    stderr: str = ""
    outcome: dict[str, Any] | None = None


class OutputItem(msgspec.Struct, frozen=True):
    call_id: str | None = None
    id: str | None = None
    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    status: str | None = None


class McpCallItem(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str = ""
    output: str | None = None
    error: Any = None


class Outputs(msgspec.Struct, frozen=True):
    output: parts.Content = None


CALLS: dict[str, Kind] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": "tool_search",
}
FOUND_TOOLS = "tool_search_output"
"""What a server finds by itself nobody has called."""
BY_ID = ("local_shell_call_output", FOUND_TOOLS)
"""Outputs whose own id may be that of the call."""
TOOLS = ("additional_tools", FOUND_TOOLS)
"""Items that bring tools along."""
UPDATE = "configuration_update"
SILENT = ("additional_tools", UPDATE)
"""Items that are no part of what was said."""


def kind_of(item: Item, path: str) -> str:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        raise json_body.missing(f"{path}.type")
    return kind


def check(items: Sequence[dict[str, Any]]) -> None:
    """What holds for an item of any kind, before anybody looks for it or keeps it."""
    check_count(len(items))
    for at, item in enumerate(items):
        json_body.convert(item, Identified, f"input[{at}]")


def check_count(count: int) -> None:
    if count > MOST:
        raise BadRequest(f"input: a conversation has at most {MOST} items, not {count}", param="input")


def tools_of(items: Sequence[Placed]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path, item in items:
        if kind_of(item, path) in TOOLS:
            yield f"{path}.tools", json_body.convert(item, OutputItem, path).tools or []


def decode(items: Sequence[Placed], offered: Offered, asked: list[Asked]) -> tuple[Message, ...]:
    history = _History(offered, asked)
    for path, item in items:
        history.read(kind_of(item, path), path, item)
    history.end_turn()
    return tuple(history.messages)


class _History:
    def __init__(self, offered: Offered, asked: list[Asked]) -> None:
        self.messages: list[Message] = []
        self._offered = offered
        self._asked = asked
        self._thoughts: list[Reasoning] = []
        self._said: tuple[Part, ...] = ()
        self._calls: list[ToolCall] = []

    def read(self, kind: str, path: str, item: dict[str, Any]) -> None:
        if kind == "message":
            self._message(path, json_body.convert(item, MessageItem, path))
        elif kind == "reasoning":
            self._reasoning(path, json_body.convert(item, ReasoningItem, path))
        elif kind in CALLS:
            self._call(CALLS[kind], path, json_body.convert(item, CallItem, path))
        elif kind == "mcp_call":
            self._mcp_call(json_body.convert(item, McpCallItem, path))
        elif kind in OUTPUTS:
            self._output(kind, path, json_body.convert(item, OutputItem, path))
        elif kind not in SILENT:
            self._asked.append(Asked("items", path))

    def end_turn(self) -> None:
        turn = (*self._thoughts, *self._said, *self._calls)
        if turn:
            self.messages.append(Message("assistant", turn))
        self._thoughts, self._said, self._calls = [], (), []

    def _message(self, path: str, item: MessageItem) -> None:
        content = parts.decode(item.content, f"{path}.content", self._asked)
        if item.role != "assistant":
            if item.content is None:
                raise json_body.missing(f"{path}.content")
            self._add(item.role, content)
            return
        if self._said:
            self.end_turn()
        self._said = content

    def _add(self, role: Role, content: tuple[Part, ...]) -> None:
        self.end_turn()
        self.messages.append(Message(role, content))

    def _reasoning(self, path: str, item: ReasoningItem) -> None:
        told = _joined(item.content) or _joined(item.summary)
        sealed = item.encrypted_content
        thought = told or (unseal(sealed) if sealed else "")
        if thought is None:
            self._asked.append(Asked("items", f"{path}.encrypted_content"))
        elif thought:
            if self._said or self._calls:
                self.end_turn()
            self._thoughts.append(Reasoning(thought))

    def _call(self, kind: Kind, path: str, item: CallItem) -> None:
        name = item.name if kind in ("function", "custom") else kind
        if not name:
            raise json_body.missing(f"{path}.name")
        shown = self._offered.name(kind, name, item.namespace)
        self._calls.append(ToolCall(item.call_id or item.id or "", shown, _arguments(kind, item)))

    def _mcp_call(self, item: McpCallItem) -> None:
        self._calls.append(ToolCall(item.id, item.name, item.arguments or "{}"))
        failed = item.error is not None
        output = _text(item.error) if failed else item.output or ""
        self._add("tool", (ToolResult(item.id, (Text(output),), failed),))

    def _output(self, kind: str, path: str, item: OutputItem) -> None:
        call_id = item.call_id or (item.id if kind in BY_ID else None)
        if not call_id and kind != FOUND_TOOLS:
            raise json_body.missing(f"{path}.call_id")
        content = OUTPUTS[kind](item, f"{path}.output", self._asked)
        self._add("tool", (ToolResult(call_id or "", content, item.status == "failed"),))


def _joined(texts: Sequence[parts.ContentPart] | None) -> str:
    return "\n\n".join(part.text for part in texts or () if isinstance(part, parts.TextPart))


def _arguments(kind: Kind, item: CallItem) -> str:
    """What the model wrote, or would have, to make this call."""
    if kind == "custom":
        return custom_tool_text.wrap(item.input)
    if kind in ("function", "tool_search"):
        given = item.arguments
        return _text(given) if isinstance(given, dict) else given or "{}"
    told = (item.operation if kind == "apply_patch" else item.action) or {}
    hidden = ("type", "env", "user") if kind == "local_shell" else ()
    return _text({name: value for name, value in told.items() if value is not None and name not in hidden})


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


Output = Callable[[OutputItem, str, list[Asked]], tuple[Text | Image, ...]]


def _any_output(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if not isinstance(item.output, list):
        return () if item.output is None else (Text(_text(item.output)),)
    inner = path.removesuffix(".output")
    return parts.decode(json_body.convert({"output": item.output}, Outputs, inner).output, path, asked)


def _shell_output(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if not isinstance(item.output, list):
        return _any_output(item, path, asked)
    printed = [_printed(json_body.convert(run, ShellOutput, f"{path}[{at}]")) for at, run in enumerate(item.output)]
    return (Text("\n".join(printed)),)


def _printed(run: ShellOutput) -> str:
    outcome = run.outcome or {}
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
    return "\n".join(text.rstrip("\n") for text in (run.stdout, run.stderr, f"({ended})") if text)


def _found_tools(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    names = [tool["name"] for tool in item.tools or () if isinstance(tool.get("name"), str)]
    return (Text(f"found: {', '.join(names)}" if names else "nothing was found"),)


OUTPUTS: dict[str, Output] = {
    "function_call_output": _any_output,
    "custom_tool_call_output": _any_output,
    "local_shell_call_output": _any_output,
    "apply_patch_call_output": _any_output,
    "shell_call_output": _shell_output,
    FOUND_TOOLS: _found_tools,
}

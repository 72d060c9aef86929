"""Converts the items of a conversation to messages.

    turn  := reasoning* message? call*              one message of the assistant
    input := (message | turn | output)*

Rules
1. Consecutive items of the assistant are one message: its reasoning, its text, its calls.
2. Ids, statuses and the type of a message are optional. An output need not have a matching call.
3. Items without content for the model (hosted searches, reasoning encrypted by other servers) are skipped and named in
   the response headers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, Image, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult
from dragoman.protocols import json_body
from dragoman.protocols.responses import custom_tool_text, parts
from dragoman.protocols.responses.calls import Kind
from dragoman.protocols.responses.tools import ToolSet

Item = Mapping[str, Any]
LocatedItem = tuple[str, dict[str, Any]]
"""The path of an item in the request, and the item."""
MAX_ITEMS = 16_384


class ItemId(msgspec.Struct, frozen=True):
    """The id of an item of any type. Ids of some servers have several hundred characters."""

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


class OutputContent(msgspec.Struct, frozen=True):
    output: parts.Content = None


CALLS: dict[str, Kind] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
    "tool_search_call": "tool_search",
}
TOOL_SEARCH_OUTPUT = "tool_search_output"
"""May lack a call id, because a server may search without a call."""
CALL_ID_IN_ID = ("local_shell_call_output", TOOL_SEARCH_OUTPUT)
"""Outputs whose `id` may be the id of the call."""
WITH_TOOLS = ("additional_tools", TOOL_SEARCH_OUTPUT)
"""Items that add tools."""
UPDATE = "configuration_update"
WITHOUT_CONTENT = ("additional_tools", UPDATE)
"""Items that are not part of the conversation."""


def kind_of(item: Item, path: str) -> str:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        raise json_body.missing_field(f"{path}.type")
    return kind


def check(items: Sequence[dict[str, Any]]) -> None:
    """Check what applies to items of all types, before they are looked up or stored."""
    check_count(len(items))
    for at, item in enumerate(items):
        json_body.convert(item, ItemId, f"input[{at}]")


def check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise BadRequest(f"input: {count} items; the maximum is {MAX_ITEMS}", param="input")


def tools_of(items: Sequence[LocatedItem]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path, item in items:
        if kind_of(item, path) in WITH_TOOLS:
            yield f"{path}.tools", json_body.convert(item, OutputItem, path).tools or []


def decode(items: Sequence[LocatedItem], toolset: ToolSet, asked: list[Asked]) -> tuple[Message, ...]:
    builder = _MessageBuilder(toolset, asked)
    for path, item in items:
        builder.read(kind_of(item, path), path, item)
    builder.end_turn()
    return tuple(builder.messages)


class _MessageBuilder:
    def __init__(self, toolset: ToolSet, asked: list[Asked]) -> None:
        self.messages: list[Message] = []
        self._toolset = toolset
        self._asked = asked
        self._reasoning_parts: list[Reasoning] = []
        self._text_parts: tuple[Part, ...] = ()
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
        elif kind not in WITHOUT_CONTENT:
            self._asked.append(Asked("items", path))

    def end_turn(self) -> None:
        turn = (*self._reasoning_parts, *self._text_parts, *self._calls)
        if turn:
            self.messages.append(Message("assistant", turn))
        self._reasoning_parts, self._text_parts, self._calls = [], (), []

    def _message(self, path: str, item: MessageItem) -> None:
        content = parts.decode(item.content, f"{path}.content", self._asked)
        if item.role != "assistant":
            if item.content is None:
                raise json_body.missing_field(f"{path}.content")
            self._add(item.role, content)
            return
        if self._text_parts:
            self.end_turn()
        self._text_parts = content

    def _add(self, role: Role, content: tuple[Part, ...]) -> None:
        self.end_turn()
        self.messages.append(Message(role, content))

    def _reasoning(self, path: str, item: ReasoningItem) -> None:
        encrypted = item.encrypted_content
        text: str | None = _join_texts(item.content) or _join_texts(item.summary)
        if not text and encrypted:
            text = parts.unseal(encrypted)
        if text is None:
            self._asked.append(Asked("items", f"{path}.encrypted_content"))
        elif text:
            if self._text_parts or self._calls:
                self.end_turn()
            self._reasoning_parts.append(Reasoning(text))

    def _call(self, kind: Kind, path: str, item: CallItem) -> None:
        name = item.name if kind in ("function", "custom") else kind
        if not name:
            raise json_body.missing_field(f"{path}.name")
        function = self._toolset.function_name(kind, name, item.namespace)
        self._calls.append(ToolCall(item.call_id or item.id or "", function, _arguments(kind, item)))

    def _mcp_call(self, item: McpCallItem) -> None:
        self._calls.append(ToolCall(item.id, item.name, item.arguments or "{}"))
        failed = item.error is not None
        output = _to_text(item.error) if failed else item.output or ""
        self._add("tool", (ToolResult(item.id, (Text(output),), failed),))

    def _output(self, kind: str, path: str, item: OutputItem) -> None:
        call_id = item.call_id or (item.id if kind in CALL_ID_IN_ID else None)
        if not call_id and kind != TOOL_SEARCH_OUTPUT:
            raise json_body.missing_field(f"{path}.call_id")
        content = OUTPUTS[kind](item, f"{path}.output", self._asked)
        self._add("tool", (ToolResult(call_id or "", content, item.status == "failed"),))


def _join_texts(texts: Sequence[parts.ContentPart] | None) -> str:
    return "\n\n".join(part.text for part in texts or () if isinstance(part, parts.ResponseTextPart))


def _arguments(kind: Kind, item: CallItem) -> str:
    """Return the arguments of the function with which the model makes this call."""
    if kind == "custom":
        return custom_tool_text.wrap(item.input)
    if kind in ("function", "tool_search"):
        return _to_text(item.arguments) if isinstance(item.arguments, dict) else item.arguments or "{}"
    fields = (item.operation if kind == "apply_patch" else item.action) or {}
    hidden = ("type", "env", "user") if kind == "local_shell" else ()
    return _to_text({name: value for name, value in fields.items() if value is not None and name not in hidden})


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


OutputDecoder = Callable[[OutputItem, str, list[Asked]], tuple[Text | Image, ...]]


def _decode_output(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if not isinstance(item.output, list):
        return () if item.output is None else (Text(_to_text(item.output)),)
    inner = path.removesuffix(".output")
    return parts.decode(json_body.convert({"output": item.output}, OutputContent, inner).output, path, asked)


def _decode_shell_output(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if not isinstance(item.output, list):
        return _decode_output(item, path, asked)
    runs = [_format_run(json_body.convert(run, ShellOutput, f"{path}[{at}]")) for at, run in enumerate(item.output)]
    return (Text("\n".join(runs)),)


def _format_run(run: ShellOutput) -> str:
    outcome = run.outcome or {}
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
    return "\n".join(text.rstrip("\n") for text in (run.stdout, run.stderr, f"({ended})") if text)


def _describe_tools(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    names = [tool["name"] for tool in item.tools or () if isinstance(tool.get("name"), str)]
    return (Text(f"found: {', '.join(names)}" if names else "nothing was found"),)


OUTPUTS: dict[str, OutputDecoder] = {
    "function_call_output": _decode_output,
    "custom_tool_call_output": _decode_output,
    "local_shell_call_output": _decode_output,
    "apply_patch_call_output": _decode_output,
    "shell_call_output": _decode_shell_output,
    TOOL_SEARCH_OUTPUT: _describe_tools,
}

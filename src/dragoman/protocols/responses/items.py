"""The items of a conversation: converts them to messages, completes them for storage, and encodes pages of them.

    turn              := reasoning* message? call*              one message of the assistant
    input             := (message | turn | output)*
    stored            := the item as it was sent, with a type, an id and a status, its content as parts
    encrypted_content := sealed text (see `sealed`)

Rules
1. Consecutive items of the assistant are one message: its reasoning, its text, its calls.
2. Ids, statuses and the type of a message are optional. An output need not have a matching call.
3. Items without content for the model (hosted searches, reasoning encrypted by other servers) are skipped and named in
   the response headers.
4. Encrypted reasoning is for clients that store the conversation but do not show the reasoning.
5. What is before the last compaction is not read, except for messages of the user, the system and the developer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, NotFound, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Image, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult
from dragoman.core.summary import compact_messages
from dragoman.protocols import json_body
from dragoman.protocols.openai import RESPONSE_PARTS, Content, ContentPart, decode_content, decode_limit
from dragoman.protocols.responses import compaction_items, mcp
from dragoman.protocols.responses.calls import CALLS, PREFIXES, CallFields, Kind, decode_arguments, to_text
from dragoman.protocols.responses.tools import ToolSet
from dragoman.protocols.sealed import Seal

Item = Mapping[str, Any]
LocatedItem = compaction_items.LocatedItem
"""The path of an item in the request, its type, and the item."""
MAX_ITEMS = 16_384
PREFIX = "resp_"
MAX_LIMIT, DEFAULT_LIMIT = 100, 20
ID_PREFIXES = {item_type: PREFIXES[kind] for item_type, kind in CALLS.items()} | {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
    compaction_items.COMPACTION: compaction_items.ID_PREFIX,
    **mcp.ID_PREFIXES,
}
WITHOUT_STATUS = ("reasoning", "additional_tools", *compaction_items.KINDS, *mcp.WITHOUT_STATUS)


class ItemId(msgspec.Struct, frozen=True):
    """The id of an item of any type. Ids of some servers have several hundred characters."""

    id: Annotated[str, msgspec.Meta(max_length=1024)] | None = None


class MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = None


class ReasoningItem(msgspec.Struct, frozen=True):
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None


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


TOOL_SEARCH_OUTPUT = "tool_search_output"
"""May lack a call id, because a server may search without a call."""
CALL_ID_IN_ID = ("local_shell_call_output", TOOL_SEARCH_OUTPUT)
"""Outputs whose `id` may be the id of the call."""
CHECKED_OUTPUTS = ("function_call_output", "custom_tool_call_output")
WITH_TOOLS = ("additional_tools", TOOL_SEARCH_OUTPUT)
"""Items that add tools."""
UPDATE = "configuration_update"
WITHOUT_CONTENT = ("additional_tools", UPDATE)
"""Items that are not part of the conversation."""
WITH_CONTENT = ("message", "reasoning", *mcp.KINDS, *compaction_items.KINDS)
"""Items that the model sees, besides calls and their outputs."""
SKIPPED = frozenset(
    {
        *("code_interpreter_call", "computer_call", "computer_call_output", "file_search_call"),
        *("image_generation_call", "program", "program_output", "web_search_call"),
    }
)
"""Items of OpenAI's API that the models of this server do not see."""


def kind_of(item: Item, path: str) -> str:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        raise json_body.missing_field(f"{path}.type")
    return kind


def locate(field: str | Sequence[dict[str, Any]], name: str = "input") -> list[LocatedItem]:
    """Return the items of a field. Checks what applies to items of all types, before they are looked up or stored."""
    if isinstance(field, str):
        return [(name, "message", {"type": "message", "role": "user", "content": field})]
    check_count(len(field), name)
    located = []
    for at, item in enumerate(field):
        path = f"{name}[{at}]"
        json_body.convert(item, ItemId, path)
        located.append((path, kind_of(item, path), item))
    return located


def check_count(count: int, name: str = "input") -> None:
    if count > MAX_ITEMS:
        raise BadRequest(f"{name}: {count} items; the maximum is {MAX_ITEMS}", param=name)


def check_outputs(earlier: Sequence[LocatedItem], sent: Sequence[LocatedItem]) -> None:
    """Refuse the output of a call that a continued conversation does not have.

    Callers that send the whole conversation may have shortened it.
    """
    if not earlier:
        return
    calls = {item.get("call_id") for _, kind, item in (*earlier, *sent) if kind not in CHECKED_OUTPUTS}
    for path, kind, item in sent:
        if kind in CHECKED_OUTPUTS and item.get("call_id") not in calls:
            call_id = quote(str(item.get("call_id")))
            raise BadRequest(f"{path}.call_id: the conversation has no call {call_id}", param=f"{path}.call_id")


def is_known(kind: str) -> bool:
    """Whether items of this type can be stored. A request may contain others; they have no effect."""
    return any(kind in known for known in (WITH_CONTENT, CALLS, OUTPUTS, WITHOUT_CONTENT, SKIPPED))


def tools_of(items: Sequence[LocatedItem]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path, kind, item in items:
        if kind in WITH_TOOLS:
            yield f"{path}.tools", json_body.convert(item, OutputItem, path).tools or []


def window(items: Sequence[LocatedItem]) -> Sequence[LocatedItem]:
    """Return the items without those that the last compaction replaced."""
    last = max((at for at, (_, kind, _) in enumerate(items) if kind in compaction_items.KINDS), default=0)
    if not last:
        return items
    path, _, item = items[last]
    return [*retained(items[:last], compaction_items.open_item(path, item).kept), *items[last:]]


def retained(items: Sequence[LocatedItem], users: int) -> list[LocatedItem]:
    """Return what a compaction retains: settings, messages of system and developer, the most recent user messages."""
    found = []
    for entry in reversed(items):
        _, kind, item = entry
        role = item.get("role") if kind == "message" else None
        if role in ("system", "developer") or kind in WITHOUT_CONTENT or (role == "user" and users > 0):
            found.append(entry)
            users -= role == "user"
    return found[::-1]


def decode(
    items: Sequence[LocatedItem], toolset: ToolSet, asked: list[Asked], history: mcp.McpHistory | None = None
) -> tuple[Message, ...]:
    """Decode items, without those that a compaction replaced (see `window`). `history` is what they say about MCP
    servers."""
    builder = _MessageBuilder(toolset, asked, history or mcp.McpHistory(items))
    for path, kind, item in items:
        builder.read(kind, path, item)
    builder.end_turn()
    return tuple(builder.messages)


class _MessageBuilder:
    def __init__(self, toolset: ToolSet, asked: list[Asked], history: mcp.McpHistory) -> None:
        self.messages: list[Message] = []
        self._toolset = toolset
        self._asked = asked
        self._history = history
        self._reasoning_parts: list[Reasoning] = []
        self._text_parts: tuple[Part, ...] = ()
        self._calls: list[ToolCall] = []

    def read(self, kind: str, path: str, item: dict[str, Any]) -> None:
        if kind == "message":
            self._message(path, json_body.convert(item, MessageItem, path))
        elif kind == "reasoning":
            self._reasoning(path, json_body.convert(item, ReasoningItem, path))
        elif kind in CALLS:
            self._call(CALLS[kind], path, json_body.convert(item, CallFields, path))
        elif kind in compaction_items.KINDS:
            self.end_turn()
            sealed = compaction_items.open_item(path, item)
            self.messages = list(compact_messages(self.messages, sealed.summary, sealed.kept, sealed.pending))
        elif kind in mcp.KINDS:
            self._mcp(kind, path, item)
        elif kind in OUTPUTS:
            self._output(kind, path, json_body.convert(item, OutputItem, path))
        elif kind not in WITHOUT_CONTENT:
            self._asked.append(Asked(Feature.ITEMS, path))

    def end_turn(self) -> None:
        turn = (*self._reasoning_parts, *self._text_parts, *self._calls)
        if turn:
            self.messages.append(Message("assistant", turn))
        self._reasoning_parts, self._text_parts, self._calls = [], (), []

    def _message(self, path: str, item: MessageItem) -> None:
        content = decode_content(item.content, RESPONSE_PARTS, f"{path}.content", self._asked)
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
        text: str | None
        text = self._join_texts(item.content, f"{path}.content") or self._join_texts(item.summary, f"{path}.summary")
        if not text and encrypted:
            text = Seal.REASONING.open(encrypted)
        if text is None:
            self._asked.append(Asked(Feature.ITEMS, f"{path}.encrypted_content"))
        elif text:
            if self._text_parts or self._calls:
                self.end_turn()
            self._reasoning_parts.append(Reasoning(text))

    def _join_texts(self, parts: list[ContentPart] | None, path: str) -> str:
        decoded = decode_content(parts, RESPONSE_PARTS, path, self._asked)
        return "\n\n".join(part.text for part in decoded if isinstance(part, Text))

    def _call(self, kind: Kind, path: str, item: CallFields) -> None:
        name = item.name if kind in ("function", "custom") else kind
        if not name:
            raise json_body.missing_field(f"{path}.name")
        function = self._toolset.function_name(kind, name, item.namespace)
        self._calls.append(ToolCall(item.call_id or item.id or "", function, decode_arguments(kind, item)))

    def _mcp(self, kind: str, path: str, item: dict[str, Any]) -> None:
        found = self._history.decode(kind, path, item, self._asked)
        if found is not None:
            call, result = found
            self._calls.append(call)
            self._add("tool", (result,))

    def _output(self, kind: str, path: str, item: OutputItem) -> None:
        call_id = item.call_id or (item.id if kind in CALL_ID_IN_ID else None)
        if not call_id and kind != TOOL_SEARCH_OUTPUT:
            raise json_body.missing_field(f"{path}.call_id")
        content = OUTPUTS[kind](item, f"{path}.output", self._asked)
        self._add("tool", (ToolResult(call_id or "", content, item.status == "failed"),))


OutputDecoder = Callable[[OutputItem, str, list[Asked]], tuple[Text | Image, ...]]


def _decode_output(item: OutputItem, path: str, asked: list[Asked]) -> tuple[Text | Image, ...]:
    if not isinstance(item.output, list):
        return () if item.output is None else (Text(to_text(item.output)),)
    content = json_body.convert(item.output, list[ContentPart], path)
    return decode_content(content, RESPONSE_PARTS, path, asked)


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


def storable_items(items: Iterable[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    suffix = response_id.removeprefix(PREFIX)
    return [_stored_item(item, f"{suffix}_i{at}") for at, item in enumerate(items)]


def _stored_item(item: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    kind = kind_of(item, "input")
    stored = {**item, "type": kind, "id": item.get("id") or ID_PREFIXES.get(kind, "item_") + suffix}
    if kind not in WITHOUT_STATUS:
        stored["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        stored["summary"] = item.get("summary") or []
    content = item.get("content")
    if kind == "message" and not isinstance(content, list):
        part: dict[str, Any] = {"type": "input_text", "text": content or ""}
        if item.get("role") == "assistant":
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        stored["content"] = [part]
    return stored


class PageFields(msgspec.Struct, frozen=True):
    limit: int = DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def decode_page(query: Mapping[str, str]) -> PageFields:
    limit, order = decode_limit(query, DEFAULT_LIMIT, MAX_LIMIT), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: expected asc or desc", param="order")
    return PageFields(limit, "asc" if order == "asc" else "desc", query.get("after"))


def encode_page(items: Sequence[tuple[str, bytes]], page: PageFields) -> dict[str, Any]:
    """Encode a page of items, given as pairs of id and JSON."""
    ordered = list(items if page.order == "asc" else reversed(items))
    if page.after is not None:
        start = next((at for at, (item, _) in enumerate(ordered, 1) if item == page.after), None)
        if start is None:
            raise NotFound(f"after: there is no item {quote(page.after)}", param="after")
        ordered = ordered[start:]
    listed = ordered[: page.limit]
    return encode_listed(listed, len(ordered) > len(listed))


def encode_listed(listed: Sequence[tuple[str, bytes]], has_more: bool) -> dict[str, Any]:
    """Encode the items of a page."""
    return {
        "object": "list",
        "data": [msgspec.Raw(body) for _, body in listed],
        "first_id": listed[0][0] if listed else "",
        "last_id": listed[-1][0] if listed else "",
        "has_more": has_more,
    }

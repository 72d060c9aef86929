"""Decodes the tools and the items of a request that are about MCP servers. `mcp_items` encodes those of a response.

    tool     := {type: mcp, server_label, server_url, authorization, headers, allowed_tools, require_approval, …}
    items    := mcp_list_tools | mcp_call | mcp_approval_request | mcp_approval_response

Rules
1. Without `server_url`, the label names a server of the configuration.
2. A server is not asked for its tools again if an item of the input lists them.
3. A request for approval has an effect once it is answered. A denied call is an error for the model. An approved call
   runs if nothing of the assistant comes after the answer: after it, a response has already gone on.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Text, ToolCall, ToolResult
from dragoman.core.tool_servers import (
    NO_APPROVAL,
    ApprovalRule,
    ListedTool,
    ToolFilter,
    ToolServer,
    find_header_error,
    function_name,
)
from dragoman.core.urls import REDACTED
from dragoman.protocols import json_body
from dragoman.protocols.responses.calls import to_text
from dragoman.protocols.tools import MAX_TOOLS

Item = Mapping[str, Any]
LIST, CALL = "mcp_list_tools", "mcp_call"
APPROVAL_REQUEST, APPROVAL_RESPONSE = "mcp_approval_request", "mcp_approval_response"
KINDS = (LIST, CALL, APPROVAL_REQUEST, APPROVAL_RESPONSE)
ID_PREFIXES = {LIST: "mcpl_", CALL: "mcp_", APPROVAL_REQUEST: "mcpr_", APPROVAL_RESPONSE: "mcpa_"}
WITHOUT_STATUS = (LIST, APPROVAL_REQUEST, APPROVAL_RESPONSE)
FROM_ASSISTANT = ("reasoning", "function_call", "custom_tool_call", CALL, APPROVAL_REQUEST)
"""Items that a response adds, besides messages of the assistant."""
CREDENTIALS = ("authorization", "headers")
Names = Annotated[list[str], msgspec.Meta(max_length=MAX_TOOLS)]


class McpFilterFields(msgspec.Struct, frozen=True):
    tool_names: Names | None = None
    read_only: bool | None = None

    def decode(self) -> ToolFilter | None:
        """Return None for a filter that names nothing."""
        if self.tool_names is None and self.read_only is None:
            return None
        names = None if self.tool_names is None else tuple(self.tool_names)
        return ToolFilter(names, is_read_only=self.read_only)


class McpApprovalFields(msgspec.Struct, frozen=True):
    always: McpFilterFields | None = None
    never: McpFilterFields | None = None


class McpToolFields(msgspec.Struct, frozen=True):
    type: str
    server_label: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    server_url: str | None = None
    server_description: str | None = None
    authorization: str | None = None
    headers: dict[str, str] | None = None
    allowed_tools: Names | McpFilterFields | None = None
    require_approval: Literal["always", "never"] | McpApprovalFields | None = None
    connector_id: Any = None
    tunnel_id: Any = None


class ListedToolFields(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None

    def decode(self) -> ListedTool:
        is_read_only = (self.annotations or {}).get("read_only") is True
        return ListedTool(self.name, self.description or "", self.input_schema or {}, is_read_only)


class ListToolsItem(msgspec.Struct, frozen=True):
    server_label: str
    tools: Annotated[list[ListedToolFields], msgspec.Meta(max_length=MAX_TOOLS)] = []
    error: str | None = None


class McpCallItem(msgspec.Struct, frozen=True):
    id: str
    name: str
    server_label: str | None = None
    arguments: str = ""
    output: str | None = None
    error: Any = None
    approval_request_id: str | None = None


class ApprovalRequestItem(msgspec.Struct, frozen=True):
    id: str
    name: str
    server_label: str
    arguments: str = ""


class ApprovalResponseItem(msgspec.Struct, frozen=True):
    approval_request_id: str
    approve: bool
    reason: str | None = None


def decode_server(raw: dict[str, Any], path: str, asked: list[Asked]) -> ToolServer:
    fields = json_body.convert(raw, McpToolFields, path)
    for name in ("connector_id", "tunnel_id"):
        if getattr(fields, name) is not None:
            raise BadRequest(f"{path}.{name}: not supported; send server_url", param=f"{path}.{name}")
    asked += [Asked(Feature.UNKNOWN, f"{path}.{name}") for name in json_body.unknown_fields(raw, McpToolFields)]
    allowed = fields.allowed_tools
    offered = ToolFilter(tuple(allowed)) if isinstance(allowed, list) else (allowed.decode() if allowed else None)
    return ToolServer(
        fields.server_label,
        path,
        fields.server_url,
        decode_headers(fields.server_url, fields.headers, fields.authorization, path, "authorization", "server_url"),
        fields.server_description or "",
        offered or ToolFilter(),
        _decode_approval(fields.require_approval),
    )


def decode_headers(
    url: str | None, headers: dict[str, str] | None, token: str | None, path: str, token_field: str, url_field: str
) -> Mapping[str, str]:
    """Return the headers for a server, with the token. Errors do not show their values."""
    given = dict(headers or {})
    used = "headers" if given else token_field if token is not None else None
    if url is None and used is not None:
        message = f"{path}.{used}: only with {url_field}; the configuration has those of its own servers"
        raise BadRequest(message, param=f"{path}.{used}")
    if token is not None:
        if any(name.lower() == "authorization" for name in given):
            message = f"{path}.{token_field}: the headers have an authorization already; send one of them"
            raise BadRequest(message, param=f"{path}.{token_field}")
        given["Authorization"] = f"Bearer {token}"
    error = find_header_error(given)
    if error is not None:
        is_token = token is not None and error[0] == "Authorization"
        param = f"{path}.{token_field}" if is_token else f"{path}.headers.{error[0]:.64}"
        raise BadRequest(f"{param}: {error[1]}", param=param)
    return given


def _decode_approval(field: str | McpApprovalFields | None) -> ApprovalRule:
    if isinstance(field, McpApprovalFields):
        always, never = (None if part is None else part.decode() for part in (field.always, field.never))
        return ApprovalRule(always, never)
    return NO_APPROVAL if field == "never" else ApprovalRule()


def echoed_tool(tool: Item) -> dict[str, Any]:
    """Return the tool without what may be secret: its credentials, and all of its address but the host."""
    echoed = {"allowed_tools": None, "server_description": None, "require_approval": "always", **tool}
    echoed |= {"authorization": None, "headers": None}
    url = tool.get("server_url")
    if isinstance(url, str):
        scheme, mark, rest = url.partition("://")
        host = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
        echoed["server_url"] = f"{scheme}{mark}{host}/{REDACTED}"
    return echoed


def find_secret_field(tool: Item) -> str | None:
    """Return a field with credentials, if any. An address with a login or a query is one, however short these are."""
    if tool.get("type") != "mcp":
        return None
    url = str(tool.get("server_url"))
    secrets = {name: tool.get(name) for name in CREDENTIALS} | {"server_url": "?" in url or "@" in url}
    return next((name for name, value in secrets.items() if value), None)


class McpHistory:
    """What the items of a conversation say about MCP servers."""

    def __init__(self, items: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
        self.approved: list[ToolCall] = []
        """Calls that are approved and have not run."""
        self._listings: dict[str, tuple[ListedTool, ...]] = {}
        self._answers: dict[str, tuple[int, str, ApprovalResponseItem]] = {}
        self._requests: set[str] = set()
        self._ran: set[str] = set()
        self._last_turn = -1
        """The place of the last item of the assistant."""
        for at, (path, kind, item) in enumerate(items):
            if kind in FROM_ASSISTANT or (kind == "message" and item.get("role") == "assistant"):
                self._last_turn = at
            if kind in KINDS:
                self._note(at, path, kind, item)

    def _note(self, at: int, path: str, kind: str, item: dict[str, Any]) -> None:
        if kind == LIST:
            listing = json_body.convert(item, ListToolsItem, path)
            if listing.error is None:
                self._listings[listing.server_label] = tuple([tool.decode() for tool in listing.tools])
        elif kind == APPROVAL_REQUEST:
            self._requests.add(json_body.convert(item, ApprovalRequestItem, path).id)
        elif kind == APPROVAL_RESPONSE:
            answer = json_body.convert(item, ApprovalResponseItem, path)
            self._answers[answer.approval_request_id] = at, path, answer
        elif isinstance(request := item.get("approval_request_id"), str):
            self._ran.add(request)

    def with_listings(self, servers: Sequence[ToolServer]) -> tuple[ToolServer, ...]:
        return tuple([msgspec.structs.replace(server, listed=self._listings.get(server.label)) for server in servers])

    def check_approved(self, servers: Sequence[ToolServer]) -> tuple[ToolCall, ...]:
        """Return the calls to run now. All answers must have a request, and the request must have the servers."""
        for _, path, answer in self._answers.values():
            if answer.approval_request_id not in self._requests:
                param = f"{path}.approval_request_id"
                message = f"{param}: the input has no mcp_approval_request {quote(answer.approval_request_id)}"
                raise BadRequest(message, param=param)
        labels = {server.label for server in servers}
        for call in self.approved:
            if call.server not in labels:
                message = f"tools: the approved call needs the mcp server {quote(call.server)}; send its tool again"
                raise BadRequest(message, param="tools")
        return tuple(self.approved)

    def decode(
        self, kind: str, path: str, item: dict[str, Any], asked: list[Asked]
    ) -> tuple[ToolCall, ToolResult] | None:
        """Return the call that an item stands for, and its result; None if it stands for none."""
        if kind == CALL:
            return _decode_call(json_body.convert(item, McpCallItem, path))
        if kind != APPROVAL_REQUEST:
            return None
        request = json_body.convert(item, ApprovalRequestItem, path)
        if request.id in self._ran:
            return None
        if request.id not in self._answers:
            asked.append(Asked(Feature.ITEMS, path))
            return None
        at, _, answer = self._answers[request.id]
        name, arguments = function_name(request.server_label, request.name), request.arguments or "{}"
        if answer.approve:
            if at < self._last_turn:
                return None
            # The server fills in the result.
            self.approved.append(ToolCall(request.id, request.name, arguments, request.server_label, request.id))
            return ToolCall(request.id, name, arguments), ToolResult(request.id, ())
        text = f"The user did not allow this call. {answer.reason or ''}".rstrip()
        return ToolCall(request.id, name, arguments), ToolResult(request.id, (Text(text),), is_error=True)


def _decode_call(item: McpCallItem) -> tuple[ToolCall, ToolResult]:
    name = item.name if item.server_label is None else function_name(item.server_label, item.name)
    text = item.output or "" if item.error is None else _error_text(item.error)
    result = ToolResult(item.id, (Text(text),), item.error is not None)
    return ToolCall(item.id, name, item.arguments or "{}"), result


def _error_text(error: Any) -> str:
    """Return the text of an error as the model has seen it."""
    if isinstance(error, dict):
        if isinstance(error.get("message"), str):
            return str(error["message"])
        content = error.get("content")
        if isinstance(content, list):
            return "\n".join([to_text(part["text"]) for part in content if isinstance(part, dict) and "text" in part])
    return to_text(error)

"""Decodes `mcp_servers` and the tools and blocks about them, and encodes the blocks of a reply.

    server  := {type: url, url?, name, authorization_token?, tool_configuration?: {enabled?, allowed_tools?}}
    toolset := {type: mcp_toolset, mcp_server_name, default_config?, configs?, tools?}         in `tools`
    blocks  := mcp_tool_use* mcp_tool_result*           of one turn; other blocks may be among the calls

Rules
1. A server without `url` is one of the configuration. A toolset alone names one too.
2. A toolset decides which tools are offered. Without one (`mcp-client-2025-04-04`), `tool_configuration` does.
3. A server is not asked for its tools if its toolset or an `mcp_tool_listing` block has them.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.events import ToolOutput
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Message, Part, Text, ToolCall, ToolResult
from dragoman.core.tool_servers import ListedTool, ToolFilter, ToolServer, find_header_error
from dragoman.protocols import json_body
from dragoman.protocols.tools import MAX_TOOLS

TOOLSET, LISTING, CALL, RESULT = "mcp_toolset", "mcp_tool_listing", "mcp_tool_use", "mcp_tool_result"
MAX_SERVERS = 20
ServerName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Names = Annotated[list[str], msgspec.Meta(max_length=MAX_TOOLS)]


class ToolConfiguration(msgspec.Struct, frozen=True):
    enabled: bool | None = None
    allowed_tools: Names | None = None


class McpServerFields(msgspec.Struct, frozen=True):
    type: Literal["url"]
    name: ServerName
    url: str | None = None
    authorization_token: str | None = None
    tool_configuration: ToolConfiguration | None = None


class ToolConfig(msgspec.Struct, frozen=True):
    enabled: bool | None = None
    defer_loading: bool | None = None


class AnthropicListedTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


ListedTools = Annotated[list[AnthropicListedTool], msgspec.Meta(max_length=MAX_TOOLS)]


class McpToolset(msgspec.Struct, frozen=True):
    mcp_server_name: ServerName
    default_config: ToolConfig | None = None
    configs: dict[str, ToolConfig] | None = None
    tools: ListedTools | None = None


class ToolListing(msgspec.Struct, frozen=True):
    mcp_server_name: str
    tools: ListedTools = []


def decode(parsed: dict[str, Any], asked: list[Asked]) -> tuple[ToolServer, ...]:
    servers: dict[str, ToolServer] = {}
    for at, raw in enumerate(_list(parsed, "mcp_servers")):
        path = f"mcp_servers[{at}]"
        server = _server(json_body.convert(raw, McpServerFields, path), path)
        if server.label in servers:
            raise BadRequest(f"{path}.name: duplicate name {quote(server.label)}", param=f"{path}.name")
        servers[server.label] = server
    if len(servers) > MAX_SERVERS:
        raise BadRequest(f"mcp_servers: {len(servers)} servers; the maximum is {MAX_SERVERS}", param="mcp_servers")
    seen: set[str] = set()
    for at, raw in enumerate(_list(parsed, "tools")):
        if isinstance(raw, dict) and raw.get("type") == TOOLSET:
            path = f"tools[{at}]"
            toolset = json_body.convert(raw, McpToolset, path)
            name = toolset.mcp_server_name
            if name in seen:
                message = f"{path}.mcp_server_name: a server has one toolset, and {quote(name)} has another"
                raise BadRequest(message, param=f"{path}.mcp_server_name")
            seen.add(name)
            _note_deferred(toolset, path, asked)
            server = servers.get(name) or ToolServer(name, path, must_list=True)
            servers[name] = msgspec.structs.replace(server, offered=_filter(toolset), listed=_listed(toolset.tools))
    offered = [server for server in servers.values() if server.offered.names != ()]
    if not offered:
        return ()
    asked.append(Asked(Feature.TOOLS, "mcp_servers" if parsed.get("mcp_servers") else "tools"))
    return tuple(_with_listings(offered, parsed))


def _list(parsed: dict[str, Any], name: str) -> list[Any]:
    field = parsed.get(name)
    if field is None:
        return []
    if not isinstance(field, list):
        raise BadRequest(f"{name}: expected a list", param=name)
    return field


def _server(fields: McpServerFields, path: str) -> ToolServer:
    token, headers = fields.authorization_token, {}
    if token is not None:
        headers = {"Authorization": f"Bearer {token}"}
        error = (
            "only with url; the configuration has those of its own servers"
            if fields.url is None
            else (find_header_error(headers) or ("", ""))[1]
        )
        if error:
            raise BadRequest(f"{path}.authorization_token: {error}", param=f"{path}.authorization_token")
    configuration = fields.tool_configuration or ToolConfiguration()
    names = None if configuration.allowed_tools is None else tuple(configuration.allowed_tools)
    offered = ToolFilter(() if configuration.enabled is False else names)
    return ToolServer(fields.name, path, fields.url, headers, offered=offered, must_list=True)


def _filter(toolset: McpToolset) -> ToolFilter:
    default, configs = toolset.default_config or ToolConfig(), toolset.configs or {}
    if default.enabled is False:
        return ToolFilter(tuple([name for name, config in configs.items() if config.enabled]))
    return ToolFilter(hidden=tuple([name for name, config in configs.items() if config.enabled is False]))


def _note_deferred(toolset: McpToolset, path: str, asked: list[Asked]) -> None:
    """Report tools that should be offered only when the model looks for them: they are offered at once."""
    configs = {"default_config": toolset.default_config} | {
        f"configs.{name:.64}": config for name, config in (toolset.configs or {}).items()
    }
    asked += [
        Asked(Feature.UNKNOWN, f"{path}.{name}.defer_loading")
        for name, config in configs.items()
        if config is not None and config.defer_loading
    ]


def _listed(tools: Sequence[AnthropicListedTool] | None) -> tuple[ListedTool, ...] | None:
    if tools is None:
        return None
    return tuple([ListedTool(tool.name, tool.description or "", tool.input_schema or {}) for tool in tools])


def _with_listings(servers: Sequence[ToolServer], parsed: dict[str, Any]) -> Iterator[ToolServer]:
    """Add the last listing of each server that earlier replies have."""
    listings: dict[str, tuple[ListedTool, ...] | None] = {}
    for at, message in enumerate(parsed["messages"]):
        content = message.get("content")
        for inner, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict) and block.get("type") == LISTING:
                listing = json_body.convert(block, ToolListing, f"messages[{at}].content[{inner}]")
                listings[listing.mcp_server_name] = _listed(listing.tools)
    for server in servers:
        listed = listings.get(server.label) if server.listed is None else server.listed
        yield msgspec.structs.replace(server, listed=listed)


def split_rounds(parts: Sequence[Part]) -> list[Message]:
    """Return the messages of the parts of one message. A result of a call that Dragoman made ends a round."""
    messages: list[Message] = []
    round_: list[Part] = []
    for part in parts:
        if isinstance(part, ToolResult):
            if round_:
                messages.append(Message("assistant", tuple(round_)))
                round_ = []
            messages.append(Message("tool", (part,)))
        else:
            round_.append(part)
    return [*messages, Message("assistant", tuple(round_))] if round_ or not messages else messages


def use_id(call_id: str) -> str:
    """Return the id of the blocks of a call."""
    return f"mcptoolu_{call_id.removeprefix('call_')}"


def encode_call(call: ToolCall, arguments: Any) -> dict[str, Any]:
    fields = {"id": use_id(call.id), "name": call.name, "server_name": call.server, "input": arguments}
    return {"type": CALL, **fields}


def encode_result(part: Part) -> dict[str, Any] | None:
    """Return the block of a result; None for another part."""
    if not isinstance(part, ToolResult):
        return None
    texts = [inner.text for inner in part.content if isinstance(inner, Text)]
    return encode_output(ToolOutput(part.call_id, "".join(texts), part.is_error))


def encode_output(output: ToolOutput) -> dict[str, Any]:
    content = [{"type": "text", "text": output.text}] if output.text else []
    fields = {"tool_use_id": use_id(output.call_id), "is_error": output.is_error, "content": content}
    return {"type": RESULT, **fields}

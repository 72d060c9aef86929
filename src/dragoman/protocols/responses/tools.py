"""Decodes the tools of a request and the tool choice.

    tool := {type: function, name, description, parameters, strict}
          | {type: custom, name, description, format: text | grammar}
          | {type: namespace, name, description, tools: tool*}
          | {type: local_shell | shell | apply_patch | tool_search}
          | {type: mcp, server_label, …}                                 see `mcp`
          | {type: …}                                                    a hosted tool, which the server would run
    tool_choice := none | auto | required | {type, name, namespace} | {type: mcp, server_label, name}
                 | {type: allowed_tools, mode: auto | required, tools: ({type, name})*}

Rules
1. The model sees every tool as a function with a unique name: `namespace__name` for a tool in a namespace, `name` for a
   tool without one or in the default namespace `functions`.
2. Hosted tools are accepted but not offered to the model; the response headers name them.
3. Tools in the input (`additional_tools`, `tool_search_output`) are added, or replace a tool of the same name.
4. The choice of an MCP server without the name of a tool means: only its tools are offered, and one of them is called.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.core.tool_servers import ToolServer, function_name
from dragoman.protocols import json_body
from dragoman.protocols.responses import mcp
from dragoman.protocols.responses.calls import DESCRIPTIONS, SCHEMAS, ClientTool, Kind
from dragoman.protocols.tools import check_count, check_name, decode_tool, duplicate_error, no_tools_error

CLIENT_RUN: dict[str, Kind] = {kind: kind for kind in DESCRIPTIONS}
"""The tools without a name that the client runs."""
MCP = "mcp"
KNOWN = {"function", "custom", "namespace", MCP, *CLIENT_RUN}
ChoiceTargets = dict[tuple[str, str | None, str | None], list[str]]
"""The function names that a choice selects, by its type, name and namespace."""


class ResponseToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


ToolChoiceField = Literal["none", "auto", "required"] | ResponseToolChoice | None


class InputFormat(msgspec.Struct, frozen=True):
    type: str = "text"
    definition: str | None = None
    syntax: str | None = None


class Environment(msgspec.Struct, frozen=True):
    type: str = "local"


class ResponseTool(msgspec.Struct, frozen=True):
    """A tool or a namespace; the fields depend on the type."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: list[dict[str, Any]] | None = None
    execution: str | None = None
    environment: Environment | None = None


class ToolSet(msgspec.Struct, frozen=True):
    """The functions that the model sees, and the tools of the request that they stand for."""

    tools: tuple[Tool, ...] = ()
    client_tools: Mapping[str, ClientTool] = {}
    """By function name."""
    names: Mapping[ClientTool, str] = {}
    servers: tuple[ToolServer, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.tools and not self.servers

    def function_name(self, kind: Kind, name: str, namespace: str | None) -> str:
        """Return the function name of a tool, even of a tool that only an earlier turn had."""
        return self.names.get(ClientTool(kind, name, namespace)) or _flat_name(namespace, name)


def _flat_name(namespace: str | None, name: str) -> str:
    return name if namespace in (None, "functions") else f"{namespace}__{name}"


def decode(
    tools: Sequence[dict[str, Any]], additional: Iterable[tuple[str, Sequence[dict[str, Any]]]], asked: list[Asked]
) -> ToolSet:
    """`additional` are the lists of tools in the input, each with its path."""
    decoder = _ToolDecoder(asked)
    decoder.read("tools", tools)
    decoder.replaces = True
    for path, more in additional:
        decoder.read(path, more)
    names = {tool: name for name, tool in decoder.client_tools.items()}
    toolset = ToolSet(tuple(decoder.tools.values()), decoder.client_tools, names, tuple(decoder.servers.values()))
    if not toolset.is_empty:
        asked.append(Asked(Feature.TOOLS, "tools" if tools else "input"))
    return toolset


class _ToolDecoder:
    def __init__(self, asked: list[Asked]) -> None:
        self.tools: dict[str, Tool] = {}
        self.client_tools: dict[str, ClientTool] = {}
        self.servers: dict[str, ToolServer] = {}
        self.replaces = False
        self._asked = asked

    def read(self, path: str, tools: Sequence[dict[str, Any]], space: ResponseTool | None = None) -> None:
        """Read a list of tools, either of the request or of the namespace `space`."""
        check_count(len(tools), path)
        for at, raw in enumerate(tools):
            inner, kind = f"{path}[{at}]", raw.get("type")
            if not isinstance(kind, str):
                raise json_body.missing_field(f"{inner}.type")
            if kind not in KNOWN:
                self._asked.append(Asked(Feature.SERVER_TOOLS, inner))
                continue
            if kind == MCP and space is None:
                self._add_server(inner, raw)
                continue
            tool = json_body.convert(raw, ResponseTool, inner)
            # The description of a namespace is added to its first tool only.
            about = space.description if space is not None and at == 0 else None
            namespace = None if space is None else space.name
            if kind == "function":
                client_tool = ClientTool("function", check_name(tool.name, f"{inner}.name"), namespace)
                self._add(inner, client_tool, _join_lines(about, tool.description), tool.parameters, tool.strict)
            elif kind == "custom":
                client_tool = ClientTool("custom", check_name(tool.name, f"{inner}.name"), namespace)
                description = _join_lines(about, tool.description, self._describe_format(inner, tool.format))
                self._add(inner, client_tool, description, SCHEMAS["custom"])
            elif kind == "namespace" and space is None:
                check_name(tool.name, f"{inner}.name")
                if tool.tools is None:
                    raise json_body.missing_field(f"{inner}.tools")
                self.read(f"{inner}.tools", tool.tools, tool)
            elif kind in CLIENT_RUN and _runs_on_client(kind, tool):
                own = CLIENT_RUN[kind]
                description = tool.description or DESCRIPTIONS[own]
                self._add(inner, ClientTool(own, own), description, tool.parameters or SCHEMAS[own])
            else:
                self._asked.append(Asked(Feature.SERVER_TOOLS, inner))

    def _describe_format(self, path: str, field: InputFormat | None) -> str | None:
        """Describe a grammar, which cannot be enforced within a JSON string."""
        if field is None or field.type == "text":
            return None
        self._asked.append(Asked(Feature.TOOL_GRAMMAR, f"{path}.format"))
        return field.definition and f"`input` keeps to this {field.syntax} grammar:\n{field.definition}"

    def _add(
        self,
        path: str,
        client_tool: ClientTool,
        description: str,
        parameters: Mapping[str, Any] | None,
        strict: bool | None = None,
    ) -> None:
        tool = decode_tool(path, client_tool.name, description, parameters, strict, self._asked)
        name = self._unique_name(client_tool, path)
        self.client_tools[name] = client_tool
        self.tools[name] = msgspec.structs.replace(tool, name=name)
        check_count(len(self.tools), path.partition("[")[0])

    def _add_server(self, path: str, raw: dict[str, Any]) -> None:
        server = mcp.decode_server(raw, path, self._asked)
        if self.replaces and mcp.find_secret_field(raw) is not None:
            raise BadRequest(f"{path}: items are stored; put a tool with credentials into tools", param=path)
        if server.label in self.servers and not self.replaces:
            param = f"{server.path}.server_label"
            raise BadRequest(f"{param}: duplicate label {server.label!r}", param=param)
        self.servers[server.label] = server

    def _unique_name(self, tool: ClientTool, path: str) -> str:
        name = _flat_name(tool.namespace, tool.name)
        while (other := self.client_tools.get(name)) and (other.name, other.namespace) != (tool.name, tool.namespace):
            name += "_"
        if other and not self.replaces:
            raise duplicate_error(tool.name, path)
        return name


def _runs_on_client(kind: str, tool: ResponseTool) -> bool:
    if kind == "tool_search":
        return tool.execution == "client"
    return tool.environment is None or tool.environment.type == "local"


def _join_lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def choose(field: ToolChoiceField, parallel: bool, toolset: ToolSet, asked: list[Asked]) -> tuple[ToolChoice, ToolSet]:
    """Return the choice and the tools that it allows."""
    if isinstance(field, ResponseToolChoice):
        if field.type == "allowed_tools":
            return _allowed(field, parallel, toolset, asked)
        if field.type == MCP and field.server_label is not None:
            return _choose_server(field.server_label, field.name, parallel, toolset, asked)
        return _named(field, parallel, toolset, asked), toolset
    if field == "required":
        return _required(parallel, toolset, asked), toolset
    return ToolChoice(field or "auto", None, parallel), toolset


def _required(parallel: bool, toolset: ToolSet, asked: list[Asked]) -> ToolChoice:
    if not toolset.is_empty:
        asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
        return ToolChoice("required", None, parallel)
    if not any(entry.feature == Feature.SERVER_TOOLS for entry in asked):
        raise no_tools_error("tool_choice")
    asked.append(Asked(Feature.SERVER_TOOLS, "tool_choice"))
    return ToolChoice("auto", None, parallel)


def _choose_server(
    label: str, tool: str | None, parallel: bool, toolset: ToolSet, asked: list[Asked]
) -> tuple[ToolChoice, ToolSet]:
    chosen = tuple([server for server in toolset.servers if server.label == label])
    if not chosen:
        raise BadRequest(f"tool_choice.server_label: unknown server {quote(label)}", param="tool_choice.server_label")
    asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
    if tool is not None:
        return ToolChoice("named", function_name(label, tool), parallel), toolset
    return ToolChoice("required", None, parallel), msgspec.structs.replace(toolset, tools=(), servers=chosen)


def _named(field: ResponseToolChoice, parallel: bool, toolset: ToolSet, asked: list[Asked]) -> ToolChoice:
    found = _matching(field, _choice_targets(toolset))
    if found:
        asked.append(Asked(Feature.CONSTRAINT, "tool_choice"))
        return ToolChoice("named", found[0], parallel)
    if field.type in ("function", "custom"):
        if field.name is None:
            raise json_body.missing_field("tool_choice.name")
        raise BadRequest(f"tool_choice: unknown tool {quote(field.name)}", param="tool_choice")
    asked.append(Asked(Feature.SERVER_TOOLS, "tool_choice"))
    return ToolChoice("auto", None, parallel)


def _choice_targets(toolset: ToolSet) -> ChoiceTargets:
    """Map each possible choice to the functions it selects. A namespace selects all its tools."""
    targets: ChoiceTargets = {}
    for name, tool in toolset.client_tools.items():
        by_name = {(tool.kind, tool.name, None), (tool.kind, tool.name, tool.namespace)}
        for choice in (*by_name, ("namespace", tool.namespace, None)):
            targets.setdefault(choice, []).append(name)
    return targets


def _matching(field: ResponseToolChoice, targets: ChoiceTargets) -> Sequence[str]:
    if field.type in ("function", "custom"):
        return targets.get((field.type, field.name, field.namespace), ())
    # The name of a built-in tool is its type.
    return targets.get((field.type, field.name if field.type == "namespace" else field.type, None), ())


def _allowed(
    field: ResponseToolChoice, parallel: bool, toolset: ToolSet, asked: list[Asked]
) -> tuple[ToolChoice, ToolSet]:
    check_count(len(field.tools or ()), "tool_choice.tools")
    targets = _choice_targets(toolset)
    names: set[str] = set()
    labels: set[str | None] = set()
    for at, entry in enumerate(field.tools or ()):
        path = f"tool_choice.tools[{at}]"
        allowed = json_body.convert(entry, ResponseToolChoice, path)
        if allowed.type == MCP:
            labels.add(allowed.server_label)
            continue
        found = _matching(allowed, targets)
        if not found and allowed.type in ("function", "custom", "namespace"):
            raise BadRequest(f"{path}: no tool of this request matches", param=path)
        if not found:
            asked.append(Asked(Feature.SERVER_TOOLS, path))
        names.update(found)
    left = msgspec.structs.replace(
        toolset,
        tools=tuple([tool for tool in toolset.tools if tool.name in names]),
        servers=tuple([server for server in toolset.servers if server.label in labels]),
    )
    if field.mode == "required":
        return _required(parallel, left, asked), left
    return ToolChoice("auto", None, parallel), left

"""Decodes the tools of a request and the tool choice.

    tool := {type: function, name, description, parameters, strict}
          | {type: custom, name, description, format: text | grammar}
          | {type: namespace, name, description, tools: tool*}
          | {type: local_shell | shell | apply_patch | tool_search}
          | {type: …}                                                    a hosted tool, which the server would run
    tool_choice := none | auto | required | {type, name, namespace}
                 | {type: allowed_tools, mode: auto | required, tools: ({type, name})*}

Rules
1. The model sees every tool as a function with a unique name: `namespace__name` for a tool in a namespace, `name` for a
   tool without one or in the default namespace `functions`.
2. Hosted tools are accepted but not offered to the model; the response headers name them.
3. Tools in the input (`additional_tools`, `tool_search_output`) are added, or replace a tool of the same name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.chat import tools as functions
from dragoman.protocols.responses.calls import DESCRIPTIONS, SCHEMAS, ClientTool, Kind
from dragoman.protocols.responses.fields import ResponseToolChoice, ToolChoiceField

CLIENT_RUN: dict[str, Kind] = {
    "local_shell": "local_shell",
    "shell": "shell",
    "apply_patch": "apply_patch",
    "tool_search": "tool_search",
}
ChoiceTargets = dict[tuple[str, str | None, str | None], list[str]]
"""The function names that a choice selects, by its type, name and namespace."""


class FunctionTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputFormat(msgspec.Struct, frozen=True):
    type: str = "text"
    definition: str | None = None
    syntax: str | None = None


class CustomTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    format: InputFormat | None = None


class Namespace(msgspec.Struct, frozen=True):
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class Environment(msgspec.Struct, frozen=True):
    type: str = "local"


class BuiltinTool(msgspec.Struct, frozen=True):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    execution: str | None = None
    environment: Environment | None = None


class ToolSet(msgspec.Struct, frozen=True):
    """The functions that the model sees, and the tools of the request that they stand for."""

    tools: tuple[Tool, ...] = ()
    client_tools: Mapping[str, ClientTool] = {}
    """By function name."""
    names: Mapping[ClientTool, str] = {}

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
    if decoder.tools:
        asked.append(Asked("tools", "tools" if tools else "input"))
    names = {tool: name for name, tool in decoder.client_tools.items()}
    return ToolSet(tuple(decoder.tools.values()), decoder.client_tools, names)


class _ToolDecoder:
    def __init__(self, asked: list[Asked]) -> None:
        self.tools: dict[str, Tool] = {}
        self.client_tools: dict[str, ClientTool] = {}
        self.replaces = False
        self._asked = asked

    def read(self, path: str, tools: Sequence[dict[str, Any]], space: Namespace | None = None) -> None:
        functions.check_count(len(tools), path)
        about = space.description if space is not None else None
        for at, tool in enumerate(tools):
            inner = f"{path}[{at}]"
            kind = tool.get("type")
            if not isinstance(kind, str):
                raise json_body.missing_field(f"{inner}.type")
            if kind == "function":
                self._function(inner, json_body.convert(tool, FunctionTool, inner), space, about)
            elif kind == "custom":
                self._custom(inner, json_body.convert(tool, CustomTool, inner), space, about)
            elif kind == "namespace" and space is None:
                nested = json_body.convert(tool, Namespace, inner)
                functions.check_name(nested.name, f"{inner}.name")
                self.read(f"{inner}.tools", nested.tools, nested)
            elif kind in CLIENT_RUN and self._runs_on_client(tool, inner):
                self._builtin(inner, CLIENT_RUN[kind], json_body.convert(tool, BuiltinTool, inner))
            else:
                self._asked.append(Asked("server_tools", inner))
            # The description of a namespace is added to its first tool only.
            about = None

    def _runs_on_client(self, tool: dict[str, Any], path: str) -> bool:
        own = json_body.convert(tool, BuiltinTool, path)
        if tool["type"] == "tool_search":
            return own.execution == "client"
        return own.environment is None or own.environment.type == "local"

    def _function(self, path: str, tool: FunctionTool, space: Namespace | None, about: str | None) -> None:
        strict = bool(tool.strict)
        if strict:
            self._asked.append(Asked("strict_tools", f"{path}.strict"))
        self._add(
            path,
            _client_tool("function", tool.name, space),
            _join_lines(about, tool.description),
            tool.parameters,
            strict,
        )

    def _custom(self, path: str, tool: CustomTool, space: Namespace | None, about: str | None) -> None:
        description = _join_lines(about, tool.description)
        if tool.format is not None and tool.format.type != "text":
            # A grammar cannot be enforced within a JSON string.
            self._asked.append(Asked("tool_grammar", f"{path}.format"))
            if tool.format.definition:
                grammar = f"`input` keeps to this {tool.format.syntax} grammar:\n{tool.format.definition}"
                description = _join_lines(description, grammar)
        self._add(path, _client_tool("custom", tool.name, space), description, SCHEMAS["custom"])

    def _builtin(self, path: str, kind: Kind, tool: BuiltinTool) -> None:
        description = tool.description or DESCRIPTIONS[kind]
        self._add(path, ClientTool(kind, kind), description, tool.parameters or SCHEMAS[kind])

    def _add(
        self,
        path: str,
        tool: ClientTool,
        description: str,
        parameters: Mapping[str, Any] | None,
        strict: bool = False,
    ) -> None:
        functions.check_name(tool.name, f"{path}.name")
        functions.check_schema(parameters, f"{path}.parameters")
        name = self._unique_name(tool, path)
        self.client_tools[name] = tool
        self.tools[name] = Tool(name, description, parameters, strict, f"{path}.parameters")
        functions.check_count(len(self.tools), path.partition("[")[0])

    def _unique_name(self, tool: ClientTool, path: str) -> str:
        name = _flat_name(tool.namespace, tool.name)
        while (other := self.client_tools.get(name)) and (other.name, other.namespace) != (tool.name, tool.namespace):
            name += "_"
        if other and not self.replaces:
            raise BadRequest(f"{path}.name: duplicate tool name {tool.name!r}", param=f"{path}.name")
        return name


def _client_tool(kind: Kind, name: str, space: Namespace | None) -> ClientTool:
    return ClientTool(kind, name, None if space is None else space.name)


def _join_lines(*texts: str | None) -> str:
    return "\n".join(text for text in texts if text)


def choose(
    field: ToolChoiceField, parallel: bool, toolset: ToolSet, asked: list[Asked]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the choice and the tools that it allows."""
    if isinstance(field, ResponseToolChoice):
        if field.type == "allowed_tools":
            return _allowed(field, parallel, toolset, asked)
        return _named(field, parallel, toolset, asked), toolset.tools
    if field == "required":
        return _required(parallel, toolset.tools, asked), toolset.tools
    return ToolChoice(field or "auto", None, parallel), toolset.tools


def _required(parallel: bool, tools: Sequence[Tool], asked: list[Asked]) -> ToolChoice:
    if tools:
        asked.append(Asked("constraint", "tool_choice"))
        return ToolChoice("required", None, parallel)
    if not any(entry.feature == "server_tools" for entry in asked):
        raise functions.no_tools_error("tool_choice")
    asked.append(Asked("server_tools", "tool_choice"))
    return ToolChoice("auto", None, parallel)


def _named(field: ResponseToolChoice, parallel: bool, toolset: ToolSet, asked: list[Asked]) -> ToolChoice:
    found = _matching(field, _choice_targets(toolset))
    if found:
        asked.append(Asked("constraint", "tool_choice"))
        return ToolChoice("named", found[0], parallel)
    if field.type in ("function", "custom"):
        if field.name is None:
            raise json_body.missing_field("tool_choice.name")
        raise BadRequest(f"tool_choice: unknown tool {quote(field.name)}", param="tool_choice")
    asked.append(Asked("server_tools", "tool_choice"))
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
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    functions.check_count(len(field.tools or ()), "tool_choice.tools")
    targets = _choice_targets(toolset)
    names: set[str] = set()
    for at, entry in enumerate(field.tools or ()):
        path = f"tool_choice.tools[{at}]"
        allowed = json_body.convert(entry, ResponseToolChoice, path)
        found = _matching(allowed, targets)
        if not found and allowed.type in ("function", "custom", "namespace"):
            raise BadRequest(f"{path}: no tool of this request matches", param=path)
        if not found:
            asked.append(Asked("server_tools", path))
        names.update(found)
    left = tuple(tool for tool in toolset.tools if tool.name in names)
    if field.mode == "required":
        return _required(parallel, left, asked), left
    return ToolChoice("auto", None, parallel), left

"""The tools of a response, what the model sees of them, and which of them it may or must call.

    tool := {type: function, name, description, parameters, strict}
          | {type: custom, name, description, format: text | grammar}
          | {type: namespace, name, description, tools: tool*}
          | {type: local_shell | shell | apply_patch | tool_search}
          | {type: …}                                                    what a server would have to run
    tool_choice := none | auto | required | {type, name, namespace}
                 | {type: allowed_tools, mode: auto | required, tools: ({type, name})*}

Rules
1. To the model every tool is a function with a name of its own: a tool in a namespace is called `namespace__name`, one
   in the namespace `functions`, where all functions are that have no other, just `name`.
2. What only a server could run is no mistake and is not offered; the response says so in its headers.
3. Tools also come in the input (`additional_tools`, `tool_search_output`). They are added, or replace one of that name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked, Tool, ToolChoice
from dragoman.protocols import json_body
from dragoman.protocols.chat import tools as functions
from dragoman.protocols.responses.calls import DESCRIPTIONS, SCHEMAS, Called, Kind
from dragoman.protocols.responses.fields import ChoiceField, ToolChoiceField

CLIENT_RUN: dict[str, Kind] = {
    "local_shell": "local_shell",
    "shell": "shell",
    "apply_patch": "apply_patch",
    "tool_search": "tool_search",
}
Meant = dict[tuple[str, str | None, str | None], list[str]]
"""By kind, name and namespace of a choice."""


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


class OwnTool(msgspec.Struct, frozen=True):
    description: str | None = None
    parameters: dict[str, Any] | None = None
    execution: str | None = None
    environment: Environment | None = None


class Offered(msgspec.Struct, frozen=True):
    """The tools as the model sees them, and by the same names what they are to the caller."""

    tools: tuple[Tool, ...] = ()
    called: Mapping[str, Called] = {}
    shown: Mapping[Called, str] = {}
    """The same the other way round."""

    def name(self, kind: Kind, name: str, namespace: str | None) -> str:
        """What the model calls a tool, also one that was there in an earlier turn only."""
        return self.shown.get(Called(kind, name, namespace)) or _flat(namespace, name)


def _flat(namespace: str | None, name: str) -> str:
    return name if namespace in (None, "functions") else f"{namespace}__{name}"


def decode(
    tools: Sequence[dict[str, Any]], additional: Iterable[tuple[str, Sequence[dict[str, Any]]]], asked: list[Asked]
) -> Offered:
    """`additional` are the lists of tools that the input has, each with its path."""
    reading = _Reading(asked)
    reading.read("tools", tools)
    reading.replacing = True
    for path, more in additional:
        reading.read(path, more)
    if reading.tools:
        asked.append(Asked("tools", "tools" if tools else "input"))
    shown = {called: name for name, called in reading.called.items()}
    return Offered(tuple(reading.tools.values()), reading.called, shown)


class _Reading:
    def __init__(self, asked: list[Asked]) -> None:
        self.tools: dict[str, Tool] = {}
        self.called: dict[str, Called] = {}
        self.replacing = False
        self._asked = asked

    def read(self, path: str, tools: Sequence[dict[str, Any]], space: Namespace | None = None) -> None:
        functions.check_count(len(tools), path)
        about = space.description if space is not None else None
        for at, tool in enumerate(tools):
            inner = f"{path}[{at}]"
            kind = tool.get("type")
            if not isinstance(kind, str):
                raise json_body.missing(f"{inner}.type")
            if kind == "function":
                self._function(inner, json_body.convert(tool, FunctionTool, inner), space, about)
            elif kind == "custom":
                self._custom(inner, json_body.convert(tool, CustomTool, inner), space, about)
            elif kind == "namespace" and space is None:
                nested = json_body.convert(tool, Namespace, inner)
                functions.checked_name(nested.name, f"{inner}.name")
                self.read(f"{inner}.tools", nested.tools, nested)
            elif kind in CLIENT_RUN and self._is_ours(tool, inner):
                self._own(inner, CLIENT_RUN[kind], json_body.convert(tool, OwnTool, inner))
            else:
                self._asked.append(Asked("server_tools", inner))
            # What a namespace is for is told once, with the first of its tools.
            about = None

    def _is_ours(self, tool: dict[str, Any], path: str) -> bool:
        own = json_body.convert(tool, OwnTool, path)
        if tool["type"] == "tool_search":
            return own.execution == "client"
        return own.environment is None or own.environment.type == "local"

    def _function(self, path: str, tool: FunctionTool, space: Namespace | None, about: str | None) -> None:
        strict = bool(tool.strict)
        if strict:
            self._asked.append(Asked("strict_tools", f"{path}.strict"))
        self._add(path, _called("function", tool.name, space), _words(about, tool.description), tool.parameters, strict)

    def _custom(self, path: str, tool: CustomTool, space: Namespace | None, about: str | None) -> None:
        words = _words(about, tool.description)
        if tool.format is not None and tool.format.type != "text":
            # Inside the string of a JSON object no grammar of another language can be kept to.
            self._asked.append(Asked("tool_grammar", f"{path}.format"))
            if tool.format.definition:
                words = _words(words, f"`input` keeps to this {tool.format.syntax} grammar:\n{tool.format.definition}")
        self._add(path, _called("custom", tool.name, space), words, SCHEMAS["custom"])

    def _own(self, path: str, kind: Kind, tool: OwnTool) -> None:
        words = tool.description or DESCRIPTIONS[kind]
        self._add(path, Called(kind, kind), words, tool.parameters or SCHEMAS[kind])

    def _add(
        self, path: str, called: Called, words: str, parameters: Mapping[str, Any] | None, strict: bool = False
    ) -> None:
        functions.checked_name(called.name, f"{path}.name")
        functions.check_schema(parameters, f"{path}.parameters")
        shown = self._shown(called, path)
        self.called[shown] = called
        self.tools[shown] = Tool(shown, words, parameters, strict, f"{path}.parameters")
        functions.check_count(len(self.tools), path.partition("[")[0])

    def _shown(self, called: Called, path: str) -> str:
        shown = _flat(called.namespace, called.name)
        while (taken := self.called.get(shown)) and (taken.name, taken.namespace) != (called.name, called.namespace):
            shown += "_"
        if taken and not self.replacing:
            raise BadRequest(f"{path}.name: another tool is called {called.name!r} already", param=f"{path}.name")
        return shown


def _called(kind: Kind, name: str, space: Namespace | None) -> Called:
    return Called(kind, name, None if space is None else space.name)


def _words(*words: str | None) -> str:
    return "\n".join(part for part in words if part)


def choose(
    field: ToolChoiceField, parallel: bool, offered: Offered, asked: list[Asked]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """The choice, and the tools that it leaves."""
    if isinstance(field, ChoiceField):
        if field.type == "allowed_tools":
            return _allowed(field, parallel, offered, asked)
        return _named(field, parallel, offered, asked), offered.tools
    if field == "required":
        return _required(parallel, offered.tools, asked), offered.tools
    return ToolChoice(field or "auto", None, parallel), offered.tools


def _required(parallel: bool, tools: Sequence[Tool], asked: list[Asked]) -> ToolChoice:
    if tools:
        asked.append(Asked("constraint", "tool_choice"))
        return ToolChoice("required", None, parallel)
    if not any(entry.feature == "server_tools" for entry in asked):
        raise functions.nothing_to_call("tool_choice")
    asked.append(Asked("server_tools", "tool_choice"))
    return ToolChoice("auto", None, parallel)


def _named(field: ChoiceField, parallel: bool, offered: Offered, asked: list[Asked]) -> ToolChoice:
    found = _matching(field, _meant(offered))
    if found:
        asked.append(Asked("constraint", "tool_choice"))
        return ToolChoice("named", found[0], parallel)
    if field.type in ("function", "custom"):
        if field.name is None:
            raise json_body.missing("tool_choice.name")
        raise BadRequest(f"tool_choice: no tool is called {quote(field.name)}", param="tool_choice")
    asked.append(Asked("server_tools", "tool_choice"))
    return ToolChoice("auto", None, parallel)


def _meant(offered: Offered) -> Meant:
    """What may be chosen, with the names, to the model, of what that means. A namespace means all that is in it."""
    meant: Meant = {}
    for shown, called in offered.called.items():
        named = {(called.kind, called.name, None), (called.kind, called.name, called.namespace)}
        for choice in (*named, ("namespace", called.namespace, None)):
            meant.setdefault(choice, []).append(shown)
    return meant


def _matching(field: ChoiceField, meant: Meant) -> Sequence[str]:
    if field.type in ("function", "custom"):
        return meant.get((field.type, field.name, field.namespace), ())
    # A tool of another kind is called as its kind is.
    return meant.get((field.type, field.name if field.type == "namespace" else field.type, None), ())


def _allowed(
    field: ChoiceField, parallel: bool, offered: Offered, asked: list[Asked]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    functions.check_count(len(field.tools or ()), "tool_choice.tools")
    meant = _meant(offered)
    names: set[str] = set()
    for at, entry in enumerate(field.tools or ()):
        path = f"tool_choice.tools[{at}]"
        allowed = json_body.convert(entry, ChoiceField, path)
        found = _matching(allowed, meant)
        if not found and allowed.type in ("function", "custom", "namespace"):
            raise BadRequest(f"{path}: names no tool of this request", param=path)
        if not found:
            asked.append(Asked("server_tools", path))
        names.update(found)
    left = tuple(tool for tool in offered.tools if tool.name in names)
    if field.mode == "required":
        return _required(parallel, left, asked), left
    return ToolChoice("auto", None, parallel), left

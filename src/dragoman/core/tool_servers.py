"""Servers whose tools Dragoman calls for the model: how a request describes them, and what they list.

    function name := LABEL "__" TOOL, with other characters than letters, digits, "_" and "-" replaced by "_"

Rules
1. The model sees the tool of a server as a function. A function name that had to be changed or shortened ends in a
   digest of label and name, so that two tools have two names.
2. A tool is offered if it matches the filter of the request. A call of a tool waits for approval if the rule says so.
3. The address and `headers` may contain credentials. They are sent to the server and nowhere else: what
   `core.urls.find_server_secrets` returns is in no output.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_NAME = 64
"""Characters of a function name, which is what OpenAI's models allow."""
DIGEST_LENGTH = 8
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
HEADER_VALUE = re.compile(r"[!-~]([ -~\t]*[!-~])?|")
FIXED_HEADERS = frozenset(
    {
        *("accept", "connection", "content-encoding", "content-length", "content-type", "host", "transfer-encoding"),
        *("upgrade", "mcp-session-id", "mcp-protocol-version"),
    }
)
"""Headers that belong to the connection."""
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")


class ListedTool(msgspec.Struct, frozen=True):
    """A tool as its server lists it. `input_schema` is its JSON Schema."""

    name: str
    description: str = ""
    input_schema: Mapping[str, Any] = {}
    is_read_only: bool = False
    """What the server says about it."""


class ToolFilter(msgspec.Struct, frozen=True):
    """A set of tools: those with one of `names`, except `hidden` ones. None means all."""

    names: tuple[str, ...] | None = None
    hidden: tuple[str, ...] = ()
    is_read_only: bool | None = None

    def matches(self, tool: ListedTool) -> bool:
        if self.is_read_only is not None and tool.is_read_only is not self.is_read_only:
            return False
        return tool.name not in self.hidden and (self.names is None or tool.name in self.names)


class ApprovalRule(msgspec.Struct, frozen=True):
    """Which calls need the caller's approval: those of `always`, and all others unless only `always` is given or
    `never` matches."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None

    def needs_approval(self, tool: ListedTool) -> bool:
        if self.always is not None and self.always.matches(tool):
            return True
        if self.never is not None and self.never.matches(tool):
            return False
        return self.never is not None or self.always is None


NO_APPROVAL = ApprovalRule(never=ToolFilter())


class ToolServer(msgspec.Struct, frozen=True):
    """A server in a request. Without `url` it is the server of the configuration with this label. `path` is its field.

    `listed`: its tools, if an earlier response listed them. `must_list`: whether the request fails if the server cannot
    list its tools, because the protocol has no other way to tell.
    """

    label: str
    path: str
    url: str | None = None
    headers: Mapping[str, str] = {}
    description: str = ""
    offered: ToolFilter = ToolFilter()
    approval: ApprovalRule = NO_APPROVAL
    listed: tuple[ListedTool, ...] | None = None
    must_list: bool = False

    @property
    def needs_listing(self) -> bool:
        """Whether the tools that are known do not suffice."""
        if self.listed is None:
            return True
        known = {tool.name for tool in self.listed}
        return not known.issuperset(self.offered.names or ())


def function_name(label: str, tool: str) -> str:
    """Return the name of the function that stands for a tool."""
    name = f"{label}__{tool}"
    plain = _OTHER_CHARACTERS.sub("_", name)
    return plain if plain == name and len(name) <= MAX_NAME else digest_name(label, tool)


def digest_name(label: str, tool: str) -> str:
    """Return the name of a function whose plain name is not possible, or taken."""
    digest = hashlib.sha256(f"{label}\0{tool}".encode("utf-8", "replace")).hexdigest()[:DIGEST_LENGTH]
    plain = _OTHER_CHARACTERS.sub("_", f"{label}__{tool}")
    return f"{plain[: MAX_NAME - DIGEST_LENGTH - 1]}_{digest}"


def find_header_error(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the first header that cannot be sent, and why. The value is not shown."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            return name, "not a valid name of a header"
        if name.lower() in FIXED_HEADERS:
            return name, "this header cannot be set"
        if not HEADER_VALUE.fullmatch(value):
            return name, "the value must be printable ASCII"
    return None

"""MCP servers whose tools the models may call, and what requests may do with servers of their own.

    mcp_servers := {name: {command: [PROGRAM, ARGUMENT...], env: {...}} | {url: URL, headers: {...}}}
                   and tools: [NAME...]
    mcp         := {allow: [PATTERN...], allow_addresses: [NETWORK...], call_seconds, result_bytes, tools, rounds,
                    connections}

`${NAME}` in a value of `env` or `headers` stands for an environment variable of the server.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from dragoman.config.config_file import ConfigFile
from dragoman.config.sections import Network
from dragoman.core.errors import ConfigError
from dragoman.core.tool_servers import find_header_error
from dragoman.core.types import Count, Seconds, Word
from dragoman.core.url_patterns import PlainUrl, UrlPattern
from dragoman.core.urls import find_server_secrets

SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PACKAGE_NEEDED = "tools of MCP servers need the package mcp; pip install 'dragoman[mcp]'"
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class ToolServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server that requests may name: a program that talks MCP on its standard streams, or an address."""

    command: tuple[Word, ...] = ()
    env: Mapping[Word, str] = {}
    """For the program, beside PATH, HOME and the like."""
    url: Word | None = None
    headers: Mapping[Word, str] = {}
    tools: tuple[Word, ...] | None = None
    """The only tools that may be called; None means all."""

    def __post_init__(self) -> None:
        if (self.url is None) == (not self.command):
            raise ValueError("command: give either command or url")
        if self.url is None and self.headers:
            raise ValueError("headers: only with url")
        if self.url is not None and self.env:
            raise ValueError("env: only with command")

    @property
    def missing_variables(self) -> list[str]:
        """The environment variables that are not set."""
        values = (*self.env.values(), *self.headers.values())
        return [name for value in values for name in _VARIABLE.findall(value) if name not in os.environ]

    @property
    def secrets(self) -> tuple[str, ...]:
        """The values that must not be shown: see `find_server_secrets`. A variable is as secret as a header."""
        values = {**self.env, **self.headers}
        return find_server_secrets(self.url, {name: fill_variables(value) for name, value in values.items()})


class McpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    allow: tuple[Word, ...] = ()
    """Patterns of the addresses that requests may name."""
    allow_addresses: tuple[Word, ...] = ()
    """Private addresses and networks that these may resolve to."""
    call_seconds: Seconds = 60.0
    """For a call, and for listing the tools."""
    result_bytes: Count = 64 * 1024
    """The text of a result; more is cut off."""
    tools: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 128
    """Tools of one server in one request."""
    rounds: Count = 32
    """How often the model may call tools of servers in one response, several at a time."""
    connections: Count = 64
    """To all servers together."""


def fill_variables(value: str) -> str:
    """Replace the environment variables in a value, except those that are not set."""
    return _VARIABLE.sub(lambda found: os.environ.get(found[1], found[0]), value)


def check_servers(file: ConfigFile, servers: Mapping[str, ToolServerSpec], mcp: McpSettings) -> None:
    """Report strings that have the right type but the wrong form."""
    for name, spec in servers.items():
        key = f"mcp_servers.{name}"
        if not SERVER_NAME.fullmatch(name):
            file.add_error(key, "a name may contain only 1 to 64 letters, digits, _ and -")
        if spec.url is not None and PlainUrl.parse(spec.url) is None:
            # The address may have a password.
            file.add_error(f"{key}.url", "expected an address as https://example.com/mcp; put credentials into headers")
        error = find_header_error({name: fill_variables(value) for name, value in spec.headers.items()})
        if error is not None:
            file.add_error(f"{key}.headers.{error[0]}", error[1])
    for at, pattern in enumerate(mcp.allow):
        file.parse(pattern, UrlPattern.parse, f"mcp.allow[{at}]")
    for at, entry in enumerate(mcp.allow_addresses):
        file.parse(entry, parse_addresses, f"mcp.allow_addresses[{at}]")


def parse_addresses(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError as error:
        raise ConfigError(f"{entry!r}: expected an address, or a network such as 10.0.0.0/8") from error

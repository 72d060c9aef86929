"""Lists and calls the tools of MCP servers, with connections that requests share.

Rules
1. The servers of the configuration are shared by all callers. A server that a request names is shared by requests of
   the same principal with the same headers.
2. A request may name an address that matches `mcp.allow`, and no private one that `mcp.allow_addresses` lacks.
3. A server can make only its own calls fail: the result is an error with a text for the model. Mistakes of the request
   are raised.
4. A call is not repeated, except on a connection that the server does not know any more: it has not run then.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx2
import mcp.types as wire
import msgspec
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from dragoman.config.mcp import McpSettings, ToolServerSpec, fill_variables, parse_addresses
from dragoman.config.sections import Network
from dragoman.core.errors import BadRequest
from dragoman.core.events import ToolOutput, ToolsListed
from dragoman.core.request import ToolCall
from dragoman.core.tool_servers import ListedTool, ToolServer
from dragoman.core.url_patterns import PlainUrl, UrlPattern
from dragoman.server.mcp.addresses import Resolver
from dragoman.server.mcp.connection import CONNECTION_CLOSED_MESSAGE, ConnectionFailed, MakeTransport, McpConnection
from dragoman.server.mcp.http_transport import SESSION_UNKNOWN, STATUS, GuardedTransport, http_transport
from dragoman.server.mcp.program_transport import ErrorOutput, program_transport
from dragoman.server.mcp.results import error_text, read_result, read_tool

log = logging.getLogger("dragoman.mcp")

CONFIGURED_IDLE, REQUESTED_IDLE = 300.0, 30.0
"""Seconds after which an unused connection is closed."""
MIN_MESSAGE = 2 * 1024 * 1024
"""Bytes of a message of a server that are read at least. Images in results count, although they are not passed on."""
MAX_PAGES = 50
"""Pages of a list of tools."""
NO_CONNECTION, TIMED_OUT, INVALID_ANSWER = 502, -32001, -32700
"""Codes of errors; positive ones are an HTTP status."""
INVALID_ANSWER_MESSAGE = "the answer of the server does not follow MCP"
CONFIGURED = "configuration"


class McpTarget(NamedTuple):
    """A server to connect to. Requests with equal targets share connections."""

    owner: str
    """The principal, or `CONFIGURED` for a server of the configuration."""
    name: str
    """The address, or the name in the configuration."""
    headers: tuple[tuple[str, str], ...] = ()


class _ServerFailed(Exception):
    """A call failed. The message can be shown to callers."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ConnectionPool:
    def __init__(self, servers: Mapping[str, ToolServerSpec], mcp: McpSettings) -> None:
        self._connections: dict[McpTarget, McpConnection] = {}
        """Those that take calls; the least recently used first."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Those of all connections that are not closed."""
        self._resolver = Resolver()
        self._context = ssl.create_default_context()
        self._servers: Mapping[str, ToolServerSpec] = {}
        self.configure(servers, mcp)

    def configure(self, servers: Mapping[str, ToolServerSpec], mcp: McpSettings) -> None:
        """Apply new settings. Connections to servers that have changed take no further calls."""
        changed = {name for name, spec in self._servers.items() if servers.get(name) != spec}
        self._servers, self._mcp = servers, mcp
        self._patterns = [UrlPattern.parse(pattern) for pattern in mcp.allow]
        self._allowed: list[Network] = [parse_addresses(entry) for entry in mcp.allow_addresses]
        for target, connection in list(self._connections.items()):
            if target.owner != CONFIGURED or target.name in changed:
                connection.retire()

    async def stop(self) -> None:
        for connection in list(self._connections.values()):
            connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._resolver.close()

    async def list_tools(
        self, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
    ) -> tuple[ToolsListed, ...]:
        """List the tools of the servers whose labels are `wanted`. Raises an error if one of all must not be used."""
        targets = [(server, self._target(server, principal)) for server in servers]
        listings = [self._list(server, target) for server, target in targets if server.label in wanted]
        return tuple(await asyncio.gather(*listings))

    async def _list(self, server: ToolServer, target: McpTarget) -> ToolsListed:
        try:
            tools = await self._with_session(target, partial(self._read_tools, server, target))
        except _ServerFailed as error:
            return ToolsListed(server.label, error=str(error))
        return ToolsListed(server.label, tuple(tools))

    async def _read_tools(self, server: ToolServer, target: McpTarget, session: ClientSession) -> list[ListedTool]:
        found: dict[str, ListedTool] = {}
        cursor, own = None, self._own_tools(target)
        for _ in range(MAX_PAGES):
            params = wire.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await session.send_request(wire.ListToolsRequest(params=params), wire.ListToolsResult)
            for entry in page.tools:
                tool = read_tool(entry)
                if tool is not None and (own is None or tool.name in own) and server.offered.matches(tool):
                    found.setdefault(tool.name, tool)
            if len(found) > self._mcp.tools:
                message = f"the server has more than {self._mcp.tools} tools; name those to offer, or raise `mcp.tools`"
                raise _ServerFailed(message, INVALID_ANSWER)
            cursor = page.next_cursor
            if not cursor:
                return list(found.values())
        raise _ServerFailed(f"the server lists its tools on more than {MAX_PAGES} pages", INVALID_ANSWER)

    async def call_tool(self, principal: str, server: ToolServer, call: ToolCall) -> ToolOutput:
        """Call a tool. `call` has the name that the server uses."""
        try:
            target = self._target(server, principal)
        except BadRequest as error:
            # The configuration has changed since the tools were listed.
            return ToolOutput(call.id, error.message, is_error=True)
        own = self._own_tools(target)
        if own is not None and call.name not in own:
            return ToolOutput(call.id, "the operator does not allow this tool", is_error=True)
        try:
            result = await self._with_session(target, partial(_call, call))
        except _ServerFailed as error:
            return ToolOutput(call.id, str(error), is_error=True, code=error.code)
        text = read_result(result, self._mcp.result_bytes, self._secrets(target))
        return ToolOutput(call.id, text, result.is_error)

    def _target(self, server: ToolServer, principal: str) -> McpTarget:
        if server.url is None:
            if server.label not in self._servers:
                known = ", ".join(self._servers) or "none"
                message = (
                    f"{server.path}: there is no mcp server {server.label!r} in the configuration; it has: {known}. "
                    "Give the address of another one"
                )
                raise BadRequest(message, param=server.path)
            return McpTarget(CONFIGURED, server.label)
        url = _parse_url(server.url)
        if url is None or not any(pattern.matches(url) for pattern in self._patterns):
            shown = "this address" if url is None else url.origin
            message = (
                f"{server.path}: this server does not connect to {shown}; its operator can allow it in `mcp.allow`"
            )
            raise BadRequest(message, param=server.path)
        return McpTarget(principal, server.url, tuple(server.headers.items()))

    def _own_tools(self, target: McpTarget) -> tuple[str, ...] | None:
        """The only tools of a server that the operator allows; None means all."""
        spec = self._servers.get(target.name) if target.owner == CONFIGURED else None
        return None if spec is None else spec.tools

    def _secrets(self, target: McpTarget) -> tuple[str, ...]:
        if target.owner == CONFIGURED:
            spec = self._servers.get(target.name)
            return () if spec is None else spec.secrets
        return ToolServerSpec(url=target.name, headers=dict(target.headers)).secrets

    async def _with_session(self, target: McpTarget, use: Callable[[ClientSession], Any]) -> Any:
        """Run a call, and describe its failure."""
        seconds, secrets = self._mcp.call_seconds, self._secrets(target)
        connection = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    is_new = target not in self._connections
                    connection = self._connect(target)
                    try:
                        async with connection.use() as session:
                            return await use(session)
                    except MCPError as error:
                        if is_new or _status(error) != SESSION_UNKNOWN:
                            raise
                        connection.retire()
        except TimeoutError:
            if connection is not None:
                connection.retire()
            raise _ServerFailed(f"the server did not answer within {seconds:g} s", TIMED_OUT) from None
        except ConnectionFailed as error:
            raise _ServerFailed(error_text(str(error), secrets), NO_CONNECTION) from None
        except MCPError as error:
            message = (
                CONNECTION_CLOSED_MESSAGE
                if error.code == wire.CONNECTION_CLOSED
                else error_text(error.message, secrets)
            )
            raise _ServerFailed(message, _status(error) or error.code) from None
        except ValidationError:
            raise _ServerFailed(INVALID_ANSWER_MESSAGE, INVALID_ANSWER) from None
        except _ServerFailed:
            raise
        except Exception as error:  # noqa: BLE001 (an error for the model, and logged)
            # Its message may contain what the server sent.
            log.error("a call of a tool of an MCP server failed: %s", type(error).__name__)
            raise _ServerFailed(INVALID_ANSWER_MESSAGE, INVALID_ANSWER) from None

    def _connect(self, target: McpTarget) -> McpConnection:
        connection = self._connections.pop(target, None)
        if connection is None:
            self._check_spec(target)
            self._make_room()
            is_configured, secrets = target.owner == CONFIGURED, self._secrets(target)
            error_output = ErrorOutput(secrets)
            connection = McpConnection(
                self._make_transport(target, error_output),
                CONFIGURED_IDLE if is_configured else REQUESTED_IDLE,
                lambda: self._forget(target, connection),
                lambda reason: _log_failure(target, error_text(reason, secrets), error_output),
            )
            self._tasks.add(connection.task)
            connection.task.add_done_callback(self._tasks.discard)
        self._connections[target] = connection
        return connection

    def _check_spec(self, target: McpTarget) -> None:
        if target.owner != CONFIGURED:
            return
        spec = self._servers.get(target.name)
        if spec is None:
            message = (
                f"the mcp server {target.name!r} is no longer in the configuration; remove its tools from the request"
            )
            raise _ServerFailed(message, NO_CONNECTION)
        if spec.missing_variables:
            names = ", ".join(spec.missing_variables)
            log.error("MCP server %s: the environment has no %s; set it and restart Dragoman", target.name, names)
            message = f"the mcp server {target.name!r} needs environment variables that are not set; the log names them"
            raise _ServerFailed(message, NO_CONNECTION)

    def _make_room(self) -> None:
        if len(self._tasks) < self._mcp.connections:
            return
        for connection in self._connections.values():
            if connection.is_idle:
                connection.retire()
                return
        raise _ServerFailed("too many connections to MCP servers are open; try again later", NO_CONNECTION)

    def _forget(self, target: McpTarget, connection: McpConnection | None) -> None:
        if self._connections.get(target) is connection:
            del self._connections[target]

    def _make_transport(self, target: McpTarget, error_output: ErrorOutput) -> MakeTransport:
        max_bytes = max(MIN_MESSAGE, 2 * self._mcp.result_bytes)
        if target.owner != CONFIGURED:
            guarded = GuardedTransport(self._resolver, self._allowed, self._context, max_bytes)
            return partial(http_transport, target.name, dict(target.headers), guarded)
        spec = self._servers[target.name]
        if spec.url is not None:
            headers = {name: fill_variables(value) for name, value in spec.headers.items()}
            return partial(
                http_transport, spec.url, headers, GuardedTransport(self._resolver, None, self._context, max_bytes)
            )
        env = {name: fill_variables(value) for name, value in spec.env.items()}
        return partial(program_transport, spec.command, env, max_bytes, error_output)


def _log_failure(target: McpTarget, reason: str, error_output: ErrorOutput) -> None:
    if target.owner == CONFIGURED:
        words = f"; it wrote: {error_output.text}" if error_output.text else ""
        log.warning("MCP server %s: %s%s", target.name, reason, words)


async def _call(call: ToolCall, session: ClientSession) -> wire.CallToolResult:
    # `session.call_tool` would also check the result against a schema of the server, whose patterns may never end.
    arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    params = wire.CallToolRequestParams(name=call.name, arguments=arguments)
    return await session.send_request(wire.CallToolRequest(params=params), wire.CallToolResult)


def _parse_url(text: str) -> PlainUrl | None:
    try:
        httpx2.URL(text)
    except httpx2.InvalidURL:
        return None
    return PlainUrl.parse(text)


def _status(error: MCPError) -> int | None:
    data = error.data
    status = data.get(STATUS) if isinstance(data, dict) else None
    return status if isinstance(status, int) else None

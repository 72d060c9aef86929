"""Access to tool servers: that of the process that has the connections, and what handlers need of it."""

import asyncio
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from dragoman.config.mcp import PACKAGE_NEEDED
from dragoman.config.settings import Settings
from dragoman.core.errors import NotSupported
from dragoman.core.events import ToolOutput, ToolsListed
from dragoman.core.request import ToolCall
from dragoman.core.tool_servers import ToolServer

if TYPE_CHECKING:
    from dragoman.server.mcp.pool import ConnectionPool

POOL = "dragoman.server.mcp.pool"


class ToolServers(Protocol):
    """`request_id` is the request that waits: its calls are cancelled when it ends."""

    async def list_tools(
        self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
    ) -> tuple[ToolsListed, ...]:
        """List the tools of the servers whose labels are `wanted`. Raises an error if one of all must not be used."""

    async def call_tool(self, request_id: str, principal: str, server: ToolServer, call: ToolCall) -> ToolOutput:
        """Call a tool by the name that its server uses. A failure of the server is an output too."""


class LocalToolServers:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool: ConnectionPool | None = None
        self._opening = asyncio.Lock()

    def configure(self, settings: Settings) -> None:
        self._settings = settings
        if self._pool is not None:
            self._pool.configure(settings.mcp_servers, settings.mcp)

    async def list_tools(
        self, request_id: str, principal: str, servers: Sequence[ToolServer], wanted: Sequence[str]
    ) -> tuple[ToolsListed, ...]:
        return await (await self._open()).list_tools(principal, servers, wanted)

    async def call_tool(self, request_id: str, principal: str, server: ToolServer, call: ToolCall) -> ToolOutput:
        return await (await self._open()).call_tool(principal, server, call)

    async def stop(self) -> None:
        if self._pool is not None:
            await self._pool.stop()

    async def _open(self) -> "ConnectionPool":
        async with self._opening:
            if self._pool is None:
                if find_spec("mcp") is None:
                    raise NotSupported(PACKAGE_NEEDED, param="tools")
                # The package is optional, and importing it takes a second.
                module = await asyncio.to_thread(import_module, POOL)
                settings = self._settings
                pool = await asyncio.to_thread(module.ConnectionPool, settings.mcp_servers, settings.mcp)
                # The settings may have changed meanwhile.
                pool.configure(self._settings.mcp_servers, self._settings.mcp)
                self._pool = pool
            return self._pool

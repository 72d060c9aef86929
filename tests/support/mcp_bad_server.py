"""An MCP server that misbehaves as told, and connections to it."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dragoman.config.mcp import McpSettings, ToolServerSpec
from dragoman.core.events import ToolsListed
from dragoman.core.tool_servers import ToolServer
from dragoman.server.mcp.pool import ConnectionPool
from tests.support.bad_server import BadServer, Script, answer, whole

SECONDS = 3.0
"""The time for a call."""
TOOLS = {"tools": [{"name": "tool", "inputSchema": {"type": "object"}}]}
GOOD = {"content": [{"type": "text", "text": "fine"}]}


def result(body: bytes, value: Any) -> Script:
    return answer({"jsonrpc": "2.0", "id": json.loads(body)["id"], "result": value})


def error(body: bytes, code: int, message: str) -> Script:
    return answer({"jsonrpc": "2.0", "id": json.loads(body)["id"], "error": {"code": code, "message": message}})


class McpServer(BadServer):
    """A server of the version of 2025 that misbehaves as told: `play_method` answers a method in another way."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls)
        self.methods: dict[str, Any] = {}
        self.also(self._answer, path="/mcp")

    def play_method(self, **scripts: Any) -> None:
        self.methods = {name.replace("_", "/"): script for name, script in scripts.items()}

    @property
    def sessions(self) -> int:
        return sum(b'"initialize"' in body for body in self.requests["/mcp"])

    def _answer(self, sent: str, body: bytes) -> Script:
        if sent.startswith("GET"):
            return [whole(b"", "405 Method Not Allowed")]
        method = json.loads(body)["method"]
        if method in self.methods:
            script: Script = self.methods[method](body)
            return script
        if method.startswith("notifications/"):
            return [whole(b"", "202 Accepted")]
        if method == "initialize":
            info = {"name": "x", "version": "1"}
            return result(body, {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
        if method == "tools/list":
            return result(body, TOOLS)
        if method == "tools/call":
            return result(body, GOOD)
        return error(body, -32601, "Method not found")


@asynccontextmanager
async def pool_for(servers: dict[str, ToolServerSpec] | None = None, **settings: Any) -> AsyncIterator[ConnectionPool]:
    allowed = {"allow": ("http://*:*", "https://*:*"), "allow_addresses": ("127.0.0.1",), "call_seconds": SECONDS}
    pool = ConnectionPool(servers or {}, McpSettings(**{**allowed, **settings}))
    try:
        yield pool
    finally:
        await pool.stop()


def at(server: BadServer, **fields: Any) -> ToolServer:
    return ToolServer("bad", "tools[0]", f"{server.url}/mcp", **fields)


async def listed(pool: ConnectionPool, server: ToolServer) -> ToolsListed:
    (listing,) = await pool.list_tools("p", [server], [server.label])
    return listing

"""A real MCP server: `python -m tests.support.mcp_server [PORT]`. With a port it speaks HTTP, otherwise stdio."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.types import ToolAnnotations

MODULE = "tests.support.mcp_server"
PIXEL = bytes.fromhex("89504e470d0a1a0a")
server = MCPServer("test")
started: list[str] = []
"""The calls of `wait` that have begun, and whether they were cancelled."""


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


@server.tool(structured_output=False)
def draw() -> list[Any]:
    """Draw a picture."""
    return ["a picture", Image(data=PIXEL, format="png")]


@server.tool()
async def wait(name: str, seconds: float) -> str:
    """Wait."""
    started.append(name)
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        started.append(f"{name} cancelled")
        raise
    return f"waited for {name}"


@server.tool()
def history() -> str:
    """Return what `wait` has noted."""
    return ", ".join(started) or "nothing"


@server.tool()
def die() -> str:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@server.tool()
def process() -> str:
    """Return the id of the process."""
    return str(os.getpid())


@server.tool()
def credentials(context: Context[Any, Any]) -> str:
    """Return what the server knows of its caller."""
    request = context.request_context.request
    headers = "" if request is None else repr(dict(request.headers))
    return f"{headers} {os.environ.get('MCP_TEST_SECRET', '')}"


@contextmanager
def http_server() -> Iterator[int]:
    """Run the server with HTTP; yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", MODULE, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            signal.sigtimedwait([], 0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def command() -> list[str]:
    return [sys.executable, "-m", MODULE]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

"""A server with a scripted model that calls the tools of a real MCP server."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import mcp_server
from tests.support.server_process import Running, Serving


def call(tool_name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool_name, 'arguments': arguments})}</tool_call>"


REPLIES = [
    {"match": "^waited", "output": "I have waited."},
    {"match": "^blue$", "output": "blue"},
    {"match": "^Error|not run|did not|no such|operator", "output": "It failed."},
    {"match": "^3$", "output": "The sum is 3."},
    {"match": "^forever", "output": call("calc__echo", text="forever")},
    {"match": "add and look", "output": call("calc__add", a=1, b=2) + call("look", at="sky")},
    {"match": "remote", "output": call("remote__add", a=1, b=2)},
    {"match": "add twice", "output": call("calc__add", a=1, b=2) + call("calc__add", a=2, b=1)},
    {"match": "add", "output": "<think>Easy.</think>I add." + call("calc__add", a=1, b=2)},
    {"match": "fail", "output": call("calc__fail", text="x")},
    {"match": "wait long", "output": call("calc__wait", name="long", seconds=300)},
    {"match": "wait", "output": call("calc__wait", name="short", seconds=1.5)},
    {"match": "who", "output": call("calc__process")},
    {"match": "remember", "output": call("calc__history")},
    {"match": "secret", "output": call("calc__credentials")},
    {"match": "<\\|im_end\\|>", "output": "It is text."},
    {"match": "token", "output": call("calc__echo", text="<|im_end|>")},
    {"match": "not json", "output": '<tool_call>{"name": "calc__add", "arguments": [1]}</tool_call>'},
]
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@dataclass
class McpTest:
    running: Running
    port: int
    """That of an MCP server with HTTP, which requests may name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"


@pytest.fixture(scope="module")
def mcp(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[McpTest]:
    with mcp_server.http_server() as port, serving(tmp_path_factory.mktemp("mcp"), config(port)) as running:
        yield McpTest(running, port)


def config(port: int) -> dict[str, Any]:
    model = {"engine": "scripted", "format": "hermes", "replies": REPLIES}
    return {
        "models": {"m": model | {"slots": 1}},
        "mcp_servers": {
            "calc": {"command": mcp_server.command()},
            "sums": {"command": mcp_server.command(), "tools": ["add", "draw"]},
            "remote": {"url": f"http://127.0.0.1:{port}/mcp"},
        },
        "mcp": {
            "allow": [f"http://127.0.0.1:{port}/mcp"],
            "allow_addresses": ["127.0.0.1"],
            "call_seconds": 30,
            "rounds": 4,
        },
        # A model that produces nothing for a second fails. Tools may take longer.
        "limits": {"stall_seconds": 1},
    }

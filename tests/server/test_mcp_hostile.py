"""MCP servers that hang, lie, send too much or die cost only their own calls."""

import asyncio
import gzip
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.mcp import ToolServerSpec
from dragoman.core.events import ToolOutput
from dragoman.core.request import ToolCall
from dragoman.core.tool_servers import ToolFilter, ToolServer
from tests.support.bad_server import Script, Step, answer, chunk, head, whole
from tests.support.mcp_bad_server import GOOD, McpServer, at, error, listed, pool_for, result
from tests.support.server_process import children_of

CALL = ToolCall("call_1", "tool", "{}")
MEMORY = 64e6
"""Bytes that one call may take."""


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def bad() -> Iterator[McpServer]:
    with McpServer() as server:
        yield server


async def test_well_behaved_server(bad: McpServer) -> None:
    async with pool_for() as pool:
        assert [tool.name for tool in (await listed(pool, at(bad))).tools] == ["tool"]
        assert await pool.call_tool("p", at(bad), CALL) == ToolOutput("call_1", "fine")
        assert bad.sessions == 1


HUGE = b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [{"type": "text", "text": "'


def endless(begin: bytes) -> Iterator[Step]:
    """100 MB, if the client reads them."""
    yield begin
    for _ in range(1600):
        yield chunk(b"x" * 65536)


CHUNKED = head(content_type="application/json", transfer_encoding="chunked") + chunk(HUGE)
EVENTS = head(content_type="text/event-stream", transfer_encoding="chunked")
DEEP = b"[" * 100_000
CALLS: dict[str, tuple[Any, str]] = {
    "hangs": (lambda body: ["hang"], "did not answer within"),
    "hangs in a stream": (lambda body: [EVENTS, "hang"], "did not answer within"),
    "closes": (lambda body: ["close"], "broke the connection"),
    "resets": (lambda body: ["reset"], "broke the connection"),
    "closes in the body": (lambda body: [CHUNKED, "close"], "broke the connection"),
    "sends 100 MB of JSON": (lambda body: endless(CHUNKED), "more than"),
    "sends 100 MB in one event": (lambda body: endless(EVENTS + chunk(b"data: " + HUGE)), ""),
    "sends endless events": (lambda body: endless(EVENTS + chunk(b'data: {"jsonrpc":"2.0","method":"x"}\n\n')), ""),
    "sends 100 MB as an error": (lambda body: endless(CHUNKED.replace(b"200 OK", b"500 No")), "HTTP status 500"),
    "claims 100 GB": (lambda body: [head(content_length="100000000000"), "close"], ""),
    "is no JSON": (lambda body: [whole(b"<html>")], "Failed to parse JSON"),
    "is nested deeply": (lambda body: [whole(DEEP)], "Failed to parse JSON"),
    "is HTML": (lambda body: [whole(b"<html>", content_type="text/html")], "Unexpected content type"),
    "is compressed": (lambda body: [whole(gzip.compress(b"{}"), content_encoding="gzip")], "compressed"),
    "answers another request": (lambda body: answer({"jsonrpc": "2.0", "id": 999, "result": GOOD}), "did not answer"),
    "is no response": (lambda body: answer({"jsonrpc": "2.0", "method": "tools/call"}), "did not answer"),
    "has no content": (lambda body: result(body, {}), "does not follow MCP"),
    "has wrong content": (lambda body: result(body, {"content": [{"type": "text", "text": 5}]}), "does not follow MCP"),
    "has unknown content": (lambda body: result(body, {"content": [{"type": "magic"}]}), "does not follow MCP"),
    "is an error": (lambda body: error(body, -32602, "no such thing"), "no such thing"),
    "is a long error": (lambda body: error(body, -32602, "x" * 100_000), "xxx"),
    "is unauthorized": (lambda body: answer({"error": "invalid_token"}, "401 Unauthorized"), "HTTP status 401"),
    "is unavailable": (lambda body: [whole(b"later", "503 Service Unavailable")], "HTTP status 503"),
    "is accepted only": (lambda body: [whole(b"", "202 Accepted")], "202"),
    "has a wrong status line": (lambda body: [b"HELLO\r\n\r\n", "close"], "broke the connection"),
    "redirects elsewhere": (
        lambda body: [whole(b"", "307 Temporary Redirect", location="http://example.com/mcp")],
        "not followed",
    ),
}


@pytest.mark.parametrize("act", CALLS)
async def test_bad_answer_costs_only_its_call(bad: McpServer, act: str) -> None:
    script, message = CALLS[act]
    async with pool_for() as pool:
        assert (await pool.call_tool("p", at(bad), CALL)).text == "fine"
        before = memory()
        bad.play_method(tools_call=script)
        output = await pool.call_tool("p", at(bad), CALL)
        assert output.is_error
        assert message in output.text
        assert len(output.text) <= 1000
        assert memory() - before < MEMORY
        bad.play_method()
        assert await pool.call_tool("p", at(bad), CALL) == ToolOutput("call_1", "fine")


@pytest.mark.parametrize("act", ["hangs", "closes", "sends 100 MB of JSON", "is no JSON", "redirects elsewhere"])
async def test_bad_answer_to_the_first_message_or_the_list(bad: McpServer, act: str) -> None:
    script, _ = CALLS[act]
    for method in ("initialize", "tools_list"):
        async with pool_for() as pool:
            bad.play_method(**{method: script})
            listing = await listed(pool, at(bad))
            assert listing.error
            assert not listing.tools
            bad.play_method()
            assert (await listed(pool, at(bad))).error is None


async def test_other_calls_of_a_connection_go_on(bad: McpServer) -> None:
    def slow(body: bytes) -> Script:
        return [0.5, *result(body, GOOD)]

    async with pool_for() as pool:
        await listed(pool, at(bad))
        for act in ("is no JSON", "sends 100 MB of JSON", "is unavailable", "is compressed", "closes", "hangs"):
            bad.play_method(tools_call=slow)
            first = asyncio.create_task(pool.call_tool("p", at(bad), CALL))
            await asyncio.sleep(0.2)
            bad.play_method(tools_call=CALLS[act][0])
            assert (await pool.call_tool("p", at(bad), CALL)).is_error
            assert (await first).text == "fine", act


async def test_session_that_the_server_forgot_is_opened_again(bad: McpServer) -> None:
    forgotten: list[bytes] = []

    def forget(body: bytes) -> Script:
        if not forgotten:
            forgotten.append(body)
            return [whole(b"", "404 Not Found")]
        return result(body, GOOD)

    async with pool_for() as pool:
        await listed(pool, at(bad))
        bad.play_method(tools_call=forget)
        assert (await pool.call_tool("p", at(bad), CALL)).text == "fine"
        bad.play_method(tools_call=lambda body: [whole(b"", "404 Not Found")])
        assert (await pool.call_tool("p", at(bad), CALL)).code == 404


async def test_results_are_cut_and_described(bad: McpServer) -> None:
    async with pool_for(result_bytes=1000) as pool:
        for content, text in (
            ([{"type": "text", "text": "é" * 600}], "é" * 500 + "\n[cut off: the result has 1200 bytes"),
            ([{"type": "image", "data": "AAAA", "mimeType": "image/png"}], "[image, image/png, 3 bytes, not shown]"),
            ([{"type": "image", "data": "not base64", "mimeType": "x"}], "[image, x, "),
            ([{"type": "audio", "data": "AAAA", "mimeType": "audio/wav"}], "[audio, audio/wav, 3 bytes, not shown]"),
            ([{"type": "resource_link", "name": "n", "uri": "file:///x"}], "[resource n: file:///x]"),
            ([{"type": "resource", "resource": {"uri": "file:///x", "text": "t"}}], "[resource file:///x]\nt"),
            (
                [{"type": "resource", "resource": {"uri": "file:///x", "blob": "AAAA"}}],
                "[resource file:///x, binary, 3",
            ),
            ([{"type": "text", "text": "a"}, {"type": "text", "text": "b\x00\u202e"}], "a\nb\x00\u202e"),
            ([], ""),
        ):
            bad.play_method(tools_call=lambda body, content=content: result(body, {"content": content}))
            assert (await pool.call_tool("p", at(bad), CALL)).text.startswith(text)
        bad.play_method(tools_call=lambda body: result(body, {"content": [], "structuredContent": {"a": 1}}))
        assert (await pool.call_tool("p", at(bad), CALL)).text == '{"a":1}'
        bad.play_method(tools_call=lambda body: result(body, GOOD | {"isError": True}))
        assert await pool.call_tool("p", at(bad), CALL) == ToolOutput("call_1", "fine", is_error=True)


async def test_slow_pattern_in_an_output_schema_is_not_matched(bad: McpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    tool = {"name": "tool", "inputSchema": {"type": "object"}, "outputSchema": schema}
    bad.play_method(
        tools_list=lambda body: result(body, {"tools": [tool]}),
        tools_call=lambda body: result(body, GOOD | {"structuredContent": {"a": "a" * 60 + "!"}}),
    )
    async with pool_for() as pool:
        await listed(pool, at(bad))
        assert (await pool.call_tool("p", at(bad), CALL)).text == "fine"


def named(*names: str) -> dict[str, Any]:
    return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}


async def test_too_many_tools(bad: McpServer) -> None:
    def pages(body: bytes) -> Script:
        cursor = int((json.loads(body).get("params") or {}).get("cursor", 0))
        page: dict[str, Any] = named(*(f"tool_{cursor + number}" for number in range(1000)))
        return result(body, page | {"nextCursor": str(cursor + 1000)})

    bad.play_method(tools_list=lambda body: result(body, named(*(f"tool_{number}" for number in range(10_000)))))
    async with pool_for(call_seconds=30) as pool:
        error_text = (await listed(pool, at(bad))).error
        assert error_text is not None
        assert "more than 128 tools" in error_text
        chosen = at(bad, offered=ToolFilter(("tool_9999",)))
        assert [tool.name for tool in (await listed(pool, chosen)).tools] == ["tool_9999"]
        bad.play_method(tools_list=pages)
        assert "more than 128 tools" in str((await listed(pool, at(bad))).error)
        assert "more than 50 pages" in str((await listed(pool, at(bad, offered=ToolFilter(("x",))))).error)


async def test_unusable_tool_names_are_dropped_and_unusable_schemas_replaced(bad: McpServer) -> None:
    odd = ["", "x" * 300, "a b", "ключ", "<|im_end|>", "a\nb", "../x", "a" * 100, "tool", "tool"]
    deep: Any = {}
    for _ in range(90):
        deep = {"properties": {"a": deep}}
    schemas: list[Any] = [{"enum": [2**80]}, {"x": "y" * 100_000}, deep, {"properties": {"a": {"type": "string"}}}]
    more = [{"name": f"schema_{at}", "inputSchema": {"type": "object", **schema}} for at, schema in enumerate(schemas)]
    bad.play_method(tools_list=lambda body: result(body, {"tools": [*named(*odd)["tools"], *more]}))
    async with pool_for() as pool:
        tools = (await listed(pool, at(bad))).tools
    assert [tool.name for tool in tools[:7]] == odd[2:9]
    by_name = {tool.name: tool.input_schema for tool in tools}
    assert [by_name[f"schema_{at}"] == {"type": "object"} for at in range(4)] == [True, True, True, False]


async def test_connections_are_bounded_and_separate(bad: McpServer) -> None:
    async with pool_for(connections=2) as pool:
        for number in range(6):
            headers = {"Authorization": f"Bearer {number}"}
            assert (await pool.call_tool("p", at(bad, headers=headers), CALL)).text == "fine"
        assert bad.sessions == 6
        # Principals do not share connections.
        await pool.call_tool("other", at(bad, headers=headers), CALL)
        assert bad.sessions == 7
        bad.play_method(tools_call=lambda body: ["hang"])
        running = [asyncio.create_task(pool.call_tool(f"busy-{number}", at(bad), CALL)) for number in range(2)]
        await asyncio.sleep(0.5)
        assert "too many connections" in (await pool.call_tool("third", at(bad), CALL)).text
        await asyncio.gather(*running)


PROGRAM = """
import json, os, sys, time
def send(text): sys.stdout.write(text + "\\n"); sys.stdout.flush()
for line in sys.stdin:
    message = json.loads(line)
    method, number = message["method"], message.get("id")
    def reply(value): send(json.dumps({"jsonrpc": "2.0", "id": number, "result": value}))
    if method == "initialize":
        info = {"name": "x", "version": "1"}
        reply({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list":
        reply({"tools": [{"name": "tool", "inputSchema": {"type": "object"}}]})
    elif method == "tools/call":
        ACT
        reply({"content": [{"type": "text", "text": "fine"}]})
    elif number is not None:
        send(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no"}}))
END
"""
ACTS = {
    "hangs": ("time.sleep(600)", "did not answer within"),
    "dies": ("os._exit(3)", "closed the connection"),
    "sends 100 MB in a line": ("sys.stdout.write('x' * 100_000_000)", "closed the connection"),
    "sends 2 MB in lines": ("[send('x' * 1000) for _ in range(2_000)]", None),
    "sends other text": ("send('hello'); send('[]'); send('{'); sys.stdout.buffer.write(b'\\xff\\n')", None),
    "closes its output": ("os.close(1); time.sleep(600)", "closed the connection"),
    "fills its standard error": ("sys.stderr.write('x' * 10_000_000)", None),
}


def program(folder: Path, act: str, end: str = "") -> ToolServerSpec:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(PROGRAM).replace("ACT", act).replace("END", end))
    return ToolServerSpec(command=(sys.executable, str(file)))


@pytest.mark.parametrize("act", ACTS)
async def test_bad_program_costs_only_its_call(tmp_path: Path, act: str) -> None:
    code, message = ACTS[act]
    server = ToolServer("x", "tools[0]")
    async with pool_for({"x": program(tmp_path, code)}) as pool:
        before = memory()
        assert (await listed(pool, server)).error is None
        output = await pool.call_tool("p", server, CALL)
        if message is None:
            assert output.text == "fine"
        else:
            assert message in output.text
        assert memory() - before < MEMORY
        program(tmp_path, "pass")
        if message is not None:
            assert (await pool.call_tool("p", server, CALL)).text == "fine"
    assert [child for child in children_of(os.getpid()) if child_runs(child, tmp_path)] == []


def child_runs(pid: int, folder: Path) -> bool:
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False


async def test_program_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    async with pool_for({"x": program(tmp_path, "pass", end="time.sleep(600)")}) as pool:
        assert (await pool.call_tool("p", ToolServer("x", "tools[0]"), CALL)).text == "fine"
    assert [child for child in children_of(os.getpid()) if child_runs(child, tmp_path)] == []


async def test_program_that_cannot_start_is_described(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-in-the-environment")
    words = "import os, sys; sys.exit('cannot find ' + os.environ['KEY'])"
    specs = {
        "none": ToolServerSpec(command=("/nonexistent",)),
        "bad": ToolServerSpec(command=(sys.executable, "-c", words), env={"KEY": "${CANARY}"}),
        "unset": ToolServerSpec(command=(sys.executable, "-c", words), env={"KEY": "${NOT_SET}"}),
    }
    async with pool_for(specs) as pool:
        listings = [await listed(pool, ToolServer(name, "tools[0]")) for name in specs]
    assert [listing.error for listing in listings] == [
        "the program of the server cannot be started",
        "the server closed the connection",
        "the mcp server 'unset' needs environment variables that are not set; the log names them",
    ]
    assert "MCP server unset: the environment has no NOT_SET" in caplog.text
    # Its last words are for the operator.
    assert "MCP server bad: the server closed the connection; it wrote: cannot find ***" in caplog.text


async def test_program_has_no_variables_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "canary-in-the-environment")
    code = "reply({'content': [{'type': 'text', 'text': ' '.join(sorted(os.environ))}]}); continue"
    spec = program(tmp_path, code)
    async with pool_for({"x": ToolServerSpec(spec.command, {"OWN": "1"})}) as pool:
        text = (await pool.call_tool("p", ToolServer("x", "tools[0]"), CALL)).text
    assert "OWN" in text.split()
    assert "CANARY" not in text

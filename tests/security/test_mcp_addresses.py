"""Requests make the server connect only to addresses that its operator allows."""

import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import ToolCall
from dragoman.core.tool_servers import ToolServer
from dragoman.server.mcp import addresses
from tests.security.canaries import CanarySocket
from tests.support.bad_server import whole
from tests.support.certificates import write_certificate
from tests.support.mcp_bad_server import McpServer, at, listed, pool_for

CALL = ToolCall("call_1", "tool", "{}")


@pytest.fixture
def bad() -> Iterator[McpServer]:
    with McpServer() as server:
        yield server


async def test_redirects_stay_at_the_server(bad: McpServer) -> None:
    with closing(CanarySocket()) as other:
        for status in ("301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"):
            for location in (f"http://127.0.0.1:{other.port}/mcp", f"http://localhost:{bad.port}/mcp", "file:///x"):
                bad.play_method(initialize=lambda body, s=status, to=location: [whole(b"", s, location=to)])
                async with pool_for() as pool:
                    secret = at(bad, headers={"Authorization": "Bearer secret-token"})
                    listing = await listed(pool, secret)
                    assert listing.error
                    assert "secret-token" not in listing.error
        assert other.connections() == 0


@pytest.mark.parametrize(
    "entry",
    [
        *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "255.255.255.255", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:0:0:0:0:80ff:fffe", "2001:db8::1"),
        *("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"),
    ],
)
def test_special_addresses_are_refused(entry: str) -> None:
    assert not addresses.is_allowed(ipaddress.ip_address(entry), [])


@pytest.mark.parametrize("entry", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(entry: str) -> None:
    assert addresses.is_allowed(ipaddress.ip_address(entry), [])


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "127.1", "0", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::]"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "0.0.0.0", "127.0.0.1."),
    ],
)
async def test_hosts_of_this_machine_are_not_connected_to(host: str) -> None:
    with closing(CanarySocket()) as canary:
        async with pool_for(allow_addresses=()) as pool:
            server = ToolServer("x", "tools[0]", f"http://{host}:{canary.port}/mcp")
            try:
                error_text = (await listed(pool, server)).error
            except BadRequest as refused:
                error_text = refused.message
            assert error_text is not None
            assert re.search("is not public|cannot be resolved|does not connect to this address", error_text)
        assert canary.connections() == 0


async def test_name_is_resolved_once_and_that_address_is_used(bad: McpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["127.0.0.1"]
    asked: list[str] = []

    def look_up(host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (entry, port)) for entry in answers]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    server = ToolServer("x", "tools[0]", f"http://rebinding.example:{bad.port}/mcp")
    # A public name that resolves to this machine.
    async with pool_for(allow_addresses=()) as pool:
        assert "is not public" in str((await listed(pool, server)).error)
        answers[:] = ["1.1.1.1", "127.0.0.1"]
        assert "is not public" in str((await listed(pool, server)).error)
    assert bad.connections == 0
    answers[:] = ["127.0.0.1"]
    async with pool_for() as pool:
        assert (await listed(pool, server)).error is None
        # The next connection is checked again.
        answers[:] = ["10.0.0.1"]
        bad.play_method(tools_call=lambda body: ["close"])
        await pool.call_tool("p", server, CALL)
        assert "is not public" in (await pool.call_tool("p", server, CALL)).text
    assert set(asked) == {"rebinding.example"}
    assert f"host: rebinding.example:{bad.port}" in bad.heads[-1]


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:password@127.0.0.1/mcp", "http://127.0.0.1\\@example.com/", "//127.0.0.1/", "ftp://127.0.0.1/"),
        *("file:///etc/passwd", "http://①②⑦.0.0.1/", " http://127.0.0.1/", "http://127.0.0.1/#x", "http:/\\127.0.0.1/"),
        *(
            "http://127.0.0.1:99999/",
            "http://127.0.0.1%00.example/",
            "http://[fe80::1%25eth0]/",
            "http://a/%2e%2e/b",
            "",
        ),
        "http://a\r\nHost: b/",
    ],
)
async def test_odd_addresses_are_refused(url: str) -> None:
    async with pool_for() as pool:
        with pytest.raises(BadRequest, match="does not connect to this address"):
            await listed(pool, ToolServer("x", "tools[0]", url))


async def test_only_allowed_addresses_are_connected_to(bad: McpServer) -> None:
    async with pool_for(allow=(f"http://127.0.0.1:{bad.port}/m*",)) as pool:
        assert (await listed(pool, at(bad))).error is None
        for url in (f"{bad.url}/other", f"https://127.0.0.1:{bad.port}/mcp", f"http://127.0.0.1:{bad.port + 1}/mcp"):
            with pytest.raises(BadRequest, match="does not connect to"):
                await listed(pool, ToolServer("x", "tools[0]", url))
        assert "does not connect" in (await pool.call_tool("p", ToolServer("x", "t", f"{bad.url}/other"), CALL)).text
    async with pool_for(allow=()) as pool:
        with pytest.raises(BadRequest):
            await listed(pool, at(bad))


async def test_certificate_must_be_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection goes to an address, but the name is that of the request."""
    files = write_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", files.certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    with McpServer(context) as server:
        async with pool_for() as pool:
            assert (await listed(pool, at(server))).error is None
            other = ToolServer("x", "tools[0]", f"https://127.0.0.1:{server.port}/mcp")
            assert (await listed(pool, other)).error == "cannot connect to the server"

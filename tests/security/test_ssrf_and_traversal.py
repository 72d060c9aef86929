"""The server never fetches an address or opens a file that a request names.

No request field is an address that the server itself calls, or a path that it opens, except addresses of MCP servers
that the operator allows (see `test_mcp_addresses`). A listening socket and a watched folder prove it for addresses and
names in every field that takes some.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.security.canaries import CanaryFolder, CanarySocket
from tests.security.echo_upstream import EchoUpstream
from tests.security.http_client import PipelinedClient, Request
from tests.support.requests import CHAT, SMALLEST, talking
from tests.support.server_process import Running, Serving

SECRET = "content-of-the-canary-file"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass
class Trapped:
    running: Running
    client: httpx.Client
    sock: CanarySocket
    folder: CanaryFolder
    outside: Path

    def assert_untouched(self) -> None:
        assert self.sock.connections() == 0
        assert self.folder.accesses() == []


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Trapped]:
    home = tmp_path_factory.mktemp("trapped")
    outside, models = home / "outside", home / "models"
    outside.mkdir()
    models.mkdir()
    for name in ("secret.gguf", "secret.jinja", "adapter_config.json"):
        (outside / name).write_text(SECRET)
    with EchoUpstream() as upstream, closing(CanarySocket()) as sock, closing(CanaryFolder(outside)) as folder:
        config = {
            "models": {
                "echo": {"engine": "scripted"},
                "behind": {"engine": "upstream", "url": f"http://127.0.0.1:{upstream.port}", "protocol": "chat"},
            },
            "default": "echo",
            "aliases": {"gpt-*": "echo"},
            "models_dir": [str(models)],
        }
        with serving(home, config) as running, talking(running) as client:
            yield Trapped(running, client, sock, folder, outside)


def addresses(port: int, outside: Path) -> list[str]:
    """Addresses of this machine, of its network, and of schemes other than http."""
    path = f":{port}/image.png"
    hosts = [
        *("127.0.0.1", "localhost", "LOCALHOST.", "127.1", "0", "0.0.0.0", "2130706433", "0x7f000001", "0177.0.0.1"),
        *("0x7f.1", "127.0.0.1.", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::]", "127.0.0.1%00.example"),
        *("①②⑦.0.0.1", "user:pass@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1.nip.io", "localtest.me"),
    ]
    schemes = [
        *("https://", "HTTP://", "http:/\\", "//", "ftp://", "gopher://", "ws://", "dict://"),
        *(" http://", "\thttp://", "url:http://"),
    ]
    return [
        *(f"http://{host}{path}" for host in hosts),
        *(f"{before}127.0.0.1{path}" for before in schemes),
        f"jar:http://127.0.0.1{path}!/x",
        *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/latest/meta-data/"),
        *("http://metadata.google.internal/computeMetadata/v1/", "http://10.0.0.1/", "http://192.168.0.1/"),
        f"file://{outside}/secret.gguf",
        f"file:{outside}/secret.gguf",
        f"FILE://localhost{outside}/secret.gguf",
        f"{outside}/secret.gguf",
        f"data:text/plain,http://127.0.0.1{path}",
        f"data:image/svg+xml,<svg><image href='http://127.0.0.1{path}'/></svg>",
        f"data:image/png;base64,{PIXEL}",
        "data:,",
        "data:image/png;base64,%%%",
        "",
    ]


def requests_with(address: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A request for every field that takes an address here or in comparable servers."""
    for model in ("echo", "behind"):
        image = {"type": "image_url", "image_url": {"url": address}}
        yield CHAT, {"model": model, "messages": [{"role": "user", "content": [image]}]}
        block = {"type": "image", "source": {"type": "url", "url": address}}
        yield "/v1/messages", {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        document = {"type": "document", "source": {"type": "url", "url": address}}
        yield "/v1/messages", {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": [document]}]}
        for part in (
            {"type": "input_image", "image_url": address},
            {"type": "input_file", "file_url": address},
            {"type": "input_file", "file_id": address},
        ):
            yield "/v1/responses", {"model": model, "input": [{"role": "user", "content": [part]}]}
    tool = {"type": "mcp", "server_label": "x", "server_url": address}
    yield "/v1/responses", {"model": "echo", "input": "hello", "tools": [tool]}
    said = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    yield "/v1/messages", {"model": "echo", **said, "mcp_servers": [{"type": "url", "url": address, "name": "x"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": address}}}
    yield CHAT, {"model": "echo", **said, "response_format": schema}
    yield "/v1/embeddings", {"model": "echo", "input": [address]}
    yield "/v1/rerank", {"model": "echo", "query": "x", "documents": [address, {"image": address}]}


def test_addresses_in_requests_are_never_fetched(trapped: Trapped) -> None:
    assert trapped.sock.connections() == 0
    for address in addresses(trapped.sock.port, trapped.outside):
        for path, body in requests_with(address):
            answer = trapped.client.post(path, json=body)
            assert answer.status_code < 500 or answer.status_code == 501, (path, address, answer.text)
            assert SECRET not in answer.text
        trapped.assert_untouched()


def test_image_addresses_are_refused_with_the_path_of_the_field(trapped: Trapped) -> None:
    image = {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{trapped.sock.port}/"}}
    answer = trapped.client.post(CHAT, json={"model": "behind", "messages": [{"role": "user", "content": [image]}]})
    assert answer.status_code == 400, answer.text
    assert "data: URL" in answer.json()["error"]["message"]
    trapped.assert_untouched()


def names(port: int, outside: Path) -> list[str]:
    """Names that a careless server treats as a file, an address or a pattern."""
    file = str(outside / "secret.gguf")
    up = "/".join([".."] * 12)
    return [
        *(file, file.removesuffix(".gguf"), f"{up}{file}", f"./{up}{file}"),
        *(f"echo{file}", f"file://{file}", f"file:{file}", "pypi:requests"),
        *("../outside/secret", "../outside/secret.gguf", "..\\outside\\secret.gguf", "echo/../../outside/secret.gguf"),
        *("%2e%2e%2foutside%2fsecret.gguf", "../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/environ"),
        *(f"http://127.0.0.1:{port}/secret.gguf", f"https://127.0.0.1:{port}/secret.gguf#sha256=0"),
        *("hf:org/repo/secret.gguf", "smollm2", "engine:os:system", "tests.support.engines:NeverStops"),
        *("secret\x00.gguf", f"{file}\x00", "echo\r\nx-evil: 1", "~/secret.gguf", "$HOME/secret.gguf", "`id`"),
        *("{{ 7 * 7 }}", "'; DROP TABLE keys; --", "*", "[a-z]*", "gpt-", "..", ".", "😀" * 10, "a" * 100_000),
    ]


def test_model_names_open_no_files(trapped: Trapped) -> None:
    for name in names(trapped.sock.port, trapped.outside):
        if name == "gpt-":
            continue
        for path, fields in SMALLEST.items():
            answer = trapped.client.post(path, json={"model": name, **fields})
            assert answer.status_code == 404, (path, name, answer.text)
            assert SECRET not in answer.text
            assert len(answer.content) < 2000
            assert "x-evil" not in answer.headers
        trapped.assert_untouched()


def test_names_in_paths_open_no_files(trapped: Trapped) -> None:
    with PipelinedClient(trapped.running.port) as client:
        for name in names(trapped.sock.port, trapped.outside):
            if len(name) > 1000 or name == "gpt-":
                continue
            for written in (quote(name, safe="").encode(), quote(name, safe="/").encode()):
                shown = [
                    b"/v1/models/" + written,
                    b"/v1/responses/" + written,
                    b"/v1/responses/%b/input_items" % written,
                ]
                sent = [Request("GET", target) for target in shown]
                sent.append(Request("POST", b"/admin/models/%b/load" % written, body=b"{}"))
                for request, answer in zip(sent, client.send_all(sent), strict=True):
                    # A caller who is not an operator is refused before the name is looked up.
                    assert answer.status in (400, 401, 403, 404), (request.target, answer)
                    assert SECRET.encode() not in answer.body
            trapped.assert_untouched()


def test_response_item_and_template_names_open_no_files(trapped: Trapped) -> None:
    said = [{"role": "user", "content": "hello"}]
    for name in names(trapped.sock.port, trapped.outside):
        reference = {"type": "item_reference", "id": name}
        sent: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
            ("/v1/responses", {"input": "x", "previous_response_id": name}, (400, 404)),
            ("/v1/responses", {"input": [reference]}, (400, 404)),
            ("/v1/responses", {"input": "x", "conversation": name}, (200, 400, 404, 501)),
            ("/v1/responses", {"input": "x", "prompt": {"id": name}}, (200, 400, 404, 501)),
            (CHAT, {"messages": said, "chat_template": name}, (200, 400)),
            (CHAT, {"messages": said, "chat_template": f"{{% include {name!r} %}}"}, (200, 400)),
            (CHAT, {"messages": said, "chat_template_kwargs": {"template": name}}, (200, 400)),
            (CHAT, {"messages": said, "adapter": name, "lora": name, "lora_path": name}, (200, 400)),
        ]
        for path, body, statuses in sent:
            answer = trapped.client.post(path, json={"model": "echo", **body})
            assert answer.status_code in statuses, (path, body, answer.text[:500])
            assert SECRET not in answer.text
        trapped.assert_untouched()


def test_canaries_notice_accesses(trapped: Trapped) -> None:
    socket.create_connection(("127.0.0.1", trapped.sock.port)).close()
    os.close(os.open(trapped.outside / "secret.gguf", os.O_RDONLY))
    assert trapped.sock.connections() == 1
    assert trapped.folder.accesses() == ["secret.gguf"]

"""TLS and Unix sockets."""

import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.server.http.server import SocketFile, unix_socket
from dragoman.server.preflight_checks import check_listen_address
from tests.support.certificates import write_certificate
from tests.support.raw_http import request_bytes
from tests.support.requests import CHAT, HELLO, ask, eventually, recorded, refused, text_of, unix_client
from tests.support.server_process import Running, serving_at

MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted", "chunk": 4000},
    "slow": {"engine": "scripted", "tokens_per_second": 50},
    "much": {"engine": "scripted", "chunk": 4000, "replies": [{"output": "x" * 8_000_000}]},
}
STREAM = {"messages": HELLO, "model": "slow", "stream": True}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """The folder of a certificate, and what trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    return folder, ssl.create_default_context(cafile=write_certificate(folder).certificate)


@pytest.fixture(scope="module")
def secure(trusted: tuple[Path, ssl.SSLContext], workers: int) -> Iterator[tuple[Running, httpx.Client]]:
    folder, context = trusted
    tls = {"certificate": "server.pem", "key": "server.key"}

    def connect(port: int) -> httpx.Client:
        return httpx.Client(base_url=f"https://localhost:{port}", verify=context, trust_env=False, timeout=60)

    config = {"models": MODELS, "tls": tls, "limits": {"write_seconds": 1}}
    with serving_at(folder, config, connect, workers=workers) as made:
        yield made


def test_tls(secure: tuple[Running, httpx.Client]) -> None:
    running, client = secure
    assert f"https://127.0.0.1:{running.port}" in running.log.read_text()
    assert text_of(ask(client, CHAT)) == "hello"
    with client.stream("POST", CHAT, json=STREAM) as stream:
        assert stream.read().endswith(b"data: [DONE]\n\n")
    large = "x" * 3_000_000
    returned = text_of(ask(client, CHAT, messages=[{"role": "user", "content": large}]))
    assert len(returned) == len(large)
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP/1.1 200")
    assert client.get("/health").status_code == 200


def test_two_at_once_over_tls_while_one_stops_reading(
    secure: tuple[Running, httpx.Client], trusted: tuple[Path, ssl.SSLContext]
) -> None:
    running, client = secure
    raw = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    with trusted[1].wrap_socket(raw, server_hostname="localhost") as deaf:
        deaf.sendall(request_bytes(CHAT, {"messages": HELLO, "model": "much", "stream": True}))
        time.sleep(0.3)
        assert text_of(ask(client, CHAT)) == "hello"
        [record] = recorded(running, model="much")
        assert record["status"] == 499


def test_invalid_tls_files(tmp_path: Path) -> None:
    good, other = write_certificate(tmp_path), tmp_path / "other"
    other.mkdir()
    for tls in (
        Tls("missing.pem", good.key),
        Tls(good.key, good.key),
        Tls(good.certificate, write_certificate(other).key),
    ):
        with pytest.raises(ConfigError, match="cannot be used for TLS"):
            check_listen_address(Settings(port=0, tls=tls))


def test_unix_socket(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "dragoman.sock"
    config = {"models": MODELS, "socket": "dragoman.sock", "proxies": ["unix"]}
    with serving_at(tmp_path, config, unix_client(path), workers=workers) as (running, client):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        reply = client.post(CHAT, json={"messages": HELLO}, headers={"x-forwarded-for": "198.51.100.7"})
        assert text_of(reply) == "hello"
        [record] = recorded(running, id=reply.json()["id"])
        assert record["client"] == "198.51.100.7"
        with client.stream("POST", CHAT, json=STREAM) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        refused(client.get("/health", headers={"host": "evil.example"}), 400)
        with pytest.raises(ConfigError, match="another server uses it"):
            check_listen_address(Settings(socket=str(path)))
        assert running.stop() == 0
    assert not path.exists()


def test_socket_of_the_next_server_is_not_removed(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "dragoman.sock"
    endless = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]}
    config = {"models": {"slow": endless}, "socket": str(path)}
    connect = unix_client(path)

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) != 0

    with ExitStack() as stack:
        old, client = stack.enter_context(serving_at(tmp_path, config, connect, workers=workers))
        with client.stream("POST", CHAT, json=STREAM) as stream:
            # A reader that is garbage-collected closes its connection.
            reader = stream.iter_raw()
            assert next(reader)
            old.process.terminate()
            assert eventually(is_refused)
            (tmp_path / "next").mkdir()
            new, _ = stack.enter_context(serving_at(tmp_path / "next", config, connect, workers=workers))
            assert old.process.poll() is None
        assert old.process.wait(60) == 0
        with connect(0) as third:
            assert third.get("/health").status_code == 200
        assert new.stop() == 0
    assert not path.exists()


def test_socket_rebound_by_another_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "dragoman.sock"
    with unix_socket(path):
        ours = SocketFile(str(path))
        path.unlink()
        with unix_socket(path):
            ours.remove()
            assert path.exists()
            SocketFile(str(path)).remove()
            assert not path.exists()


def test_unusable_socket_paths(tmp_path: Path) -> None:
    left, file = tmp_path / "left.sock", tmp_path / "file"
    unix_socket(left).close()
    file.touch()
    check_listen_address(Settings(socket=str(left)))
    assert not left.exists()
    with pytest.raises(ConfigError, match="the path exists and is not a socket"):
        check_listen_address(Settings(socket=str(file)))
    with pytest.raises(ConfigError, match="there is no folder"):
        check_listen_address(Settings(socket=str(tmp_path / "none" / "x.sock")))
    assert file.exists()

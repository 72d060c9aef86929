"""TLS, Unix sockets, proxies and CORS."""

import datetime
import json
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.server.http.proxies import TrustedProxies
from dragoman.server.http.server import SocketFile, unix_socket
from dragoman.server.preflight_checks import check_listen_address
from tests.support.requests import CHAT, HELLO, ask, eventually, recorded, refused, request_bytes, talking, text_of
from tests.support.server_process import Running, serving, serving_at

MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted", "chunk": 4000},
    "slow": {"engine": "scripted", "tokens_per_second": 50},
}
PAGE = "https://app.example"
STREAM = {"messages": HELLO, "model": "slow", "stream": True}


def certified(folder: Path) -> Tls:
    """A certificate for this machine, and its key, in files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "server.pem", folder / "server.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return Tls(str(files[0]), str(files[1]))


def test_tls(tmp_path: Path) -> None:
    tls = certified(tmp_path)
    config = {"models": MODELS, "tls": {"certificate": "server.pem", "key": "server.key"}}
    trusted = ssl.create_default_context(cafile=tls.certificate)
    with serving_at(
        tmp_path,
        config,
        lambda port: httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False, timeout=60),
    ) as (
        running,
        client,
    ):
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
        assert running.stop() == 0
        assert f"https://127.0.0.1:{running.port}" in running.log.read_text()


def test_invalid_tls_files(tmp_path: Path) -> None:
    good, other = certified(tmp_path), tmp_path / "other"
    other.mkdir()
    for tls in (Tls("missing.pem", good.key), Tls(good.key, good.key), Tls(good.certificate, certified(other).key)):
        with pytest.raises(ConfigError, match="tls: "):
            check_listen_address(Settings(port=0, tls=tls))


def listened_on(path: Path) -> bool:

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    return eventually(listens)


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "dragoman.sock"
    config = {"models": MODELS, "socket": "dragoman.sock", "proxies": ["unix"]}

    def connect(_: int) -> httpx.Client:
        assert listened_on(path)
        transport = httpx.HTTPTransport(uds=str(path))
        return httpx.Client(base_url="http://localhost", transport=transport)

    with serving_at(tmp_path, config, connect) as (running, client):
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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_socket_of_the_next_server_is_not_removed(tmp_path: Path, workers: str) -> None:
    path = tmp_path / "dragoman.sock"
    endless = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]}
    config = {"models": {"slow": endless}, "socket": str(path)}

    def connect(_: int) -> httpx.Client:
        assert listened_on(path)
        return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)), timeout=30)

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) != 0

    with ExitStack() as stack:
        old, client = stack.enter_context(serving_at(tmp_path, config, connect, "--workers", workers))
        with client.stream("POST", CHAT, json=STREAM) as stream:
            # A reader that is garbage-collected closes its connection.
            reader = stream.iter_raw()
            assert next(reader)
            old.process.terminate()
            assert eventually(is_refused)
            (tmp_path / "next").mkdir()
            new, _ = stack.enter_context(serving_at(tmp_path / "next", config, connect, "--workers", workers))
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


def test_obstacles_to_a_socket(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", "198.51.100.7", "203.0.113.9"),
        ("127.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),
        ("127.0.0.1", "1.1.1.1, 198.51.100.7, 10.1.2.3", "198.51.100.7"),
        ("127.0.0.1", "10.0.0.1, 10.0.0.2", "10.0.0.1"),
        ("127.0.0.1", "198.51.100.7:5555", "198.51.100.7"),
        ("127.0.0.1", "[2001:db8::1]:5555", "2001:db8::1"),
        ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("127.0.0.1", "nonsense", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.7, nonsense", "127.0.0.1"),
        ("127.0.0.1", "", "127.0.0.1"),
        (None, "198.51.100.7", None),
    ],
)
def test_forwarded_addresses(peer: str | None, forwarded: str, client: str | None) -> None:
    proxies = TrustedProxies(["127.0.0.1", "10.0.0.0/8"])
    assert proxies.client(peer, {b"x-forwarded-for": forwarded.encode()}) == client


def test_forwarded_schemes_and_mistakes() -> None:
    proxies = TrustedProxies(["127.0.0.1"])
    headers = {b"x-forwarded-proto": b"https"}
    assert proxies.scheme("127.0.0.1", headers) == "https"
    assert proxies.scheme("203.0.113.9", headers) is None
    assert proxies.scheme("127.0.0.1", {b"x-forwarded-proto": b"gopher"}) is None
    with pytest.raises(ConfigError, match="expected an address"):
        TrustedProxies(["proxy.example"])


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {"models": MODELS, "cors": {"origins": [PAGE]}, "api_keys": ["sk-one"]}
    with serving(tmp_path_factory.mktemp("paged"), config) as running:
        yield running


def preflight(client: httpx.Client, path: str, origin: str, **headers: str) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **headers}
    return client.request("OPTIONS", path, headers=asked)


def test_preflight(paged: Running) -> None:
    with talking(paged) as client:
        wanted = {"access-control-request-headers": "authorization, content-type,x-stainless-os"}
        allowed = preflight(client, CHAT, PAGE, **wanted)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == PAGE
        assert allowed.headers["access-control-allow-methods"] == "POST"
        assert allowed.headers["access-control-allow-headers"] == "authorization, content-type,x-stainless-os"
        assert allowed.headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in allowed.headers
        both = preflight(client, "/v1/responses", PAGE)
        assert both.headers["access-control-allow-methods"] == "POST, GET, HEAD"
        for path, origin in ((CHAT, "https://evil.example"), (CHAT, "null"), ("/v1/nothing", PAGE)):
            denied = preflight(client, path, origin)
            assert denied.status_code in (401, 404, 405)
            if origin != PAGE:
                assert "access-control-allow-origin" not in denied.headers
        odd = preflight(client, CHAT, PAGE, **{"access-control-request-headers": "a b;c"})
        assert "access-control-allow-headers" not in odd.headers


def test_replies_to_a_page(paged: Running) -> None:
    with talking(paged, {"origin": PAGE, "authorization": "Bearer sk-one"}) as client:
        whole = ask(client, CHAT)
        assert text_of(whole) == "hello"
        with client.stream("POST", CHAT, json=STREAM) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
        wrong = ask(client, CHAT, model="nothing")
        stranger = client.get("/v1/models", headers={"authorization": "Bearer sk-two"})
        assert stranger.status_code == 401
        for reply in (whole, stream, wrong, stranger):
            assert reply.headers["access-control-allow-origin"] == PAGE
            assert reply.headers["vary"] == "origin"
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
        other = ask(client, CHAT, model="echo")
        assert other.status_code == 200
        text = client.post(CHAT, content=json.dumps({"messages": HELLO}), headers={"content-type": "text/plain"})
        assert text.status_code == 415
    with talking(paged, {"origin": "https://evil.example", "authorization": "Bearer sk-one"}) as client:
        assert "access-control-allow-origin" not in ask(client, CHAT).headers


def test_no_cors_by_default(scripted: Running) -> None:
    with talking(scripted) as client:
        refused(preflight(client, CHAT, PAGE), 405)
        assert "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": PAGE}).headers


def test_two_at_once_over_tls_while_one_stops_reading(tmp_path: Path) -> None:
    tls = certified(tmp_path)
    trusted = ssl.create_default_context(cafile=tls.certificate)
    config = {
        "models": {"much": {"engine": "scripted", "chunk": 4000, "replies": [{"output": "x" * 8_000_000}]}} | MODELS,
        "default": "echo",
        "tls": {"certificate": "server.pem", "key": "server.key"},
        "limits": {"write_seconds": 1},
    }
    with serving_at(
        tmp_path,
        config,
        lambda port: httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, trust_env=False, timeout=60),
    ) as (
        running,
        client,
    ):
        raw = socket.create_connection(("127.0.0.1", running.port), timeout=60)
        with trusted.wrap_socket(raw, server_hostname="localhost") as deaf:
            deaf.sendall(request_bytes(CHAT, {"messages": HELLO, "model": "much", "stream": True}))
            threading.Event().wait(0.3)
            assert text_of(ask(client, CHAT)) == "hello"
            [record] = recorded(running, model="much")
            assert record["status"] == 499

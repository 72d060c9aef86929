"""The admin token and its file: admin routes of a server without keys."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dragoman import create_app
from dragoman.config.settings import Settings
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, TokenFile, find_admin_token, find_socket_admin_token
from tests.support.bad_server import BadServer, whole
from tests.support.engines import Sampled
from tests.support.requests import in_process, refused, unix_client
from tests.support.server_process import Running, Serving, serving_at

ROUTES = [
    ("GET", "/admin/models"),
    ("POST", "/admin/models/one/load"),
    ("POST", "/admin/models/one/unload"),
    ("POST", "/admin/reload"),
    ("GET", "/admin/upstreams"),
    ("POST", "/admin/upstreams/drain"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def proxy_client(running: Running) -> httpx.Client:
    """A client that sends no token, like a reverse proxy on this machine."""
    return httpx.Client(base_url=running.url, trust_env=False, timeout=60)


def test_local_connection_is_not_enough(tmp_path: Path, home: Path, serving: Serving) -> None:
    config = {"models": {"one": {"engine": "scripted"}}}
    with serving(tmp_path, config) as running, proxy_client(running) as client:
        for method, path in ROUTES:
            words = refused(client.request(method, path), 401)
            assert ADMIN_TOKEN_HEADER in words
            assert str(home) not in words
        token = running.operator[ADMIN_TOKEN_HEADER]
        for wrong in ("", "x" * 43, token[:-1], token + "x"):
            refused(client.get("/admin/models", headers={ADMIN_TOKEN_HEADER: wrong}), 401)
        assert client.get("/admin/models", headers=running.operator).status_code == 200
        assert client.post("/admin/reload", headers=running.operator).status_code == 200
        # Other routes need no token.
        assert client.get("/v1/models").status_code == client.get("/stats").status_code == 200
        files = list((home / "run").iterdir())
        assert [stat.S_IMODE(file.stat().st_mode) for file in (home / "run", *files)] == [0o700, 0o600]
        assert token not in running.log.read_text() + running.event_log.read_text()
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)
        assert list((home / "run").iterdir()) == []


@pytest.mark.parametrize("headers", [{}, {"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}])
@pytest.mark.parametrize("proxies", [(), ("127.0.0.1", "unix")])
@pytest.mark.parametrize("client", [("127.0.0.1", 1), ("::1", 1), ("192.0.2.7", 1), None])
async def test_only_the_token_opens_operator_routes_whatever_the_address(
    proxies: tuple[str, ...], client: tuple[str, int] | None, headers: dict[str, str]
) -> None:
    app = create_app(Sampled(), settings=Settings(models_dir=(), proxies=proxies))
    transport = httpx.ASGITransport(app, client=client)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as asking:
        assert (await asking.get("/admin/models")).status_code == 401
        token = {ADMIN_TOKEN_HEADER: app.admin_token}
        assert (await asking.get("/admin/models", headers=token)).status_code == 200
    await app.stop()


async def test_token_is_refused_if_keys_are_configured() -> None:
    app = create_app(Sampled(), settings=Settings(models_dir=(), api_keys=("sk-0123456789",)))
    async with in_process(app) as client:
        for headers, status in (({ADMIN_TOKEN_HEADER: app.admin_token}, 401), ({"x-api-key": "sk-0123456789"}, 200)):
            assert (await client.get("/admin/models", headers=headers)).status_code == status
    await app.stop()


def command(home: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN")}
    return subprocess.run(
        [sys.executable, "-m", "dragoman", *arguments],
        cwd=folder,
        env=kept | {"DRAGOMAN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_commands_of_the_same_user_find_the_token(tmp_path: Path, home: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": {"one": {"engine": "scripted"}}}) as running:
        for url in (running.url, running.url.replace("127.0.0.1", "localhost")):
            done = command(home, tmp_path, "models", "load", "one", "--url", url)
            assert (done.returncode, done.stdout) == (0, "one: ready\n"), done.stderr
        denied = command(tmp_path / "other", tmp_path, "models", "load", "one", "--url", running.url)
        assert denied.returncode == 2
        assert "run this as the user who runs the server" in denied.stderr


def test_commands_reach_server_at_unix_socket(tmp_path: Path, home: Path, workers: int) -> None:
    path = tmp_path / "s"
    config = {"models": {"one": {"engine": "scripted"}}, "socket": str(path)}
    with serving_at(tmp_path, config, unix_client(path), workers=workers) as (running, client):
        assert client.get("/admin/models").status_code == 401
        done = command(home, tmp_path, "models", "load", "one", "--url", f"unix:{path}")
        assert (done.returncode, done.stdout) == (0, "one: ready\n"), done.stderr
        assert running.stop() == 0
    assert list((home / "run").iterdir()) == []


@pytest.fixture
def file(home: Path) -> Iterator[TokenFile]:
    made = TokenFile("secret", "127.0.0.1", 8000, None)
    yield made
    made.remove()


def test_each_server_has_its_own_file(file: TokenFile, home: Path) -> None:
    others = [TokenFile("other", "127.0.0.1", 8001, None), TokenFile("third", "::", 8002, None)]
    by_socket = TokenFile("fourth", "127.0.0.1", 0, "some.sock")
    assert find_admin_token("localhost", 8000) == "secret"
    assert find_admin_token("127.0.0.1", 8001) == "other"
    assert find_admin_token("10.0.0.1", 8002) == "third"
    assert find_admin_token("127.0.0.1", 8003) is None
    assert find_socket_admin_token("./some.sock") == "fourth"
    # A newer server at the same address keeps its own token.
    again = TokenFile("newer", "127.0.0.1", 8000, None)
    file.remove()
    assert find_admin_token("127.0.0.1", 8000) == "newer"
    for made in (*others, by_socket, again):
        made.remove()
    assert list((home / "run").iterdir()) == []


def test_links_are_not_followed(home: Path, tmp_path: Path) -> None:
    (home / "run").mkdir(parents=True, mode=0o700)
    target = tmp_path / "target"
    target.write_text("precious")
    target.chmod(0o600)
    place = home / "run/127.0.0.1_8000.token"
    place.symlink_to(target)
    assert find_admin_token("127.0.0.1", 8000) is None
    made = TokenFile("secret", "127.0.0.1", 8000, None)
    assert target.read_text() == "precious"
    assert not place.is_symlink()
    assert find_admin_token("127.0.0.1", 8000) == "secret"
    made.remove()
    assert target.exists()


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_directory_open_to_others_is_not_used(home: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    (home / "run").mkdir(parents=True)
    (home / "run").chmod(mode)
    TokenFile("secret", "127.0.0.1", 8000, None)
    assert list((home / "run").iterdir()) == []
    assert "/admin needs a key" in caplog.text


def test_symlinked_directory_is_not_used(home: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.mkdir()
    (home / "run").symlink_to(tmp_path / "elsewhere")
    TokenFile("secret", "127.0.0.1", 8000, None)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_token_file_readable_by_others_is_not_sent(file: TokenFile, home: Path) -> None:
    (home / "run/127.0.0.1_8000.token").chmod(0o644)
    assert find_admin_token("127.0.0.1", 8000) is None


def test_command_does_not_follow_redirects(tmp_path: Path, home: Path) -> None:
    with BadServer() as server, BadServer() as other:
        server.play([whole(b"", "302 Found", location=f"{other.url}/v1/models")], path="/v1/models")
        done = command(home, tmp_path, "models", "--url", server.url, "--api-key", "sk-secret")
        assert done.returncode == 2
        assert other.heads == []

"""Downloads from servers that redirect, send wrong data or never finish."""

import base64
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.core.errors import ConfigError
from dragoman.files import download, sources
from tests.support.bad_server import BadServer, Script, chunk, head, whole
from tests.support.gguf_files import WHOLE, tensor, visible_files, with_tensors

MODEL = WHOLE + bytes(range(256)) * 2000
SECRET = "hf_secrettoken"
BASIC = base64.b64encode(b"me:pass word").decode()
PATH = "/m.gguf"


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 2)


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as made:
        yield made


other = server


def redirect(url: str, status: str = "302 Found") -> Script:
    return [whole(b"", status, location=url)]


def gguf(content: bytes = MODEL) -> Script:
    return [whole(content, content_type="application/octet-stream", etag='"one"')]


def request(server: BadServer, tmp_path: Path) -> download.Download:
    return download.Download(server.url + PATH, tmp_path / "m.gguf", headers={"authorization": f"Bearer {SECRET}"})


def ignore(message: str) -> None:
    pass


def test_a_redirect_to_another_host_and_back_gets_no_token(server: BadServer, other: BadServer, tmp_path: Path) -> None:
    server.play(redirect(other.url + "/hop?signature=1"), path=PATH)
    server.also(gguf(), path="/end")
    other.play(redirect(server.url + "/end"), path="/hop")
    assert download.download_file(request(server, tmp_path), ignore).read_bytes() == MODEL
    assert f"authorization: bearer {SECRET}" in server.heads[0]
    assert "authorization" not in other.heads[0] + server.heads[1]


@pytest.mark.parametrize(("origin", "has_token"), [("", True), ("http://localhost:{port}", False)])
def test_token_stays_with_the_same_name_of_a_server(
    server: BadServer, tmp_path: Path, origin: str, has_token: bool
) -> None:
    server.play(redirect(f"{origin.format(port=server.port)}/elsewhere"), path=PATH)
    server.also(gguf(), path="/elsewhere")
    download.download_file(request(server, tmp_path), ignore)
    assert (f"authorization: bearer {SECRET}" in server.heads[1]) == has_token


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/m.gguf", "file:///etc/passwd", "gopher://x/m.gguf"])
def test_only_http_is_followed(server: BadServer, tmp_path: Path, url: str) -> None:
    server.play(redirect(url), path=PATH)
    with pytest.raises(ConfigError, match=r"redirects to '.*', which is not an http\(s\) address"):
        sources.fetch(server.url + PATH)
    assert list((tmp_path / "home").rglob("*")) == []


def test_circular_redirects_end(server: BadServer) -> None:
    server.play(redirect(PATH), path=PATH)
    with pytest.raises(ConfigError, match="redirects more than 10 times"):
        sources.fetch(server.url + PATH)
    assert len(server.heads) == 11


def test_login_in_the_address_is_sent_as_basic_auth_and_stored_nowhere(
    server: BadServer, other: BadServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.play(redirect(other.url + PATH), path=PATH)
    other.play(gguf(), path=PATH)
    source = server.url.replace("://", "://me:pass%20word@") + f"{PATH}?signature=verysecret"
    assert main(["pull", source]) == 0
    assert f"authorization: basic {BASIC.lower()}" in server.heads[0]
    assert "authorization" not in other.heads[0]
    output = capsys.readouterr()
    written = b"".join(file.read_bytes() for file in (tmp_path / "home").rglob("*") if file.is_file())
    for secret in ("pass%20word", "pass word", BASIC, "verysecret"):
        assert secret not in output.out + output.err
        assert secret.encode() not in written


def test_the_state_of_an_unfinished_download_has_no_secrets(server: BadServer, tmp_path: Path) -> None:
    server.play([head(content_length="1000000", etag='"one"'), MODEL[:100_000], "close"], path=PATH)
    with pytest.raises(ConfigError, match="the part received is kept"):
        sources.fetch(server.url.replace("://", "://me:hidden@") + f"{PATH}?key=secret")
    (state,) = (tmp_path / "home").rglob("*.part.json")
    assert b"hidden" not in state.read_bytes()
    assert b"secret" not in state.read_bytes()


@pytest.mark.parametrize(
    "answer",
    [
        head(content_length="abc") + MODEL,
        head(content_length="-1") + MODEL,
        head(content_length="5, 6") + MODEL,
        b"nothing like HTTP\r\n\r\n",
        head("302 Found", location="http://[broken", content_length="0"),
        head("302 Found", location="data:text/plain,GGUF", content_length="0"),
        head("302 Found", location="http://127.0.0.1:99999999/", content_length="0"),
        head("206 Partial Content", content_length=str(len(MODEL))) + MODEL,
    ],
)
def test_malformed_responses_print_no_traceback(
    server: BadServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    server.play([answer, "close"], path=PATH)
    assert main(["pull", server.url + PATH]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert list((tmp_path / "home").rglob("*")) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (whole(b"<!DOCTYPE html><title>Sign in</title>", content_type="text/html; charset=utf-8"), "an HTML page"),
        (whole(b"version https://git-lfs.github.com/spec/v1", content_type="text/plain"), "a Git LFS pointer"),
        (whole(b'{"error": "gated"}'), 'application/json that begins with \'{"error": "gated"}\''),
        (whole(b"\x1b[2Jboo", content_type="text/plain"), r"begins with '\\x1b\[2Jboo'"),
        (whole(b"", content_type=None), "the server sent nothing"),
        (whole(b"GG", content_type=None), "begins with 'GG'"),
        (whole(b"GGUF\3\0\0\0" + b"\xff" * 16), "is not a valid GGUF file: it has 18446744073709551615 tensors"),
    ],
)
def test_body_that_is_not_gguf_is_not_kept_and_is_described(
    server: BadServer, tmp_path: Path, answer: bytes, message: str
) -> None:
    server.play([answer], path=PATH)
    with pytest.raises(ConfigError, match=message):
        sources.fetch(server.url + PATH)
    assert list((tmp_path / "home").rglob("*")) == []


def test_a_file_cut_off_without_a_length_is_not_kept(server: BadServer, tmp_path: Path) -> None:
    content = with_tensors(tensor("a", 64))
    server.play([head(connection="close"), content[:-10], "close"], path=PATH)
    with pytest.raises(ConfigError, match="is not a valid GGUF file: it is cut off"):
        sources.fetch(server.url + PATH)
    assert list((tmp_path / "home").rglob("*")) == []


def test_a_name_of_many_bytes_is_shortened(server: BadServer) -> None:
    name = "x" * 4000
    server.play(gguf(), path=f"/{name}-00001-of-00002.gguf")
    server.also(gguf(), path=f"/{name}-00002-of-00002.gguf")
    source = f"{server.url}/{name}-00001-of-00002.gguf"
    path = sources.fetch(source)
    assert len(path.name) < 255
    assert sources.locate(source) == path
    assert [file[-21:] for file in visible_files(path.parent)] == ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://[broken/m.gguf", "is not a valid address"),
        ("http://127.0.0.1:99999999/m.gguf", "is not a valid address"),
        ("http:///m.gguf", "expected the address of a .gguf file"),
        (f"https://example.org/{'a/' * 3000}m.gguf", "too long"),
        (f"hf:org/repo/{'x' * 300}.gguf", "longer than 200 bytes"),
    ],
)
def test_invalid_addresses_are_refused(source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", source]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


def test_a_body_larger_than_the_disk_is_refused_at_once(server: BadServer, tmp_path: Path) -> None:
    server.play([head(content_length=str(10**18)), WHOLE, "hang"], path=PATH)
    with pytest.raises(ConfigError, match="MB are needed"):
        sources.fetch(server.url + PATH)


class Endless:
    """A body without a length or an end. After 50 blocks the disk counts as full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        yield head(transfer_encoding="chunked") + chunk(WHOLE)
        while True:
            yield chunk(bytes(100_000))
            self.sent += 1
            if self.sent == 50:
                self.monkeypatch.setattr(download, "RESERVED_BYTES", 1 << 60)


def test_an_endless_body_does_not_fill_the_disk(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.play(Endless(monkeypatch), path=PATH)
    with pytest.raises(ConfigError, match="MB must stay free"):
        sources.fetch(server.url + PATH)


def test_more_than_the_known_size_is_refused(server: BadServer, tmp_path: Path) -> None:
    known = download.Download(server.url + PATH, tmp_path / "m.gguf", size=len(MODEL) - 1)
    server.play(gguf(), path=PATH)
    with pytest.raises(ConfigError, match=f"sends {len(MODEL)} bytes, not {len(MODEL) - 1}"):
        download.download_file(known, ignore)
    server.play([head(transfer_encoding="chunked"), chunk(MODEL), b"0\r\n\r\n"], path=PATH)
    with pytest.raises(ConfigError, match=f"sends more than the file's {len(MODEL) - 1} bytes"):
        download.download_file(known, ignore)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("slow", ["head", "body"])
def test_download_from_a_slow_server_fails(server: BadServer, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.5)
    begin = b"HTTP/1.1 200 OK\r\n" if slow == "head" else head(content_length=str(len(MODEL))) + WHOLE
    drops = [piece for at in range(2000) for piece in (b"x-%d: y\r\n" % at if slow == "head" else b"\0", 0.05)]
    server.play([begin, *drops], path=PATH)
    with pytest.raises(ConfigError, match=r"sent less than 65536 bytes in 0\.5 s"):
        sources.fetch(server.url + PATH)
    assert server.connections == 2


def test_a_compressed_body_is_not_unpacked(server: BadServer) -> None:
    server.play([whole(b"\x1f\x8b" + bytes(100), content_type="text/plain", content_encoding="gzip")], path=PATH)
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        sources.fetch(server.url + PATH)
    assert "accept-encoding: identity" in server.heads[0]


def test_token_of_the_hub_is_sent_only_to_the_hub(
    server: BadServer, other: BadServer, home: Path, use_hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(server.url)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    path = "/org/repo/resolve/main/m.gguf"
    linked = {"x_linked_size": str(len(MODEL)), "x_repo_commit": "0" * 40, "x_linked_etag": '"e"'}
    server.play([head("302 Found", location=f"{other.url}/cdn", content_length="0", **linked)], path=path)
    other.play(gguf(), path="/cdn")
    assert sources.fetch("hf:org/repo/m.gguf").read_bytes() == MODEL
    assert any(f"authorization: bearer {SECRET}" in asked for asked in server.heads)
    assert [asked for asked in other.heads if "authorization" in asked] == []
    for file in home.rglob("*"):
        assert stat.S_ISDIR(file.stat().st_mode) or SECRET.encode() not in file.read_bytes()

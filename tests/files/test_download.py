"""Downloads from an address and from a hub, against a local server that can cut off its replies."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from dragoman.files import sources
from dragoman.files.addresses import local_path
from tests.cli.test_cli import run
from tests.support.bad_server import BadServer, Step, head
from tests.support.gguf_files import WHOLE, visible_files

MODEL = WHOLE + bytes(range(256)) * 20_000
DIGEST = hashlib.sha256(MODEL).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Site(BadServer):
    """Serves files by path. `cut`: bytes after which the next bodies are cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {"/models/m.gguf": MODEL}
        self.cut: list[int] = []
        self.etag = '"one"'

    def script_for(self, path: str) -> Iterable[Step]:
        # Heads are in lower case here, and so is the path.
        content, request = {name.lower(): file for name, file in self.files.items()}.get(path), self.heads[-1]
        if content is None:
            return [head("404 Not Found", content_length="0")]
        start = (_range_start(request) or 0) if f"if-range: {self.etag}" in request else 0
        if start >= len(content):
            return [head("416 Range Not Satisfiable", content_range=f"bytes */{len(content)}", content_length="0")]
        reply = head(
            "206 Partial Content" if start else "200 OK",
            content_range=f"bytes {start}-{len(content) - 1}/{len(content)}",
            content_length=str(len(content) - start),
            etag=self.etag,
            x_repo_commit=COMMIT,
            x_linked_etag=f'"{hashlib.sha256(content).hexdigest()}"',
            x_linked_size=str(len(content)),
        )
        if request.startswith("head "):
            return [reply]
        if not self.cut:
            return [reply, content[start:]]
        return [reply, content[start:][: self.cut.pop(0)], "close"]

    def ranges(self) -> list[int | None]:
        """The first byte that each request for a body asked for; None means the whole body."""
        return [_range_start(request) for request in self.heads if request.startswith("get ")]


def _range_start(request: str) -> int | None:
    found = re.search(r"\r\nrange: bytes=(\d+)-", request)
    return int(found[1]) if found else None


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as made:
        yield made


def test_file_is_downloaded_once(site: Site, tmp_path: Path) -> None:
    source = f"{site.url}/models/m.gguf"
    assert sources.locate(source) is None
    path = sources.fetch(source)
    assert path == tmp_path / f"home/models/127.0.0.1_{site.port}/models/m.gguf"
    assert path.read_bytes() == MODEL
    assert sources.locate(source) == sources.check(source) == path
    assert len(site.heads) == 1


def test_cut_off_download_resumes(site: Site) -> None:
    site.cut = [100_000, 50_000]
    assert sources.fetch(f"{site.url}/models/m.gguf#sha256={DIGEST}").read_bytes() == MODEL
    assert site.ranges() == [None, 100_000, 150_000]


def test_partial_file_of_an_earlier_run_is_used_unless_there_is_a_new_version(
    site: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{site.url}/models/m.gguf"
    monkeypatch.setattr("dragoman.files.download.ATTEMPTS", 1)
    site.cut = [100_000, 0, 50_000]
    for _ in range(2):
        with pytest.raises(ConfigError, match="the part received is kept: try again to resume"):
            sources.fetch(source)
    assert visible_files(home) == []
    assert site.ranges() == [None, 100_000, 100_000]
    site.files["/models/m.gguf"], site.etag = MODEL + b"more", '"two"'
    assert sources.fetch(source).read_bytes() == MODEL + b"more"
    assert site.ranges()[-1] == 150_000


@pytest.mark.parametrize(
    ("content", "fragment", "message"),
    [
        (
            MODEL,
            "#sha256=" + "0" * 64,
            f"is not the expected file .expected sha256 {'0' * 64}, found {DIGEST}.; it was deleted",
        ),
        (MODEL, "#sha256=12", "expected 64 hexadecimal digits after #sha256="),
        (b"<html>no model</html>", "", "is not a GGUF file"),
        (b"GGUF but not really", "", "is not a valid GGUF file"),
        (None, "", "the server answered 404 Not Found"),
    ],
)
def test_invalid_file_is_deleted(site: Site, home: Path, content: bytes | None, fragment: str, message: str) -> None:
    del site.files["/models/m.gguf"]
    if content is not None:
        site.files["/models/m.gguf"] = content
    with pytest.raises(ConfigError, match=message):
        sources.fetch(f"{site.url}/models/m.gguf{fragment}")
    assert list(home.rglob("*")) == []


def test_password_in_address_is_not_shown(site: Site) -> None:
    with pytest.raises(ConfigError) as refusal:
        sources.fetch(f"{site.url.replace('://', '://me:hidden@')}/models/m.txt")
    assert "***@" in str(refusal.value)
    assert "hidden" not in str(refusal.value)


def test_damaged_file_is_downloaded_again(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{site.url}/models/m.gguf"
    path = sources.fetch(source)
    path.write_bytes(MODEL[:-1])
    assert sources.locate(source) is None
    assert sources.fetch(source).read_bytes() == MODEL
    path.write_bytes(MODEL[:-1] + b"\0")
    assert main(["pull", source]) == 0
    output = capsys.readouterr()
    assert output.out == f"{path}\n"
    assert "is damaged; fetching it again" in output.err
    assert path.read_bytes() == MODEL


def test_wrong_hash_keeps_the_existing_file(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"{site.url}/models/m.gguf"
    path = sources.fetch(source)
    assert main(["pull", f"{source}#sha256={'0' * 64}"]) == 2
    output = capsys.readouterr().err
    assert "has another sha256; fetching it again" in output
    assert f"expected sha256 {'0' * 64}, found {DIGEST}" in output
    assert path.read_bytes() == MODEL
    # The stored state of the file is unchanged.
    path.write_bytes(MODEL[:-1])
    assert sources.locate(source) is None
    site.files.clear()
    assert main(["pull", f"{source}#sha256={'0' * 64}"]) == 2
    assert path.exists()


def test_concurrent_downloads_share_one_file(site: Site) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(sources.fetch, [f"{site.url}/models/m.gguf"] * 2))
    assert paths[0] == paths[1]
    assert len(site.heads) == 1
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [".m.gguf.json", "m.gguf"]


def test_concurrent_downloads_that_are_refused_leave_no_files(site: Site, home: Path) -> None:
    def refuse(source: str) -> None:
        with pytest.raises(ConfigError, match="404 Not Found"):
            sources.fetch(source)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(refuse, [f"{site.url}/models/none.gguf"] * 8))
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_all_parts_of_a_split_model(site: Site) -> None:
    for at in (1, 2, 3):
        site.files[f"/big-0000{at}-of-00003.gguf"] = WHOLE + bytes(at)
    source = f"{site.url}/big-00001-of-00003.gguf"
    path = sources.fetch(source)
    assert visible_files(path.parent) == [f"big-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    assert sources.locate(source) == path
    path.with_name("big-00002-of-00003.gguf").unlink()
    assert sources.locate(source) is None
    assert sources.check(source) == path


def test_hash_of_a_path_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(MODEL)
    assert main(["pull", f"{file}#sha256={DIGEST}"]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert main(["pull", f"{file}#sha256={'0' * 64}"]) == 2
    assert f"its sha256 is {DIGEST}, not {'0' * 64}" in capsys.readouterr().err
    file.write_bytes(b"text")
    assert main(["pull", str(file)]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://example.org/a/b.gguf", "example.org/a/b.gguf"),
        ("https://user:word@example.org:8443/b", "example.org_8443/b.gguf"),
        ("https://example.org/../../etc/b.gguf", "example.org/etc/b.gguf"),
        ("https://example.org/%2e%2e/%2fetc/b%00.gguf", "example.org/etc/b_.gguf"),
        ("https://example.org/.hidden/.b.gguf", "example.org/hidden/b.gguf"),
    ],
)
def test_local_path_stays_in_the_directory(tmp_path: Path, url: str, place: str) -> None:
    assert local_path(url, tmp_path) == tmp_path / place


def test_addresses_in_a_configuration_stay_addresses(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("models: {a: 'https://example.org/m.gguf', b: 'hf:org/repo/m.gguf'}\n")
    models = load_settings(str(tmp_path / "c.yaml"), Flags(), {}).models
    assert [model.source for model in models] == ["https://example.org/m.gguf", "hf:org/repo/m.gguf"]


class TestHub:
    @pytest.fixture(autouse=True)
    def hub(self, site: Site, use_hub: Callable[[str], None]) -> None:
        use_hub(site.url)
        site.files["/org/repo/resolve/main/m-Q4_0.gguf"] = MODEL

    def test_file_of_a_repository(self, site: Site, tmp_path: Path) -> None:
        site.cut = [70_000]
        path = sources.fetch("hf:org/repo/m-Q4_0.gguf")
        assert path == tmp_path / "home/models/org/repo/m-Q4_0.gguf"
        assert path.read_bytes() == MODEL
        assert site.ranges() == [None, 70_000]
        assert sources.locate("hf:org/repo/m-Q4_0.gguf") == path

    def test_another_endpoint(self, site: Site, tmp_path: Path) -> None:
        done = run(tmp_path, "pull", "hf:org/repo/m-Q4_0.gguf", environ={"HF_ENDPOINT": site.url})
        assert done.returncode == 0, done.stderr
        assert Path(done.stdout.strip()).read_bytes() == MODEL

    def test_split_model_of_a_revision(self, site: Site) -> None:
        for at in (1, 2):
            site.files[f"/org/repo/resolve/v1/big-0000{at}-of-00002.gguf"] = WHOLE + bytes(at)
        source = "hf:org/repo/big-00001-of-00002.gguf@v1"
        path = sources.fetch(source)
        assert visible_files(path.parent) == [f"big@v1-0000{at}-of-00002.gguf" for at in (1, 2)]
        assert sources.locate(source) == path
        path.with_name("big@v1-00002-of-00002.gguf").unlink()
        assert sources.locate(source) is None

    def test_hash_of_the_source_is_verified(self) -> None:
        with pytest.raises(ConfigError, match="is not the expected file"):
            sources.fetch(f"hf:org/repo/m-Q4_0.gguf#sha256={'1' * 64}")

    def test_missing_file(self) -> None:
        with pytest.raises(ConfigError, match=r"hf:org/repo/none\.gguf: the hub answered: "):
            sources.fetch("hf:org/repo/none.gguf")

    @pytest.mark.parametrize("source", ["hf:org", "hf:org/repo/m.bin", "hf:org/../m.gguf", "hf:/etc/m.gguf", "hf:"])
    def test_invalid_sources(self, source: str) -> None:
        with pytest.raises(ConfigError, match="is not a source"):
            sources.fetch(source)

    def test_only_file_of_a_repository(self, site: Site) -> None:
        listing = {"id": "org/repo", "sha": COMMIT, "siblings": [{"rfilename": "m-Q4_0.gguf"}, {"rfilename": "x.md"}]}
        for path in ("/api/models/org/repo", "/api/models/org/repo/revision/main"):
            site.files[path] = json.dumps(listing).encode()
        tree = [{"type": "file", "path": name["rfilename"], "size": 1, "oid": "0"} for name in listing["siblings"]]  # type: ignore[index]
        site.files["/api/models/org/repo/tree/main"] = json.dumps(tree).encode()
        assert sources.fetch("hf:org/repo").name == "m-Q4_0.gguf"
        assert sources.locate("hf:org/repo") is not None

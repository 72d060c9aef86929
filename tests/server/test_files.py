"""The routes of files: forms that are refused, uploads that end early, a full disk, memory, restarts."""

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.postgres import Postgres
from tests.support.raw_http import connect, raw, read
from tests.support.requests import CHAT, HELLO, eventually, recorded, refused, talking, text_of
from tests.support.server_process import Running, Serving, server_fixture

FILES = "/v1/files"
BATCH = {"purpose": "batch"}
MAX_BYTES = 100_000
MIB = 2**20
MODELS = {"echo": {"engine": "scripted"}}
BOUNDARY = "b" * 20
FORM = f"multipart/form-data; boundary={BOUNDARY}"
START = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
).encode()
END = f"\r\n--{BOUNDARY}--\r\n".encode()
SEED = os.urandom(MIB)

server = server_fixture({"models": MODELS, "storage": {"file_bytes": MAX_BYTES}})
large = server_fixture({"models": MODELS})


def upload(client: httpx.Client, content: bytes = b"hello", name: str = "a.jsonl", **options: Any) -> httpx.Response:
    return client.post(FILES, files={"file": (name, content)}, data=options.pop("data", BATCH), **options)


def post_form(client: httpx.Client, body: Any, **headers: str) -> httpx.Response:
    return client.post(FILES, content=body, headers={"content-type": FORM, **headers})


def contents(running: Running) -> list[Path]:
    """The files of the blob store beside the database, also unfinished ones."""
    return [path for path in (running.log.parent / "dragoman.db-blobs").rglob("*") if path.is_file()]


def unfinished(running: Running) -> list[Path]:
    return [path for path in contents(running) if path.parent.name == "new"]


@pytest.fixture
def nothing_stored(server: Running) -> Iterator[None]:
    before = contents(server)
    yield
    assert eventually(lambda: contents(server) == before)


def test_content_is_sent_as_a_download(client: httpx.Client) -> None:
    file = upload(client, b"<script>", "größe \u202e'x.html").json()
    assert file["filename"] == "größe \u202e'x.html"
    path = f"{FILES}/{file['id']}/content"
    answer = client.get(path)
    assert answer.content == b"<script>"
    assert answer.headers["content-type"] == "application/octet-stream"
    expected = "attachment; filename*=UTF-8''gr%C3%B6%C3%9Fe%20%E2%80%AE%27x.html"
    assert answer.headers["content-disposition"] == expected
    head = client.head(path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "8", b"")
    assert client.get(path, headers={"origin": "https://evil.example"}).headers.get("vary") is None


def test_equal_contents_are_stored_once_and_removed_with_the_last(server: Running, client: httpx.Client) -> None:
    before = contents(server)
    files = [upload(client, b"the same").json()["id"] for _ in range(3)]
    assert len(contents(server)) == len(before) + 1
    for file in files:
        assert client.delete(f"{FILES}/{file}").status_code == 200
    assert contents(server) == before


@pytest.mark.usefixtures("nothing_stored")
def test_incomplete_forms_are_refused(client: httpx.Client) -> None:
    refused(client.post(FILES, files={"file": ("a", b"x")}), 400, param="purpose")
    refused(client.post(FILES, files={"other": ("a", b"x")}, data=BATCH), 400, param="file")
    two = [("file", ("a", b"x")), ("file", ("b", b"x"))]
    assert "more than once" in refused(client.post(FILES, files=two, data=BATCH), 400, param="file")
    assert "boundary" in refused(client.post(FILES, content=b"x", headers={"content-type": FORM[:19]}), 400)
    assert "malformed" in refused(post_form(client, START + b"cut off"), 400)
    assert "malformed" in refused(post_form(client, b"nothing like a form"), 400)
    huge = START.replace(b"batch", b"b" * 5_000_000) + b"x" + END
    assert "longer than 1024 bytes" in refused(post_form(client, huge[:90_000] + END), 400, param="purpose")
    headers = START.replace(b'filename="a"', b'filename="' + b"n" * 50_000 + b'"') + b"x" + END
    assert "malformed" in refused(post_form(client, headers), 400)
    for name in ("a\0b", "a\r\nb", "a\x1bb"):
        form = START.replace(b'filename="a"', f'filename="{name}"'.encode()) + b"x" + END
        assert refused(post_form(client, form), 400, param="file" if "\n" not in name else None)


@pytest.mark.usefixtures("nothing_stored")
def test_other_bodies_than_forms_are_refused(client: httpx.Client) -> None:
    for content_type in ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/mixed"):
        answer = client.post(FILES, content=b"{}", headers={"content-type": content_type})
        assert "multipart/form-data" in refused(answer, 415)
    refused(client.post(FILES, content=b"x"), 415)
    assert "compressed" in refused(post_form(client, START + b"x" + END, **{"content-encoding": "gzip"}), 415)


@pytest.mark.usefixtures("nothing_stored")
def test_too_large_files_are_refused(server: Running, client: httpx.Client) -> None:
    assert "`storage.file_bytes`" in refused(upload(client, b"x" * (MAX_BYTES + 1)), 413, param="file")
    chunks = (piece for piece in (START, *repeat(b"x" * 50_000, 20), END))
    refused(post_form(client, chunks), 413, param="file")
    head = f"POST {FILES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\nExpect: 100-continue\r\n"
    answer = raw(server, f"{head}Content-Length: 100000000\r\n\r\n".encode())
    assert answer.status == 413
    assert answer.closed


def test_the_largest_file_is_accepted(client: httpx.Client) -> None:
    file = upload(client, b"x" * MAX_BYTES).json()
    assert file["bytes"] == MAX_BYTES
    assert len(client.get(f"{FILES}/{file['id']}/content").content) == MAX_BYTES


def test_unknown_fields_are_named_or_refused(client: httpx.Client) -> None:
    fields = BATCH | {"color": "red"}
    assert upload(client, data=fields).headers["x-dragoman-ignored"] == "color"
    refused(upload(client, data=fields, headers={"x-dragoman-strict": "true"}), 400, param="color")
    anthropic = {"anthropic-version": "2023-06-01"}
    answer = upload(client, data={}, headers=anthropic)
    assert answer.json()["type"] == "file"
    error = upload(client, data={"expires_in_seconds": "soon"}, headers=anthropic)
    assert (error.status_code, error.json()["error"]["type"]) == (400, "invalid_request_error")
    assert error.json()["error"]["message"].startswith("expires_in_seconds: ")


def test_forms_of_web_pages(server: Running, client: httpx.Client) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        assert "cors.origins" in refused(upload(client, headers={"origin": origin}), 403)
    assert upload(client, headers={"origin": server.url}).status_code == 200
    # A page of another origin cannot send a key without a preflight, which is refused.
    key = {"origin": "https://evil.example", "authorization": "Bearer x"}
    assert upload(client, headers=key).status_code == 200
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert client.options(FILES, headers=preflight).status_code == 405


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    file = upload(client).json()["id"]
    for path in (f"{file}/contents", f"{file}/content/x", "x", file.upper(), f"{file}%00", "..%2f..%2fetc%2fpasswd"):
        refused(client.get(f"{FILES}/{path}"), 404)
        refused(client.delete(f"{FILES}/{path}"), 404)
    refused(client.delete(f"{FILES}/{file}/content"), 404)
    assert client.put(f"{FILES}/{file}").status_code == 405
    assert client.post(f"{FILES}/{file}").status_code == 405
    assert client.get(f"{FILES}/{file}").status_code == 200


@contextmanager
def half_an_upload(running: Running) -> Iterator[Any]:
    head = f"POST {FILES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\nContent-Length: 90000\r\n\r\n"
    with connect(running) as sock:
        sock.sendall(head.encode() + START + b"x" * 50_000)
        assert eventually(lambda: bool(unfinished(running)))
        yield sock


@pytest.mark.usefixtures("nothing_stored")
def test_client_that_leaves_in_mid_upload_leaves_no_file(server: Running) -> None:
    before = len(recorded(server, 0, status=499))
    with half_an_upload(server):
        pass
    assert eventually(lambda: len(recorded(server, 0, status=499)) == before + 1)
    assert not unfinished(server)


def test_upload_that_stops_is_refused(impatient: Running) -> None:
    """The server allows one second."""
    with half_an_upload(impatient) as sock:
        answer = read(sock, 60)
    assert (answer.status, answer.closed) == (408, True)
    assert b"less than 64 KiB" in answer.body
    assert not contents(impatient)


def test_client_that_leaves_in_mid_download(large: Running) -> None:
    with talking(large) as client:
        file = upload(client, SEED * 20).json()["id"]
        before = len(recorded(large, 0, status=499))
        with client.stream("GET", f"{FILES}/{file}/content") as answer:
            next(answer.iter_raw(1000))
        assert eventually(lambda: len(recorded(large, 0, status=499)) == before + 1)
        assert len(client.get(f"{FILES}/{file}/content").content) == 20 * MIB


@contextmanager
def file_size_limit(running: Running, size: int) -> Iterator[None]:
    """The processes of the server cannot write behind this place of any file, as if the disk were full."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in running.processes()}
    try:
        for pid, (_, hard) in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_full_disk_refuses_uploads_until_there_is_room(large: Running) -> None:
    with talking(large) as client:
        kept = upload(client, b"kept").json()["id"]
        before = contents(large)
        with file_size_limit(large, MIB):
            answer = upload(client, SEED * 5)
            refused(answer, 503, code="storage_unavailable")
            assert int(answer.headers["retry-after"]) > 0
            assert contents(large) == before
            assert client.get(f"{FILES}/{kept}/content").content == b"kept"
            assert text_of(client.post(CHAT, json={"messages": HELLO})) == "hello"
        with file_size_limit(large, 1):
            refused(upload(client, b"small"), 503, code="storage_unavailable")
            assert contents(large) == before
        file = upload(client, SEED * 5).json()["id"]
        assert client.get(f"{FILES}/{file}/content").content == SEED * 5


def peak_mib(running: Running) -> float:
    """The peak memory of the server's processes, together."""
    total = 0
    for pid in running.processes():
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        total += next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return total / 1024


def test_memory_does_not_grow_with_the_size_of_a_file(large: Running) -> None:
    with talking(large) as client:
        upload(client, SEED)
        for pid in large.processes():
            # Forget the peak of earlier requests.
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        before = peak_mib(large)

        def both_ways(_: int) -> int:
            body = (piece for piece in (START, *repeat(SEED, 25), END))
            made = post_form(client, body).json()
            with client.stream("GET", f"{FILES}/{made['id']}/content") as answer:
                return sum(map(len, answer.iter_raw()))

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(both_ways, range(2))) == [25 * MIB] * 2
        assert peak_mib(large) < before + 20


def test_acknowledged_files_survive_kill_9(tmp_path: Path, serving: Serving) -> None:
    made = []
    with serving(tmp_path, {"models": MODELS}) as running, talking(running) as client:
        made += [upload(client, b"%d" % at, f"{at}.jsonl").json() for at in range(10)]
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    with serving(tmp_path, {"models": MODELS}) as running, talking(running) as client:
        assert client.get(FILES, params={"order": "asc"}).json()["data"] == made
        assert [client.get(f"{FILES}/{file['id']}/content").content for file in made] == [
            b"%d" % at for at in range(10)
        ]


def test_servers_that_share_postgres_share_files(tmp_path: Path, postgres: Postgres, serving: Serving) -> None:
    storage = {"address": postgres.new_database(), "blobs": str(tmp_path / "blobs")}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    config = {"models": MODELS, "storage": storage}
    with serving(folders[0], config) as one, serving(folders[1], config) as two:
        with talking(one) as first, talking(two) as second:
            file = upload(first).json()
            assert second.get(f"{FILES}/{file['id']}").json() == file
            assert second.get(f"{FILES}/{file['id']}/content").content == b"hello"
            assert second.get(FILES).json()["data"] == [file]
            assert second.delete(f"{FILES}/{file['id']}").status_code == 200
            refused(first.get(f"{FILES}/{file['id']}"), 404)
        assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]

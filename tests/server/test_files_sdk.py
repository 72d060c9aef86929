"""Files with the official SDKs, in each kind of storage."""

import io
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.beta import BetaDeletedFile, BetaFileMetadata
from openai.types import FileDeleted, FileObject

from dragoman.storage.keys import KeyStore
from tests.support.sdk import anthropic_sdk, sdk, validated
from tests.support.server_process import Running, Serving

DAY = 86400
KEPT_DAYS = 2
LINES = b'{"custom_id": "1"}\n{"custom_id": "2"}\n'
EVERY_BYTE = bytes(range(256)) * 5000
MISSING = "file-" + "0" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module", params=["sqlite", "memory", "postgres"])
def running(request: pytest.FixtureRequest, folder: Path, serving: Serving) -> Iterator[Running]:
    """A server with one kind of storage. With Postgres two servers share it; see `other`."""
    addresses = {"sqlite": str(folder / "dragoman.db"), "memory": "memory"}
    if request.param == "postgres":
        addresses["postgres"] = request.getfixturevalue("postgres").new_database()
    with serving(folder, config(folder, addresses[request.param], request.param)) as made:
        yield made


def config(folder: Path, address: str, blobs: str) -> dict[str, Any]:
    storage = {"address": address, "blobs": str(folder / f"{blobs}-blobs"), "keep": {"files": KEPT_DAYS * DAY}}
    return {"models": {"echo": {"engine": "scripted"}}, "keys": {"store": "keys.db"}, "storage": storage}


@pytest.fixture
def make_key(folder: Path, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Makes keys of a principal that no other test has."""
    name = f"t{time.time_ns()}"
    return lambda: KeyStore(folder / "keys.db").create(name)[0]


@pytest.fixture
def client(running: Running, make_key: Callable[[], str]) -> Iterator[openai.OpenAI]:
    with sdk(running, make_key()) as made:
        yield made


@pytest.fixture
def beta(running: Running, make_key: Callable[[], str]) -> Iterator[anthropic.Anthropic]:
    """A client of the same principal as `client`."""
    with anthropic_sdk(running, make_key()) as made:
        yield made


def test_openai_file_from_upload_to_deletion(client: openai.OpenAI) -> None:
    raw = client.files.with_raw_response.create(file=("input.jsonl", LINES), purpose="batch")
    made = validated(FileObject, raw.content)
    assert (made.object, made.bytes, made.filename) == ("file", len(LINES), "input.jsonl")
    assert (made.purpose, made.status) == ("batch", "processed")
    assert abs(made.created_at - time.time()) < 60
    assert made.expires_at == pytest.approx(made.created_at + KEPT_DAYS * DAY, abs=1)
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).content == LINES
    assert [file.id for file in client.files.list()] == [made.id]
    deleted = validated(FileDeleted, client.files.with_raw_response.delete(made.id).content)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for use in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=made.id):
            use(made.id)
    assert not client.files.list().data


@pytest.mark.parametrize("purpose", ["assistants", "batch", "evals", "user_data", "vision"])
def test_purposes_of_uploads(client: openai.OpenAI, purpose: Any) -> None:
    assert client.files.create(file=b"x", purpose=purpose).purpose == purpose
    assert [file.purpose for file in client.files.list(purpose=purpose)] == [purpose]
    assert not client.files.list(purpose="fine-tune").data


def test_file_forms_of_the_sdk(client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "größe 1.jsonl").write_bytes(EVERY_BYTE)
    files: list[Any] = [
        tmp_path / "größe 1.jsonl",
        io.BytesIO(EVERY_BYTE),
        ("b.bin", EVERY_BYTE, "application/x-thing"),
        ("empty.txt", b""),
    ]
    made = [client.files.create(file=file, purpose="user_data") for file in files]
    assert [file.filename for file in made] == ["größe 1.jsonl", "upload", "b.bin", "empty.txt"]
    assert [client.files.content(file.id).content for file in made] == [EVERY_BYTE] * 3 + [b""]


def test_openai_pages_follow_each_other(client: openai.OpenAI) -> None:
    made = [client.files.create(file=b"%d" % at, purpose="batch").id for at in range(7)]
    assert [file.id for file in client.files.list(limit=3)] == made[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == made
    page = client.files.list(limit=3, order="asc", after=made[1])
    assert ([file.id for file in page.data], page.has_more) == (made[2:5], True)
    page = client.files.list(limit=3, after=made[2])
    assert ([file.id for file in page.data], page.has_more) == ([made[1], made[0]], False)


def test_openai_file_expires_as_requested(client: openai.OpenAI) -> None:
    made = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3 * 3600})
    assert made.expires_at == pytest.approx(made.created_at + 3 * 3600, abs=1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 10}}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after.anchor"),
        ({"purpose": "batch", "expires_after": {"anchor": "created_at"}}, "expires_after.seconds"),
    ],
)
def test_openai_refusals_name_the_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=b"x", **fields)
    assert caught.value.param == param
    assert not client.files.list().data


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"order": "up"}, "order"),
        ({"purpose": "batsch"}, "purpose"),
        ({"after": MISSING}, "after"),
    ],
)
def test_openai_list_refusals(client: openai.OpenAI, query: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(**query)
    assert caught.value.param == param


def test_anthropic_file_from_upload_to_deletion(beta: anthropic.Anthropic) -> None:
    files = beta.beta.files
    raw = files.with_raw_response.upload(file=("photo.png", EVERY_BYTE, "image/png"))
    made = validated(BetaFileMetadata, raw.http_response.content)
    assert (made.type, made.filename, made.mime_type) == ("file", "photo.png", "image/png")
    assert (made.size_bytes, made.downloadable) == (len(EVERY_BYTE), True)
    assert abs(made.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert made.expires_at == made.created_at + timedelta(days=KEPT_DAYS)
    assert files.retrieve_metadata(made.id) == made
    assert files.download(made.id).read() == EVERY_BYTE
    assert [file.id for file in files.list()] == [made.id]
    deleted = validated(BetaDeletedFile, files.with_raw_response.delete(made.id).http_response.content)
    assert (deleted.id, deleted.type) == (made.id, "file_deleted")
    for use in (files.retrieve_metadata, files.download, files.delete):
        with pytest.raises(anthropic.NotFoundError, match=made.id):
            use(made.id)


def test_anthropic_pages_and_chosen_ids(beta: anthropic.Anthropic) -> None:
    files = beta.beta.files
    made = [files.upload(file=(f"{at}.txt", b"x")).id for at in range(5)]
    assert [file.id for file in files.list(limit=2)] == made[::-1]
    found = files.list(ids=[made[3], MISSING, made[0], made[3]])
    assert [file.id for file in found.data] == [made[3], made[0]]
    assert found.next_page is None
    with pytest.raises(anthropic.BadRequestError, match="ids"):
        files.list(ids=[f"file-{at:032x}" for at in range(101)])
    with pytest.raises(anthropic.BadRequestError, match="cannot be combined"):
        files.list(ids=[made[0]], limit=1)
    with pytest.raises(anthropic.BadRequestError, match="page"):
        files.list(page="page_x")
    with pytest.raises(anthropic.BadRequestError, match="scope_id"):
        files.list(scope_id="sesn_1")


def test_anthropic_older_pages(running: Running, beta: anthropic.Anthropic) -> None:
    made = [beta.beta.files.upload(file=(f"{at}.txt", b"x")).id for at in range(5)][::-1]
    headers = {"x-api-key": str(beta.api_key), "anthropic-version": "2023-06-01"}

    def page(**query: Any) -> tuple[list[str], bool]:
        url = f"{running.url}/v1/files"
        with httpx.Client(trust_env=False, headers=headers, timeout=60) as plain:
            body = plain.get(url, params=query).raise_for_status().json()
        ids = [file["id"] for file in body["data"]]
        assert (body["first_id"], body["last_id"]) == (ids[0], ids[-1])
        return ids, body["has_more"]

    assert page(limit=2) == (made[:2], True)
    assert page(limit=2, after_id=made[1]) == (made[2:4], True)
    assert page(limit=2, after_id=made[3]) == (made[4:], False)
    assert page(limit=2, before_id=made[3]) == (made[1:3], True)
    assert page(limit=2, before_id=made[2]) == (made[:2], False)


def test_anthropic_names_types_and_expiry(beta: anthropic.Anthropic) -> None:
    files = beta.beta.files
    assert files.upload(file=("", b"x", "application/pdf")).filename == "unnamed.pdf"
    assert files.upload(file=("notes.txt", b"x")).mime_type == "text/plain"
    made = files.upload(file=("a", b"x"), expires_in_seconds=7200)
    assert made.mime_type == "application/octet-stream"
    assert made.expires_at is not None
    assert abs(made.expires_at - made.created_at - timedelta(hours=2)) < timedelta(seconds=1)
    with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
        files.upload(file=("a", b"x"), expires_in_seconds=10)


def test_both_apis_see_the_same_files(client: openai.OpenAI, beta: anthropic.Anthropic) -> None:
    one = client.files.create(file=("one.jsonl", LINES), purpose="batch")
    two = beta.beta.files.upload(file=("two.txt", b"two"))
    assert [file.id for file in beta.beta.files.list()] == [two.id, one.id]
    assert [(file.id, file.purpose) for file in client.files.list()] == [(two.id, "user_data"), (one.id, "batch")]
    assert beta.beta.files.download(one.id).read() == LINES
    beta.beta.files.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(one.id)


async def test_async_clients(running: Running, make_key: Callable[[], str]) -> None:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=make_key(), http_client=http) as client:
        made = await client.files.create(file=("a.jsonl", LINES), purpose="batch")
        assert (await client.files.content(made.id)).content == LINES
        assert [file.id async for file in client.files.list()] == [made.id]
        assert (await client.files.wait_for_processing(made.id)).status == "processed"

"""Batches with the official SDKs, over real sockets, on SQLite and on Postgres."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai import OpenAI
from openai.types import Batch

from tests.support.batches import (
    chat_line,
    finish,
    finish_messages,
    jsonl,
    message_request,
    read_file,
    submit,
    text_of_line,
)
from tests.support.requests import CHAT, eventually, refused, talking
from tests.support.sdk import anthropic_sdk, sdk, validated
from tests.support.server_process import Running, Serving

BATCHES, MESSAGE_BATCHES = "/v1/batches", "/v1/messages/batches"
MODELS = {
    "echo": {"engine": "scripted"},
    "other": {"engine": "scripted", "replies": [{"output": "from the other model"}]},
    # Ten minutes: a test that waits for the end of a reply fails.
    "slow": {"engine": "scripted", "tokens_per_second": 10, "replies": [{"output": "tick" * 6000}]},
}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Serving
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("batches")
    storage: dict[str, Any] = {"address": str(folder / "dragoman.db"), "blobs": str(folder / "blobs")}
    if request.param == "postgres":
        storage["address"] = request.getfixturevalue("postgres").new_database()
    config = {"models": MODELS, "storage": storage | {"file_bytes": "2MiB"}, "limits": {"batch_lines": 4}}
    with serving(folder, config) as running:
        yield running


@pytest.fixture
def openai_client(server: Running) -> Iterator[OpenAI]:
    with sdk(server) as client:
        yield client


@pytest.fixture
def anthropic_client(server: Running) -> Iterator[Anthropic]:
    with anthropic_sdk(server) as client:
        yield client


def test_openai_batch_from_upload_to_results(openai_client: OpenAI, client: httpx.Client) -> None:
    lines = [chat_line(f"name {at}", f"text {at}") for at in range(40)]
    batch = submit(openai_client, lines, metadata={"purpose": "test"}, extra_body={"completion_window": "7d"})
    assert batch.status in ("validating", "in_progress", "finalizing", "completed")
    assert batch.id.startswith("batch_")
    assert (batch.endpoint, batch.completion_window, batch.metadata) == (CHAT, "7d", {"purpose": "test"})
    ended = finish(openai_client, batch.id)
    assert ended.status == "completed"
    counts = ended.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (40, 40, 0)
    results = read_file(openai_client, ended.output_file_id)
    assert [entry["custom_id"] for entry in results] == [f"name {at}" for at in range(40)]
    assert [text_of_line(entry) for entry in results] == [f"text {at}" for at in range(40)]
    assert len({entry["id"] for entry in results}) == 40
    assert all(entry["response"]["request_id"] == entry["response"]["body"]["id"] for entry in results)
    fingerprints = {entry["response"]["body"]["system_fingerprint"] for entry in results}
    assert fingerprints == {client.post(CHAT, json=lines[0]["body"]).json()["system_fingerprint"]}
    assert (ended.error_file_id, ended.errors) == (None, None)
    assert ended.usage is not None
    assert ended.usage.output_tokens == sum(
        entry["response"]["body"]["usage"]["completion_tokens"] for entry in results
    )
    assert ended.created_at <= (ended.in_progress_at or 0) <= (ended.finalizing_at or 0) <= (ended.completed_at or 0)
    assert ended.expires_at == ended.created_at + 7 * 86400
    validated(Batch, client.get(f"{BATCHES}/{batch.id}").content)
    assert ended.output_file_id is not None
    file = openai_client.files.retrieve(ended.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_good_lines_run_and_bad_ones_are_reported_with_their_numbers(openai_client: OpenAI) -> None:
    lines: list[Any] = [chat_line("a"), b"{broken", chat_line("b"), chat_line("a"), b"", chat_line("c", model="absent")]
    lines += [chat_line("d", url="/v1/embeddings"), chat_line("e", stream=True), chat_line("f", model="other")]
    lines += [chat_line("g", messages=5)]
    ended = finish(openai_client, submit(openai_client, lines).id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 9, "completed": 3, "failed": 6}
    output = read_file(openai_client, ended.output_file_id)
    assert {entry["custom_id"]: text_of_line(entry) for entry in output} == {
        "a": "hello",
        "b": "hello",
        "f": "from the other model",
    }
    errors = {entry["custom_id"]: entry for entry in read_file(openai_client, ended.error_file_id)}
    assert set(errors) == {None, "a", "c", "d", "e", "g"}
    assert errors["c"]["response"]["status_code"] == 404
    assert errors["c"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors["g"]["response"]["body"]["error"]["param"] == "messages"
    assert errors["a"]["error"]["code"] == "duplicate_custom_id"
    assert ended.errors is not None
    assert ended.errors.data is not None
    found = [(error.line, error.code, error.param) for error in ended.errors.data]
    assert found == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (7, "mismatched_url", "url"),
        (8, "invalid_request", "body.stream"),
    ]


def test_batch_without_a_good_line_fails(openai_client: OpenAI) -> None:
    for lines, code, count in (([b"[]", b"{}"], "invalid_request", 2), ([b""], "empty_file", 0)):
        ended = finish(openai_client, submit(openai_client, lines).id)
        assert ended.status == "failed"
        assert ended.failed_at is not None
        assert ended.output_file_id is None
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].code == code
        assert len(read_file(openai_client, ended.error_file_id)) == count


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/completions", {"model": "echo", "prompt": "hi"}, "choices"),
        ("/v1/responses", {"model": "echo", "input": "hi"}, "output"),
        ("/v1/embeddings", {"model": "echo", "input": ["hi", "ho"]}, "data"),
    ],
)
def test_other_endpoints(openai_client: OpenAI, endpoint: str, body: dict[str, Any], field: str) -> None:
    lines = [{"custom_id": f"n{at}", "method": "POST", "url": endpoint, "body": body} for at in range(3)]
    ended = finish(openai_client, submit(openai_client, lines, endpoint).id)
    results = read_file(openai_client, ended.output_file_id)
    assert [entry["custom_id"] for entry in results] == ["n0", "n1", "n2"]
    assert all(entry["response"]["body"][field] for entry in results)
    assert ended.usage is not None
    assert ended.usage.input_tokens >= 3


def test_cancelled_batch_keeps_what_was_answered(openai_client: OpenAI) -> None:
    lines = [chat_line("quick"), *(chat_line(f"slow {at}", model="slow") for at in range(20))]
    batch = submit(openai_client, lines)
    assert eventually(lambda: completed(openai_client, batch.id) == 1)
    cancelling = openai_client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    ended = finish(openai_client, batch.id)
    assert ended.status == "cancelled"
    assert ended.cancelled_at is not None
    assert [entry["custom_id"] for entry in read_file(openai_client, ended.output_file_id)] == ["quick"]
    errors = read_file(openai_client, ended.error_file_id)
    assert len(errors) == 20
    assert {entry["error"]["code"] for entry in errors} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="already ended"):
        openai_client.batches.cancel(batch.id)


def completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def test_input_file_may_be_deleted_while_the_batch_runs(openai_client: OpenAI) -> None:
    batch = submit(openai_client, [chat_line(f"{at}") for at in range(50)])
    openai_client.files.delete(batch.input_file_id)
    ended = finish(openai_client, batch.id)
    assert len(read_file(openai_client, ended.output_file_id)) == 50


def test_list_has_pages(openai_client: OpenAI, client: httpx.Client) -> None:
    made = [submit(openai_client, [chat_line("a")]).id for _ in range(3)]
    listed = [batch.id for batch in openai_client.batches.list(limit=2)]
    assert listed[:3] == made[::-1]
    page = client.get(BATCHES, params={"limit": 1, "after": made[2]}).json()
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", made[1], made[1], True)
    assert "no batch" in refused(client.get(BATCHES, params={"after": "batch_0"}), 400, param="after")
    assert refused(client.get(BATCHES, params={"limit": 101}), 400, param="limit")


def test_mistakes_in_a_create_request(openai_client: OpenAI, client: httpx.Client) -> None:
    file = openai_client.files.create(purpose="batch", file=("a.jsonl", jsonl([chat_line("a")])))
    other = openai_client.files.create(purpose="user_data", file=("a.jsonl", jsonl([chat_line("a")])))
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    wrong: list[tuple[str, Any]] = [
        ("input_file_id", "file-0"),
        ("input_file_id", other.id),
        ("endpoint", "/v1/rerank"),
        ("completion_window", "0h"),
        ("completion_window", "31d"),
        ("completion_window", "soon"),
        ("metadata", {"x": 1}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
    ]
    for param, value in wrong:
        answer = client.post(BATCHES, json=good | {param: value})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(param)
    assert refused(client.post(BATCHES, json={**good, "endpoint": None}), 400, param="endpoint")
    answer = client.post(BATCHES, json=good | {"surprise": 1})
    assert answer.headers["x-dragoman-ignored"] == "surprise"
    strict = {"x-dragoman-strict": "true"}
    assert refused(client.post(BATCHES, json=good | {"surprise": 1}, headers=strict), 400, param="surprise")


def test_batches_that_do_not_exist_are_a_404(client: httpx.Client) -> None:
    for path in ("batch_0", "batch_0/cancel", "x/y"):
        method = "POST" if path.endswith("cancel") else "GET"
        refused(client.request(method, f"{BATCHES}/{path}"), 404)
    refused(client.post(f"{BATCHES}/batch_0"), 404)
    for method, path in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/other")):
        answer = client.request(method, f"{MESSAGE_BATCHES}/msgbatch_0{path}")
        assert (answer.status_code, answer.json()["type"]) == (404, "error"), answer.text


def test_output_files_expire_as_asked(openai_client: OpenAI) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    ended = finish(openai_client, submit(openai_client, [chat_line("a")], output_expires_after=expiry).id)
    assert ended.output_file_id is not None
    file = openai_client.files.retrieve(ended.output_file_id)
    assert (file.expires_at or 0) - file.created_at == 3600


def test_anthropic_batch_from_creation_to_deletion(anthropic_client: Anthropic, client: httpx.Client) -> None:
    batches = anthropic_client.messages.batches
    requests = [message_request(f"n{at}", f"text {at}") for at in range(30)]
    requests[7]["params"]["model"] = "absent"
    requests[8]["params"]["stream"] = True
    made = batches.create(requests=requests)
    assert made.id.startswith("msgbatch_")
    assert made.request_counts.processing == 30 or made.processing_status == "ended"
    ended = finish_messages(anthropic_client, made.id)
    assert ended.request_counts.to_dict() == {
        "processing": 0,
        "succeeded": 28,
        "errored": 2,
        "canceled": 0,
        "expired": 0,
    }
    results = {entry.custom_id: entry.result for entry in batches.results(made.id)}
    assert len(results) == 30
    for at in range(30):
        result = results[f"n{at}"]
        if at in (7, 8):
            assert result.type == "errored"
            assert result.error.error.type == ("not_found_error" if at == 7 else "invalid_request_error")
        else:
            assert result.type == "succeeded"
            assert result.message.content[0].to_dict()["text"] == f"text {at}"
    answer = client.get(f"{MESSAGE_BATCHES}/{made.id}/results")
    assert answer.headers["content-type"] == "application/x-jsonl"
    for line in answer.text.splitlines():
        validated(MessageBatchIndividualResponse, line.replace('"stop_details":null,', ""))
    assert client.head(f"{MESSAGE_BATCHES}/{made.id}/results").headers["content-length"] == str(len(answer.content))
    shown = client.get(f"{MESSAGE_BATCHES}/{made.id}").json()
    assert set(shown) == set(MessageBatch.model_fields)
    assert made.id in [batch.id for batch in batches.list(limit=2)]
    assert batches.delete(made.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(made.id)


def test_cancelled_anthropic_batch(anthropic_client: Anthropic) -> None:
    batches = anthropic_client.messages.batches
    requests = [message_request("quick"), *(message_request(f"s{at}", model="slow") for at in range(9))]
    made = batches.create(requests=requests)
    with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
        batches.delete(made.id)
    with pytest.raises(anthropic.NotFoundError, match="no results yet"):
        anthropic_client.get(f"{MESSAGE_BATCHES}/{made.id}/results", cast_to=object)
    cancelled = batches.cancel(made.id)
    assert cancelled.processing_status in ("canceling", "ended")
    assert cancelled.cancel_initiated_at is not None
    ended = finish_messages(anthropic_client, made.id)
    assert ended.request_counts.canceled >= 9
    kinds = {entry.custom_id: entry.result.type for entry in batches.results(made.id)}
    assert len(kinds) == 10
    assert {kind for name, kind in kinds.items() if name != "quick"} == {"canceled"}


def test_anthropic_list_has_pages(anthropic_client: Anthropic, client: httpx.Client) -> None:
    made = [anthropic_client.messages.batches.create(requests=[message_request("a")]).id for _ in range(3)]
    page = client.get(MESSAGE_BATCHES, params={"limit": 1, "after_id": made[2]}).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[1], made[1], True)
    page = client.get(MESSAGE_BATCHES, params={"limit": 1, "before_id": made[1]}).json()
    assert [batch["id"] for batch in page["data"]] == [made[2]]
    listed = [batch.id for batch in anthropic_client.messages.batches.list(limit=1)]
    assert listed[:3] == made[::-1]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{}", "requests: required"),
        (b'{"requests": []}', "requests: expected at least one request"),
        (b'{"requests": [{"custom_id": "a", "params": {}}, 5]}', "requests[1]: expected an object"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests[0].params: required"),
        (
            b'{"requests": [{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}]}',
            "is already used by an earlier request",
        ),
        (b'{"requests": [{"custom_id": "a", "params": {}}', "not valid JSON"),
    ],
)
def test_mistakes_in_an_anthropic_create_request(client: httpx.Client, body: bytes, text: str) -> None:
    answer = client.post(MESSAGE_BATCHES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert text in answer.json()["error"]["message"]


def test_body_of_another_type_or_size_is_refused(client: httpx.Client) -> None:
    body = json.dumps({"requests": [message_request("a")]}).encode()
    assert client.post(MESSAGE_BATCHES, content=body, headers={"content-type": "text/plain"}).status_code == 415
    large = {"requests": [message_request(f"n{at}", "x" * 1000) for at in range(2500)]}
    answer = client.post(MESSAGE_BATCHES, json=large)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_metrics_count_lines_by_result(openai_client: OpenAI, server: Running) -> None:
    finish(openai_client, submit(openai_client, [chat_line("a"), b"x", chat_line("b")]).id)
    with talking(server) as client:
        page = client.get("/metrics").text
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("dragoman_batch_lines_total"))
    assert float(counts['dragoman_batch_lines_total{result="succeeded"}']) >= 2
    assert float(counts['dragoman_batch_lines_total{result="errored"}']) >= 1
    assert "completed after" in server.log.read_text()

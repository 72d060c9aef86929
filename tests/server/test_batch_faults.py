"""Batches while servers and workers are killed, stopped and taken over: each line has one result."""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.batches import chat_line, finish, finish_messages, jsonl, message_request, read_file, submit
from tests.support.postgres import Postgres
from tests.support.requests import eventually, talking
from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving

COUNT = 160
PACED = {"engine": "scripted", "prefill_seconds": 0.15}


def progress(running: Running, batch_id: str) -> int:
    with talking(running) as client:
        counts = client.get(f"/v1/batches/{batch_id}").json()["request_counts"]
    return int(counts["completed"])


def wait_for_progress(running: Running, batch_id: str, count: int) -> None:
    assert eventually(lambda: progress(running, batch_id) >= count), running.log.read_text()


def check_results(running: Running, batch_id: str, count: int = COUNT) -> list[dict[str, Any]]:
    """Each line has exactly one result, the right one."""
    with sdk(running) as client:
        ended = finish(client, batch_id)
        results = read_file(client, ended.output_file_id)
        assert not read_file(client, ended.error_file_id)
        names = [file.filename for file in client.files.list() if file.purpose == "batch_output"]
    assert ended.status == "completed"
    assert Counter(entry["custom_id"] for entry in results) == Counter(f"n{at}" for at in range(count))
    for entry in results:
        content = entry["response"]["body"]["choices"][0]["message"]["content"]
        assert content == f"text of {entry['custom_id']}"
    assert names == [f"{batch_id}_output.jsonl"]
    return results


def lines(count: int = COUNT, **body: Any) -> list[dict[str, Any]]:
    return [chat_line(f"n{at}", f"text of n{at}", **body) for at in range(count)]


def test_batches_survive_kills_of_the_server(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"echo": PACED}}
    with serving(tmp_path, config) as running, sdk(running) as client, anthropic_sdk(running) as other:
        batch = submit(client, lines()).id
        requests = [message_request(f"n{at}", f"text of n{at}") for at in range(COUNT)]
        messages = other.messages.batches.create(requests=requests).id
    # Leaving the block kills all processes with SIGKILL; that was before or during the validation.
    for kills in (1, 2):
        with serving(tmp_path, config) as running:
            wait_for_progress(running, batch, kills * COUNT // 4)
    with serving(tmp_path, config) as running, anthropic_sdk(running) as other:
        check_results(running, batch)
        ended = finish_messages(other, messages)
        assert ended.request_counts.succeeded == COUNT
        found = [entry.custom_id for entry in other.messages.batches.results(messages)]
        assert Counter(found) == Counter(f"n{at}" for at in range(COUNT))


@pytest.mark.workers(1, reason="the batch runs in the parent")
def test_kills_while_results_are_written(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "limits": {"batch_lines": 64}}
    with serving(tmp_path, config) as running, sdk(running) as client:
        batch = submit(client, lines(600)).id
        wait_for_progress(running, batch, 550)
        # The end is near; the kill hits the last lines, the files, or the removal of the lines.
    for _ in range(2):
        with serving(tmp_path, config) as running:
            assert progress(running, batch) >= 550
    with serving(tmp_path, config) as running:
        check_results(running, batch, 600)


def test_kills_of_the_worker_are_retried(tmp_path: Path, serving: Serving) -> None:
    # An engine that can crash runs in a worker.
    config = {"models": {"echo": PACED | {"crash_after": 100_000}}}
    with serving(tmp_path, config) as running, sdk(running) as client:
        batch = submit(client, lines(100)).id
        for kills in (1, 2):
            wait_for_progress(running, batch, kills * 20)
            for worker in running.workers():
                os.kill(worker, signal.SIGKILL)
        check_results(running, batch, 100)


@pytest.mark.workers(1, reason="the batch runs in the parent")
def test_line_that_crashes_its_model_every_time_fails_and_the_others_run(tmp_path: Path, serving: Serving) -> None:
    crashing = {"engine": "scripted", "crash_after": 2, "replies": [{"output": "one two three four"}]}
    config = {"models": {"echo": {"engine": "scripted"}, "crashing": crashing}}
    with serving(tmp_path, config) as running, sdk(running) as client:
        ended = finish(client, submit(client, [*lines(5), chat_line("bad", model="crashing")]).id)
        assert len(read_file(client, ended.output_file_id)) == 5
        [error] = read_file(client, ended.error_file_id)
        assert error["custom_id"] == "bad"
        assert error["response"]["status_code"] in (400, 502)


def test_stop_lets_running_lines_finish_and_the_rest_waits(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"echo": {"engine": "scripted", "prefill_seconds": 1}}, "limits": {"batch_lines": 4}}
    with serving(tmp_path, config) as running, sdk(running) as client:
        batch = submit(client, lines(10)).id
        wait_for_progress(running, batch, 4)
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 20
    records = [event["id"] for event in running.events() if event.get("scope") == "chat"]
    assert len(records) == len(set(records)) >= 4
    with serving(tmp_path, config | {"models": {"echo": {"engine": "scripted"}}}) as running:
        results = check_results(running, batch, 10)
    # No line ran twice.
    assert set(records) <= {entry["response"]["request_id"] for entry in results}


@pytest.mark.workers(1, reason="the batch runs in the parent")
def test_another_server_takes_over_the_batches_of_a_dead_one(
    tmp_path: Path, serving: Serving, postgres: Postgres
) -> None:
    storage = {"address": postgres.new_database(), "blobs": str(tmp_path / "blobs")}
    config = {"models": {"echo": PACED}, "storage": storage, "limits": {"batch_lines": 4}}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        second = stack.enter_context(serving(folders[1], config))
        with serving(folders[0], config) as first, sdk(first) as client:
            batch = submit(client, lines(100)).id
            wait_for_progress(first, batch, 10)
            # Another server sees the batch, but does not run it.
            assert progress(second, batch) >= 10
            assert not [event for event in second.events() if event.get("scope") == "chat"]
        _age_heartbeats(storage, batch)
        check_results(second, batch, 100)
        assert "took over batches of servers that stopped: 1" in second.log.read_text()


def _age_heartbeats(storage: Mapping[str, str], batch: str) -> None:
    """Make the server of a batch as dead as it would be half a minute after its end."""
    statement = "UPDATE servers SET heartbeat = 0 WHERE id = (SELECT server FROM batches WHERE id = %s)"
    with psycopg.connect(storage["address"], autocommit=True) as connection:
        assert connection.execute(statement, (batch,)).rowcount == 1


@pytest.mark.workers(1, reason="the batch runs in the parent")
def test_cancel_through_another_server(tmp_path: Path, serving: Serving, postgres: Postgres) -> None:
    storage = {"address": postgres.new_database(), "blobs": str(tmp_path / "blobs")}
    slow = {"engine": "scripted", "prefill_seconds": 600}
    config = {"models": {"echo": slow}, "storage": storage}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with (
        serving(folders[0], config) as first,
        serving(folders[1], config) as second,
        sdk(first) as client,
        sdk(second) as other,
    ):
        batch = submit(client, lines(10)).id
        assert eventually(lambda: client.batches.retrieve(batch).status == "in_progress")
        other.batches.cancel(batch)
        assert finish(client, batch).status == "cancelled"


def test_many_lines_are_taken_in_with_flat_memory(tmp_path: Path, serving: Serving) -> None:
    """Thousands of lines through both APIs, whose bodies are many times larger than the growth that is allowed."""
    count, text = 20_000, "x" * 2500
    config = {"models": {"echo": {"engine": "scripted", "prefill_seconds": 600}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        before = peaks(running)
        file = client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("a.jsonl", jsonl(chat_line(f"n{at}", text) for at in range(count)))},
        )
        fields = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        first = client.post("/v1/batches", json=fields).json()["id"]
        body = {"requests": [message_request(f"n{at}", text) for at in range(count)]}
        second = client.post("/v1/messages/batches", json=body)
        assert second.json()["request_counts"]["processing"] == count
        assert eventually(lambda: client.get(f"/v1/batches/{first}").json()["request_counts"]["total"] == count)
        grown = {pid: peak - before[pid] for pid, peak in peaks(running).items() if pid in before}
        assert max(grown.values()) < 25 * 1024, grown


def peaks(running: Running) -> dict[int, int]:
    """The largest memory that each process has had, in KiB."""
    found = {}
    for pid in running.processes():
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[pid] = int(fields["VmHWM"].split()[0])
    return found

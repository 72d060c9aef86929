"""`dragoman batch`, run against a server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import environment, refused, run
from tests.support.batches import chat_line, jsonl
from tests.support.server_process import Running, serving

KEY = "sk-0123456789"
MODELS = {
    "echo": {"engine": "scripted"},
    "slow": {"engine": "scripted", "tokens_per_second": 10, "replies": [{"output": "tick" * 6000}]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("batch"), {"models": MODELS, "api_keys": [KEY]}) as running:
        yield running


def batch(server: Running, folder: Path, *arguments: str) -> Any:
    return run(folder, "batch", *arguments, "--url", server.url, "--api-key", KEY)


def write(folder: Path, *lines: Any) -> str:
    (folder / "requests.jsonl").write_bytes(jsonl(lines))
    return "requests.jsonl"


def test_submit_waits_and_results_are_written(server: Running, tmp_path: Path) -> None:
    file = write(tmp_path, *(chat_line(f"n{at}", f"text {at}") for at in range(5)))
    done = batch(server, tmp_path, "submit", file, "--wait", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["status"], shown["request_counts"]["completed"]) == ("completed", 5)
    assert done.stderr.strip() == shown["id"]
    fetched = batch(server, tmp_path, "results", shown["id"])
    assert [json.loads(line)["custom_id"] for line in fetched.stdout.splitlines()] == [f"n{at}" for at in range(5)]
    assert batch(server, tmp_path, "results", shown["id"], "-o", "out.jsonl").stdout == ""
    assert (tmp_path / "out.jsonl").read_text() == fetched.stdout
    assert "5: 5 completed, 0 failed" in batch(server, tmp_path, "status", shown["id"]).stdout


def test_failed_lines_are_reported(server: Running, tmp_path: Path) -> None:
    done = batch(server, tmp_path, "submit", write(tmp_path, chat_line("a"), b"{", chat_line("c", model="x")), "--wait")
    assert done.returncode == 1
    assert "line 2: not valid JSON" in done.stderr
    assert "3: 1 completed, 2 failed" in done.stderr
    batch_id = done.stdout.strip()
    fetched = batch(server, tmp_path, "results", batch_id)
    assert len(fetched.stdout.splitlines()) == 1
    assert "2 lines failed" in fetched.stderr
    errors = batch(server, tmp_path, "results", batch_id, "--errors").stdout
    assert [json.loads(line)["custom_id"] for line in errors.splitlines()] == [None, "c"]


def test_status_and_cancel(server: Running, tmp_path: Path) -> None:
    submitted = batch(server, tmp_path, "submit", write(tmp_path, chat_line("a", model="slow")))
    assert submitted.returncode == 0, submitted.stderr
    batch_id = submitted.stdout.strip()
    assert "has no results yet" in refused(batch(server, tmp_path, "results", batch_id))
    cancelled = batch(server, tmp_path, "cancel", batch_id)
    assert cancelled.stdout.startswith(f"{batch_id}: cancel")
    listed = batch(server, tmp_path, "status").stdout.splitlines()
    assert listed[0].split() == ["BATCH", "CREATED", "STATUS", "LINES", "COMPLETED", "FAILED"]
    assert listed[1].split()[0] == batch_id
    assert json.loads(batch(server, tmp_path, "status", "--json").stdout)[0]["id"] == batch_id


def test_address_from_the_environment(server: Running, tmp_path: Path) -> None:
    environ = environment(tmp_path) | {"DRAGOMAN_URL": server.url, "DRAGOMAN_API_KEY": KEY}
    done = run(tmp_path, "batch", "status", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), list)
    for command in (["usage"], ["keys", "usage"], ["models"]):
        done = run(tmp_path, *command, "--json", environ=environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)
    unreachable = environ | {"DRAGOMAN_URL": "http://127.0.0.1:1"}
    assert "$DRAGOMAN_URL http://127.0.0.1:1: no answer" in refused(run(tmp_path, "usage", environ=unreachable))


def test_submit_reads_the_standard_input(server: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dragoman", "batch", "submit", "-", "--url", server.url, "--api-key", KEY, "--wait"],
        cwd=tmp_path,
        env=environment(tmp_path),
        input=jsonl([chat_line("a")]),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"batch_")
    assert b"1: 1 completed, 0 failed" in done.stderr


def test_errors_are_one_line(server: Running, tmp_path: Path) -> None:
    assert "No such file" in refused(batch(server, tmp_path, "submit", "absent.jsonl"))
    assert "the file is empty" in refused(batch(server, tmp_path, "submit", write(tmp_path), "--endpoint", "/v1/x"))
    assert "the first line is not valid JSON" in refused(batch(server, tmp_path, "submit", write(tmp_path, b"text")))
    assert "give --endpoint" in refused(batch(server, tmp_path, "submit", write(tmp_path, b"{}")))
    assert "completion_window" in refused(
        batch(server, tmp_path, "submit", write(tmp_path, chat_line("a")), "--window", "soon")
    )
    assert "404" in refused(batch(server, tmp_path, "status", "batch_0/../x"))
    assert "401" in refused(run(tmp_path, "batch", "status", "--url", server.url))

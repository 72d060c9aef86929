"""The event log, shutdown, and child processes of a server."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    connect,
    eventually,
    recorded,
    refused,
    talking,
    text_of,
    under_way,
)
from tests.support.server_process import Running, serving

ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture
def client(scripted: Running) -> Iterator[httpx.Client]:
    with talking(scripted) as made:
        yield made


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def refuses(running: Running) -> bool:
    """Whether the server refuses new connections."""
    try:
        connect(running).close()
    except ConnectionRefusedError:
        return True
    return False


LIVELY = {
    "models": {
        "echo": {"engine": "scripted"},
        "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 25}]},
        "failing": {"engine": "scripted", "fail_after": 1},
        "in-worker": {"engine": "scripted", "crash_after": 1000},
    }
}


def test_event_log_and_graceful_stop_under_load(tmp_path: Path) -> None:
    with serving(tmp_path, LIVELY) as running, talking(running) as client:
        usages = [ask(client, path, **fields).json()["usage"] for path, fields in [(CHAT, {}), (COMPLETIONS, {"n": 3})]]
        usages.append(ask(client, CHAT, model="in-worker").json()["usage"])
        failed = ask(client, CHAT, model="failing")
        unknown = client.get("/v1/nothing")
        [child] = running.children()
        body = {"messages": HELLO, "model": "slow", "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", CHAT, json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            running.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: refuses(running))
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        usages.append(json.loads(rest[-2].removeprefix("data: "))["usage"])
        assert running.process.wait(60) == 0
        assert eventually(lambda: gone(child))

        start, *requests, end = running.events()
        assert (start["event"], end["event"]) == ("run_start", "run_end")
        assert start["schema"] == 1
        assert start["models"] == list(LIVELY["models"])
        assert start["host"]["pid"] == running.process.pid
        assert {event["event"] for event in requests} == {"request"}
        by_id = {event["id"]: event for event in requests}
        assert len(by_id) == len(requests)
        assert by_id[failed.headers["x-request-id"]]["error"] == "inference_error"
        assert by_id[unknown.headers["x-request-id"]]["status"] == 404
        streamed_record = by_id[stream.headers["x-request-id"]]
        assert streamed_record["finish"] == "stop"
        assert streamed_record["model"] == "slow"
        assert streamed_record["completion_tokens"] == 25
        assert 0 < streamed_record["first_event_us"] < streamed_record["duration_us"]
        for key in ("prompt_tokens", "completion_tokens"):
            total = sum(usage[key] for usage in usages)
            assert sum(event.get(key, 0) for event in requests) == total
            assert end[key] == total
        assert end["requests"] == len(requests)
        assert end["errors"] == 2


@ROUTES
def test_request_id_is_the_same_everywhere(scripted: Running, client: httpx.Client, path: str) -> None:
    reply = ask(client, path)
    assert reply.json()["id"] == reply.headers["x-request-id"]
    [record] = recorded(scripted, id=reply.json()["id"])
    assert record["route"] == f"POST {path}"
    assert record["status"] == 200
    assert record["model"] == "echo"
    assert record["prompt_tokens"] == record["completion_tokens"] == 2
    assert "hello" not in json.dumps(record)


def test_kill_of_the_server_leaves_no_child(tmp_path: Path) -> None:
    with serving(tmp_path, LIVELY) as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="in-worker")) == "hello"
        [child] = running.children()
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(60)
        assert eventually(lambda: gone(child))


def test_requests_past_the_grace_time_get_an_error(tmp_path: Path) -> None:
    slow = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 12_000}]}
    config = {"models": {"slow": slow}, "grace_seconds": 1}
    with serving(tmp_path, config) as running, talking(running) as client:
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(ask(client, CHAT, model="slow")))
        waiting.start()
        under_way(running, "slow")
        with client.stream("POST", CHAT, json={"messages": HELLO, "model": "slow", "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            running.process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line]
        assert "the server is stopping" in told[-1]
        waiting.join()
        refused(whole[0], 503, code="unavailable")
        assert running.process.wait(60) == 0
    log = running.log.read_text()
    assert "Traceback" not in log
    assert running.events()[-1]["errors"] == 2


def test_full_event_log_does_not_fail_requests(tmp_path: Path) -> None:
    with serving(tmp_path, LIVELY, "--event-log", "/dev/full") as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="in-worker")) == "hello"
        assert running.stop() == 0
    assert running.log.read_text().count("stopped writing the event log") == 1

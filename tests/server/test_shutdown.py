"""The stop of a server: requests in progress, signals, child processes, and the end of the event log."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.frontends import many
from tests.support.raw_http import connect
from tests.support.requests import CHAT, COMPLETIONS, HELLO, ask, eventually, talking, text_of, under_way
from tests.support.server_process import Running, Serving, has_ended

ENDLESS = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]}
MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted"},
    "brief": {"engine": "scripted", "tokens_per_second": 40, "replies": [{"output": "tick" * 30}]},
    "endless": ENDLESS,
    "in-worker": ENDLESS | {"crash_after": 100_000},
    "single": ENDLESS | {"slots": 1},
}


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str]:
    reply = await client.post(path, json=body)
    return reply.status_code, reply.text


async def _under_load(running: Running) -> list[tuple[str, bool, tuple[int, str]]]:
    """Send requests of every kind and a signal, and return the outcome of each request."""
    plan = [(model, stream) for model in ("brief", "endless", "in-worker", "single") for stream in (True, False)] * 5
    async with many(running) as client:
        tasks = [
            asyncio.create_task(_ask(client, CHAT, {"model": model, "messages": HELLO, "stream": stream}))
            for model, stream in plan
        ]
        message = {"model": "endless", "messages": HELLO, "stream": True, "max_tokens": 4000}
        tasks.append(asyncio.create_task(_ask(client, "/v1/messages", message)))
        for model, count, waiting in (("endless", 11, 0), ("in-worker", 10, 0), ("single", 1, 9)):
            await asyncio.to_thread(under_way, running, model, count, waiting)
        running.process.send_signal(signal.SIGTERM)
        told = await asyncio.gather(*tasks)
    return [(model, stream, reply) for (model, stream), reply in zip([*plan, ("messages", True)], told, strict=True)]


def test_sigterm_under_load(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": MODELS, "grace_seconds": 4}) as running:
        with talking(running) as client:
            client.post(CHAT, json={"model": "in-worker", "messages": HELLO, "max_tokens": 1})
        children = running.children()
        assert len(running.workers()) == 1
        told = asyncio.run(_under_load(running))
        assert running.process.wait(60) == 0
        assert eventually(lambda: all(map(has_ended, children)))
    for model, stream, (status, text) in told:
        if model == "brief":
            assert status == 200
            assert not stream or text.endswith("data: [DONE]\n\n")
        elif model == "messages":
            assert "event: error" in text
            assert "message_stop" not in text
        elif stream and status == 200:
            assert "[DONE]" not in text
            assert "the server is stopping" in json.loads(text.strip().rpartition("data: ")[2])["error"]["message"]
        else:
            assert status == 503, (model, text[:200])
            assert "the server is stopping" in text
    events = running.events()
    assert events[-1]["event"] == "run_end"
    requests = [event for event in events if event["event"] == "request"]
    assert events[-1]["requests"] == len(requests)
    for kind in ("completion_tokens", "unfinished_tokens"):
        assert events[-1][kind] == sum(event.get(kind, 0) for event in requests) > 0
    log = running.log.read_text()
    assert "requests that did not finish" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


def test_second_ctrl_c_under_load(tmp_path: Path, serving: Serving) -> None:
    async def whole(running: Running) -> list[tuple[int, str]]:
        async with many(running) as client:
            plan = [(model, stream) for model in ("endless", "in-worker") for stream in (True, False)] * 4
            bodies = [{"model": model, "messages": HELLO, "stream": stream} for model, stream in plan]
            tasks = [asyncio.create_task(_ask(client, CHAT, body)) for body in bodies]
            for model in ("endless", "in-worker"):
                await asyncio.to_thread(under_way, running, model, 8)
            running.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(eventually, lambda: "have 600 s to finish" in running.log.read_text())
            for number in (signal.SIGTERM, signal.SIGINT):
                running.process.send_signal(number)
            return await asyncio.gather(*tasks)

    with serving(tmp_path, {"models": MODELS, "grace_seconds": 600}) as running:
        with talking(running) as client:
            client.post(CHAT, json={"model": "in-worker", "messages": HELLO, "max_tokens": 1})
        children = running.children()
        told = asyncio.run(whole(running))
        assert running.process.wait(60) == 0
        assert eventually(lambda: all(map(has_ended, children)))
    for at, (status, text) in enumerate(told):
        assert "the server is stopping" in text
        # A stream whose first event has not come yet still has a status.
        assert status == 503 or (status == 200 and at % 2 == 0)
    log = running.log.read_text()
    assert "requests that did not finish" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


def test_signal_while_engines_stop_is_ignored(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"slow": {"engine": "tests.support.engines:SlowToStop"}}}
    with serving(tmp_path, config) as running:
        running.process.send_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            # At this point the front ends have ended, but the engine has not.
            time.sleep(0.6 if number == signal.SIGTERM else 0)
            running.process.send_signal(number)
        assert running.process.wait(60) == 0
    assert running.events()[-1]["event"] == "run_end"
    assert "Traceback" not in running.log.read_text()


def test_not_ready_while_draining(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "drain_seconds": 5}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert client.get("/ready").status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: client.get("/ready").status_code == 503)
        assert ask(client, CHAT).status_code == 200
        assert running.process.wait(60) == 0


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


def test_event_log_and_graceful_stop_under_load(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, LIVELY) as running, talking(running) as client:
        usages = [ask(client, path, **fields).json()["usage"] for path, fields in [(CHAT, {}), (COMPLETIONS, {"n": 3})]]
        usages.append(ask(client, CHAT, model="in-worker").json()["usage"])
        failed = ask(client, CHAT, model="failing")
        unknown = client.get("/v1/nothing")
        [child] = running.workers()
        body = {"messages": HELLO, "model": "slow", "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", CHAT, json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            running.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: refuses(running))
            # A second SIGTERM does not force the stop.
            running.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        usages.append(json.loads(rest[-2].removeprefix("data: "))["usage"])
        assert running.process.wait(60) == 0
        assert eventually(lambda: has_ended(child))

        start, *requests, end = running.events()
        assert (start["event"], end["event"]) == ("run_start", "run_end")
        assert start["schema"] == 1
        assert [model["name"] for model in start["models"]] == list(LIVELY["models"])
        assert start["host"]["pid"] == running.process.pid
        assert start["host"]["python"]
        assert {"name": "slow", "engine": "scripted", "device": "cpu"} in start["models"]
        assert start["config"]["limits"]["queue"] == 64
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


def test_kill_of_the_server_leaves_no_child(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, LIVELY) as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="in-worker")) == "hello"
        children = running.children()
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait(60)
        assert eventually(lambda: all(map(has_ended, children)))


def test_full_event_log_does_not_fail_requests(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, LIVELY, "--event-log", "/dev/full") as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="in-worker")) == "hello"
        assert running.stop() == 0
    assert running.log.read_text().count("stopped writing the event log") == 1

"""Graceful stop under load, and request deadlines."""

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.test_shutdown_and_logs import gone
from tests.support.requests import CHAT, HELLO, ask, eventually, refused, talking, under_way
from tests.support.server_process import Running, serving

MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted"},
    "brief": {"engine": "scripted", "tokens_per_second": 40, "replies": [{"output": "tick" * 30}]},
    "endless": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]},
    "in-worker": {
        "engine": "scripted",
        "tokens_per_second": 20,
        "crash_after": 100_000,
        "replies": [{"output": "tick" * 4000}],
    },
    "single": {"engine": "scripted", "tokens_per_second": 20, "slots": 1, "replies": [{"output": "tick" * 4000}]},
}


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[int, str]:
    reply = await client.post(path, json=body)
    return reply.status_code, reply.text


async def _under_load(running: Running) -> list[tuple[str, bool, tuple[int, str]]]:
    """Send requests of every kind and a signal, and return the outcome of each request."""
    plan = [(model, stream) for model in ("brief", "endless", "in-worker", "single") for stream in (True, False)] * 5
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60, limits=limits) as client:
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


def test_sigterm_under_load(tmp_path: Path) -> None:
    with serving(tmp_path, {"models": MODELS, "grace_seconds": 4}) as running:
        with talking(running) as client:
            client.post(CHAT, json={"model": "in-worker", "messages": HELLO, "max_tokens": 1})
        children = running.children()
        told = asyncio.run(_under_load(running))
        assert running.process.wait(60) == 0
        assert len(children) == 1
        assert eventually(lambda: gone(children[0]))
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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_second_ctrl_c_under_load(tmp_path: Path, workers: str) -> None:
    async def whole(running: Running) -> list[tuple[int, str]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60, limits=limits) as client:
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

    with serving(tmp_path, {"models": MODELS, "grace_seconds": 600}, "--workers", workers) as running:
        with talking(running) as client:
            client.post(CHAT, json={"model": "in-worker", "messages": HELLO, "max_tokens": 1})
        children = running.children()
        told = asyncio.run(whole(running))
        assert running.process.wait(60) == 0
        assert eventually(lambda: all(map(gone, children)))
    for at, (status, text) in enumerate(told):
        assert "the server is stopping" in text
        # A stream whose first event has not come yet still has a status.
        assert status == 503 or (status == 200 and at % 2 == 0)
    log = running.log.read_text()
    assert "requests that did not finish" in log
    assert "Traceback" not in log
    assert "ERROR" not in log


@pytest.mark.parametrize("workers", ["1", "2"])
def test_second_sigterm_does_not_force_stop(tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, {"models": MODELS}, "--workers", workers) as running, talking(running) as client:
        body = {"model": "brief", "messages": HELLO, "stream": True}
        with client.stream("POST", CHAT, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            for _ in range(2):
                running.process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            assert "data: [DONE]" in list(lines)
        assert running.process.wait(60) == 0


@pytest.mark.parametrize("workers", ["1", "2"])
def test_signal_while_engines_stop_is_ignored(tmp_path: Path, workers: str) -> None:
    config = {"models": {"slow": {"engine": "tests.support.engines:SlowToStop"}}}
    with serving(tmp_path, config, "--workers", workers) as running:
        running.process.send_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            # At this point the front ends have ended, but the engine has not.
            time.sleep(0.6 if number == signal.SIGTERM else 0)
            running.process.send_signal(number)
        assert running.process.wait(60) == 0
    assert running.events()[-1]["event"] == "run_end"
    assert "Traceback" not in running.log.read_text()


def test_not_ready_while_draining(tmp_path: Path) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "drain_seconds": 5}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert client.get("/ready").status_code == 200
        running.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: client.get("/ready").status_code == 503)
        assert ask(client, CHAT).status_code == 200
        assert running.process.wait(60) == 0


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = {"models": MODELS, "limits": {"request_seconds": 1}}
    with serving(tmp_path_factory.mktemp("hasty"), config) as running:
        yield running


def test_request_deadline(hasty: Running) -> None:
    with talking(hasty) as client:
        began = time.monotonic()
        refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
        assert time.monotonic() - began > 0.9
        body = {"model": "endless", "messages": HELLO, "stream": True}
        text = client.post(CHAT, json=body).text
        assert "longer than 1 s" in text
        assert "[DONE]" not in text
        reply = client.post("/v1/messages", json={"model": "endless", "messages": HELLO, "max_tokens": 4000})
        assert reply.status_code == 504
        assert reply.json()["error"]["type"] == "timeout_error"


def test_client_shortens_deadline(hasty: Running) -> None:
    with talking(hasty, {"x-dragoman-timeout": "0.3"}) as client:
        assert "longer than 0.3 s" in refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
    with talking(hasty, {"x-dragoman-timeout": "100"}) as client:
        refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        with talking(hasty, {"x-dragoman-timeout": wrong}) as client:
            refused(ask(client, CHAT), 400)


def test_deadline_includes_queue_time(hasty: Running) -> None:
    body = {"model": "single", "messages": HELLO, "stream": True}
    patience = {"x-dragoman-timeout": "0.4"}
    with talking(hasty) as one, talking(hasty, patience) as other, one.stream("POST", CHAT, json=body) as stream:
        assert next(stream.iter_lines())
        refused(ask(other, CHAT, model="single"), 504, code="deadline_exceeded")

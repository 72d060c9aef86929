"""WebSockets over TLS and Unix sockets, in other ASGI servers, and when the server stops."""

import asyncio
import json
import logging
import os
import signal
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from tools.ports import free_port
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_websocket
from websockets.sync.client import unix_connect

from dragoman import Engine, create_app
from dragoman.config.settings import Settings
from dragoman.core.engine import Output
from dragoman.core.request import GenerationRequest
from dragoman.engines.scripted import ScriptedEngine
from tests.support.certificates import write_certificate
from tests.support.requests import PATIENCE, eventually, recorded, under_way, unix_client
from tests.support.server_process import Serving, serving_at
from tests.support.websocket import (
    LAST_EVENTS,
    RESPONSES,
    create,
    events_of,
    next_event,
    opened,
    raw_socket,
    refusal,
    respond,
    text_of_response,
)

ENDLESS = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 4000}]}
MODELS: dict[str, Any] = {
    "echo": {"engine": "scripted", "chunk": 4000},
    "brief": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 60}]},
    "endless": ENDLESS,
    "in-worker": ENDLESS | {"crash_after": 100_000},
}
OPTIONS: dict[str, Any] = {"proxy": None, "open_timeout": PATIENCE}


def test_tls(tmp_path: Path, workers: int) -> None:
    context = ssl.create_default_context(cafile=write_certificate(tmp_path).certificate)
    config = {"models": MODELS, "tls": {"certificate": "server.pem", "key": "server.key"}}

    def connect(port: int) -> httpx.Client:
        return httpx.Client(base_url=f"https://localhost:{port}", verify=context, trust_env=False, timeout=PATIENCE)

    with serving_at(tmp_path, config, connect, workers=workers) as (running, _):
        url = f"wss://localhost:{running.port}{RESPONSES}"
        with connect_websocket(url, ssl=context, max_size=None, **OPTIONS) as websocket:
            large = "a" * 1_000_000
            assert text_of_response(respond(websocket, large)) == large
            create(websocket, model="endless")
            next_event(websocket)
        assert recorded(running, model="endless", status=499)
        with connect_websocket(url, ssl=context, **OPTIONS):
            assert running.stop() == 0


def test_unix_socket(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "dragoman.sock"
    config = {"models": MODELS, "socket": str(path), "proxies": ["unix"]}
    with serving_at(tmp_path, config, unix_client(path), workers=workers) as (running, _):
        headers = {"x-forwarded-for": "198.51.100.7"}
        with unix_connect(str(path), f"ws://localhost{RESPONSES}", additional_headers=headers, **OPTIONS) as websocket:
            response = respond(websocket)
        (record,) = recorded(running, id=response["id"])
        assert record["client"] == "198.51.100.7"


# The stop of the server.


def test_stop_closes_idle_connections_and_lets_responses_finish(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": MODELS}) as running:
        with opened(running) as idle, opened(running) as busy:
            assert respond(idle)["status"] == "completed"
            create(busy, model="brief")
            create(busy, "waiting")
            next_event(busy)
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                idle.recv(timeout=PATIENCE)
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "the server is stopping")
            create(busy, "too late")
            events: list[dict[str, Any]] = []
            while len([event for event in events if event["type"] in LAST_EVENTS]) < 2:
                events.append(next_event(busy))
            refused = [event for event in events if event["type"] == "error"]
            assert [event["status"] for event in refused] == [503]
            assert [event["response"]["status"] for event in events if event["type"] in LAST_EVENTS] == [
                "completed"
            ] * 2
            with pytest.raises(ConnectionClosed):
                busy.recv(timeout=PATIENCE)
        assert running.process.wait(PATIENCE) == 0
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("model", ["endless", "in-worker"])
def test_response_fails_after_the_grace_time(tmp_path: Path, serving: Serving, model: str) -> None:
    with serving(tmp_path, {"models": MODELS, "grace_seconds": 1}) as running:
        with opened(running) as websocket:
            create(websocket, model=model)
            while next_event(websocket)["type"] != "response.output_text.delta":
                pass
            running.process.send_signal(signal.SIGTERM)
            *_, error, failed = events_of(websocket)
            assert (error["type"], error["message"]) == ("error", "the server is stopping")
            assert failed["response"]["status"] == "failed"
            with pytest.raises(ConnectionClosed) as closed:
                websocket.recv(timeout=PATIENCE)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
        assert running.process.wait(PATIENCE) == 0
        assert "Traceback" not in running.log.read_text()


def test_client_that_does_not_answer_the_close_frame_delays_the_stop_little(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": MODELS}) as running, raw_socket(running):
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0


def test_drain_accepts_further_requests(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": MODELS, "drain_seconds": 2}) as running:
        with opened(running) as websocket:
            running.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: "new requests are taken" in running.log.read_text())
            assert respond(websocket)["status"] == "completed"
            with pytest.raises(ConnectionClosed):
                websocket.recv(timeout=PATIENCE)
        assert running.process.wait(PATIENCE) == 0


@pytest.mark.workers(2)
def test_front_end_that_dies_cancels_its_requests(tmp_path: Path, serving: Serving) -> None:
    with serving(tmp_path, {"models": MODELS}) as running:
        with opened(running) as websocket:
            create(websocket, model="endless")
            next_event(websocket)
            for pid in running.fronts():
                os.kill(pid, signal.SIGKILL)
            # What arrived before is still read.
            with pytest.raises(ConnectionClosed):
                events_of(websocket)
        under_way(running, "endless", 0)


# In another ASGI server.


@dataclass
class Mounted:
    port: int


@contextmanager
def mounted(app: Any, implementation: Any, prefix: str) -> Iterator[Mounted]:
    """An app in a uvicorn server, in a thread, below a prefix."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await app.stop()

    port, outer = free_port(), Starlette(routes=[Mount(prefix, app)], lifespan=lifespan)
    config = uvicorn.Config(outer, port=port, log_level="warning", ws=implementation)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert eventually(lambda: server.started)
        yield Mounted(port)
    finally:
        server.should_exit = True
        thread.join()


def test_user_of_the_outer_app_owns_the_responses(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    settings = Settings(models_dir=(), event_log=str(log))
    app = create_app(
        ScriptedEngine(), settings=settings, identify=lambda scope: dict(scope["headers"])[b"user"].decode()
    )
    with mounted(app, "wsproto", "/ai") as address:
        for user in ("ann", "bob"):
            with opened(address, {"user": user}, path=f"/ai{RESPONSES}") as websocket:
                response = respond(websocket)
            records = [json.loads(line) for line in log.read_text().splitlines()]
            assert [record["principal"] for record in records if record.get("id") == response["id"]] == [f"host:{user}"]


class Ticking(Engine):
    closed = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        try:
            while True:
                await asyncio.sleep(0.05)
                yield "tick "
        finally:
            self.closed += 1


@pytest.mark.parametrize("implementation", ["websockets-sansio", "wsproto"])
@pytest.mark.parametrize("prefix", ["", "/ai"])
def test_mounted_app(implementation: str, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = Ticking()
    with mounted(create_app(ScriptedEngine(), engine), implementation, prefix) as address:
        with opened(address, path=f"{prefix}{RESPONSES}") as websocket:
            first = respond(websocket, model="scripted")
            second = respond(websocket, "again", model="scripted", previous_response_id=first["id"])
            assert text_of_response(second) == "again"
            websocket.send(b"{}")
            refusal(websocket, 400, "invalid_value")
            create(websocket, model="ticking")
            next_event(websocket)
        assert eventually(lambda: engine.closed == 1)
        for path, headers, status in (
            (f"{prefix}/v1/chat/completions", {}, 426),
            (f"{prefix}/v1/elsewhere", {}, 404),
            (f"{prefix}{RESPONSES}", {"origin": "http://evil.example"}, 403),
        ):
            with pytest.raises(InvalidStatus) as refused, opened(address, headers, path=path):
                pass
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["code"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

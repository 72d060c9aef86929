"""Upstream pools with real servers: killed under load, drained, started late."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tools.ports import free_port

from dragoman.core.engine import stream_events
from dragoman.core.errors import DragomanError, Unavailable, Unreachable
from dragoman.core.events import Finished, TextDelta
from dragoman.engines.upstream import engine as upstream
from dragoman.engines.upstream import health
from dragoman.engines.upstream.engine import UpstreamEngine
from tests.engines.upstream_app import CHAT, STREAMED, USER, client_of, start_engine, upstream_app
from tests.support.bad_server import GREETING, HELLO, BadServer, whole
from tests.support.server_process import Running, serving

SCRIPT = {"engine": "scripted", "replies": [{"output": "tick " * 20}], "tokens_per_second": 50, "prefill_seconds": 0.2}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Running]]:
    with ExitStack() as stack:
        folders = [tmp_path / str(number) for number in range(3)]
        for folder in folders:
            folder.mkdir()
        yield [stack.enter_context(serving(folder, {"models": {"m": SCRIPT}})) for folder in folders]


async def collect_text(engine: UpstreamEngine) -> tuple[str, bool]:
    """Return the text of one generation, and whether it is complete."""
    text, complete = "", False
    with suppress(DragomanError):
        async for batch in stream_events(engine, STREAMED):
            text += "".join(event.text for event in batch if isinstance(event, TextDelta))
            complete = complete or isinstance(batch[-1], Finished)
    return text, complete


async def test_killing_one_of_three_servers_under_load(three: list[Running]) -> None:
    async with start_engine(*(running.url for running in three), probe=True, health_seconds=0.2) as engine:
        tasks = []
        for number in range(90):
            tasks.append(asyncio.create_task(collect_text(engine)))
            await asyncio.sleep(0.01)
            if number == 30:
                os.kill(three[0].process.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert engine.states()[0].state == "out"
        assert not [text for text, complete in results if not complete and not text]
        assert sum(complete for _, complete in results) >= 60
        assert all(text == "tick " * 20 for text, complete in results if complete)


async def serve_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(whole(GREETING, content_type="text/event-stream", connection="close"))
    writer.close()


async def wait_until_up(engine: UpstreamEngine, at: int, port: int) -> None:
    async with await asyncio.start_server(serve_greeting, "127.0.0.1", port):
        while engine.states()[at].state != "up":  # noqa: ASYNC110 (servers are probed periodically)
            await asyncio.sleep(0.02)
        assert await collect_text(engine) == ("Hello", True)


async def test_server_started_late_becomes_available() -> None:
    port = free_port()
    async with start_engine(f"http://127.0.0.1:{port}", probe=True, health_seconds=0.1) as engine:
        with pytest.raises((Unavailable, Unreachable)):
            await anext(stream_events(engine, STREAMED))
        await wait_until_up(engine, 0, port)


async def test_servers_started_with_the_pool_are_found_quickly() -> None:
    ports = free_port(), free_port()
    urls = (f"http://127.0.0.1:{port}" for port in ports)
    async with start_engine(*urls, probe=True, health_seconds=600) as engine:
        assert [server.state for server in engine.states()] == ["out", "out"]
        for at, port in enumerate(ports):
            await asyncio.sleep(0.7)
            await wait_until_up(engine, at, port)


@pytest.mark.parametrize("early", [0.0, 1.0])
async def test_frequent_probes_end_after_startup(monkeypatch: pytest.MonkeyPatch, early: float) -> None:
    monkeypatch.setattr(health, "STARTUP_SECONDS", early)
    monkeypatch.setattr(health, "STARTUP_PROBE_INTERVAL", 0.3)
    async with start_engine(f"http://127.0.0.1:{free_port()}", probe=True, health_seconds=60) as engine:
        await asyncio.sleep(2)
        assert engine.states()[0].failures in (range(2, 6) if early else [1])


async def test_server_with_slow_model_list_stays_available(
    server: BadServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(upstream, "FIRST_PROBE_SECONDS", 0.05)
    server.play(HELLO)
    server.also(["hang"], path="/v1/models")
    async with start_engine(server.url, probe=True, health_seconds=0.01) as engine:
        for _ in range(8):
            assert await collect_text(engine) == ("Hello", True)
            await asyncio.sleep(0.1)
        assert engine.states()[0].state == "up"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) < 9
    assert "is slow: listing its models takes longer than 0.1 s" in messages[0]


async def test_admin_routes_list_and_drain_servers(server: BadServer, other: BadServer) -> None:
    server.play(HELLO)
    other.play(HELLO)
    async with client_of(upstream_app(server.url, {"url": other.url, "weight": 2})) as client:
        await client.post(CHAT, json={"model": "m", "messages": USER})
        listed = (await client.get("/admin/upstreams")).json()["data"]
        assert [(entry["model"], entry["url"]) for entry in listed] == [("m", server.url), ("m", other.url)]
        for url in (server.url, f"{server.url}/", f"{server.url}/v1"):
            for drain, state in ((True, "drained"), (False, "up")):
                body = {"model": "m", "url": url, "drain": drain}
                changed = (await client.post("/admin/upstreams/drain", json=body)).json()["data"]
                assert [entry["state"] for entry in changed] == [state, "up"]
        unknown = await client.post("/admin/upstreams/drain", json={"model": "m", "url": "http://other"})
        assert unknown.status_code == 404


@pytest.mark.parametrize("count", [1, 3])
async def test_no_reachable_server(count: int) -> None:
    async with client_of(upstream_app(*(f"http://127.0.0.1:{free_port()}" for _ in range(count)))) as client:
        for pause in (1.2, 0, 0, 0):
            answer = await client.post(CHAT, json={"model": "m", "messages": USER})
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            await asyncio.sleep(pause)
        ready, models = await client.get("/ready"), await client.get("/v1/models")
        assert (ready.status_code, ready.json()["models"]) == (503, {"m": "out"})
        assert models.json()["data"][0]["state"] == "out"

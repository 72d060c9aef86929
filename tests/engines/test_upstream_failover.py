"""Upstream pools with real servers: killed under load, drained, started late."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from tools.ports import free_port

from dragoman.core.errors import DragomanError, Unavailable, Unreachable
from dragoman.core.events import Finished, TextDelta
from dragoman.core.request import Delivery, GenerationRequest, Message, Text
from dragoman.engines.upstream import engine as upstream
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from dragoman.pipeline.event_stream import stream_events
from dragoman.server.app import App
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER
from tests.engines.upstream_app import upstream_app
from tests.support.bad_server import GREETING, HELLO, BadServer, whole
from tests.support.server_process import Running, serving

SCRIPT = {
    "engine": "scripted",
    "replies": [{"output": "tick " * 20}],
    "tokens_per_second": 50,
    "prefill_seconds": 0.2,
}
REQUEST = GenerationRequest(model="m", messages=(Message("user", (Text("hello"),)),), delivery=Delivery(stream=True))


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
        async for batch in stream_events(engine, REQUEST):
            text += "".join(event.text for event in batch if isinstance(event, TextDelta))
            complete = complete or isinstance(batch[-1], Finished)
    return text, complete


def test_killing_one_of_three_servers_under_load(three: list[Running]) -> None:
    async def load() -> list[tuple[str, bool]]:
        urls = tuple(running.url for running in three)
        engine = UpstreamEngine("m", UpstreamOptions(urls=urls, protocol="chat", health_seconds=0.2))
        await engine.start()
        tasks = []
        for number in range(90):
            tasks.append(asyncio.create_task(collect_text(engine)))
            await asyncio.sleep(0.01)
            if number == 30:
                os.kill(three[0].process.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks)
        assert engine.states()[0].state == "out"
        assert [state.running for state in engine.states()] == [0, 0, 0]
        await engine.stop()
        return results

    results = asyncio.run(load())
    assert not [text for text, complete in results if not complete and not text]
    assert sum(complete for _, complete in results) >= 60
    assert all(text == "tick " * 20 for text, complete in results if complete)


async def serve_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(whole(GREETING, content_type="text/event-stream", connection="close"))
    writer.close()


def test_server_started_late_becomes_available() -> None:
    async def scenario() -> None:
        port = free_port()
        options = UpstreamOptions(url=f"http://127.0.0.1:{port}", protocol="chat", health_seconds=0.1)
        engine = UpstreamEngine("m", options)
        await engine.start()
        with pytest.raises((Unavailable, Unreachable)):
            await anext(stream_events(engine, REQUEST))
        async with await asyncio.start_server(serve_greeting, "127.0.0.1", port):
            async with asyncio.timeout(60):
                while engine.states()[0].state != "up":  # noqa: ASYNC110 (servers are probed periodically)
                    await asyncio.sleep(0.02)
            assert await collect_text(engine) == ("Hello", True)
        await engine.stop()

    asyncio.run(scenario())


def test_servers_started_with_the_pool_are_found_quickly() -> None:
    async def scenario() -> None:
        ports = free_port(), free_port()
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        engine = UpstreamEngine("m", UpstreamOptions(urls=urls, protocol="chat", health_seconds=600))
        await engine.start()
        assert [server.state for server in engine.states()] == ["out", "out"]
        for at, port in enumerate(ports):
            await asyncio.sleep(0.7)
            async with await asyncio.start_server(serve_greeting, "127.0.0.1", port):
                async with asyncio.timeout(60):
                    while engine.states()[at].state != "up":  # noqa: ASYNC110 (servers are probed periodically)
                        await asyncio.sleep(0.02)
                assert await collect_text(engine) == ("Hello", True)
        await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("early", [0.0, 1.0])
def test_frequent_probes_end_after_startup(monkeypatch: pytest.MonkeyPatch, early: float) -> None:
    monkeypatch.setattr(upstream, "STARTUP_SECONDS", early)
    monkeypatch.setattr(upstream, "STARTUP_PROBE_INTERVAL", 0.3)

    async def count_probes() -> int:
        options = UpstreamOptions(url=f"http://127.0.0.1:{free_port()}", protocol="chat", health_seconds=60)
        engine = UpstreamEngine("m", options)
        await engine.start()
        await asyncio.sleep(2)
        probes = engine.states()[0].failures
        await engine.stop()
        return probes

    assert asyncio.run(count_probes()) in (range(2, 6) if early else [1])


def test_server_with_slow_model_list_stays_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upstream, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(upstream, "FIRST_PROBE_SECONDS", 0.05)

    async def talk(url: str) -> None:
        engine = UpstreamEngine("m", UpstreamOptions(url=url, protocol="chat", health_seconds=0.01))
        await engine.start()
        for _ in range(8):
            assert await collect_text(engine) == ("Hello", True)
            await asyncio.sleep(0.1)
        assert engine.states()[0].state == "up"
        await engine.stop()

    with BadServer() as server:
        server.play(HELLO)
        server.also(["hang"], path="/v1/models")
        asyncio.run(talk(server.url))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) < 9
    assert "is slow: listing its models takes longer than 0.1 s" in messages[0]


def send_admin_request(app: App, method: str, path: str, **fields: object) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await client.post(
                "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "x"}]}
            )
            answer = await client.request(
                method, path, json=fields or None, headers={ADMIN_TOKEN_HEADER: app.admin_token}
            )
        await app.stop()
        return answer

    return asyncio.run(ask())


def test_admin_routes_list_and_drain_servers() -> None:
    with BadServer() as one, BadServer() as two:
        one.play(HELLO)
        two.play(HELLO)
        app = upstream_app(one.url, {"url": two.url, "weight": 2})
        servers = send_admin_request(app, "GET", "/admin/upstreams").json()["data"]
        assert [(server["model"], server["url"], server["state"]) for server in servers] == [
            ("m", one.url, "up"),
            ("m", two.url, "up"),
        ]
        path = "/admin/upstreams/drain"
        for url in (one.url, f"{one.url}/", f"{one.url}/v1"):
            drained = send_admin_request(upstream_app(one.url, two.url), "POST", path, model="m", url=url)
            assert [server["state"] for server in drained.json()["data"]] == ["drained", "up"]
        back = send_admin_request(upstream_app(one.url), "POST", path, model="m", url=one.url, drain=False)
        assert back.json()["data"][0]["state"] == "up"
        unknown = send_admin_request(upstream_app(one.url), "POST", path, model="m", url="http://other")
        assert unknown.status_code == 404


@pytest.mark.parametrize("count", [1, 3])
def test_no_reachable_server(count: int) -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(count)]
    app = upstream_app(*urls)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    async def ask() -> tuple[list[httpx.Response], httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers = [await client.post("/v1/chat/completions", json=body)]
            await asyncio.sleep(1.2)
            answers += [await client.post("/v1/chat/completions", json=body) for _ in range(3)]
            ready, models = await client.get("/ready"), await client.get("/v1/models")
        await app.stop()
        return answers, ready, models

    answers, ready, models = asyncio.run(ask())
    assert [(answer.status_code, "retry-after" in answer.headers) for answer in answers] == [(503, True)] * 4
    assert (ready.status_code, ready.json()["models"]) == (503, {"m": "out"})
    assert models.json()["data"][0]["state"] == "out"

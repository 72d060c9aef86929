"""A pool of real processes: one is killed under load, one is drained, one comes late."""

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
from dragoman.pipeline.event_stream import run
from dragoman.server.app import App
from dragoman.server.auth.admin_token import HEADER
from tests.engines.asking import upstream_app
from tests.support.bad_server import GREETING, HELLO, BadServer, whole
from tests.support.serving import Running, serving

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


async def heard(engine: UpstreamEngine) -> tuple[str, bool]:
    """The text that came of one generation, and whether it came to its end."""
    text, complete = "", False
    with suppress(DragomanError):
        async for batch in run(engine, REQUEST):
            text += "".join(event.text for event in batch if isinstance(event, TextDelta))
            complete = complete or isinstance(batch[-1], Finished)
    return text, complete


def test_one_of_three_is_killed_under_load(three: list[Running]) -> None:
    async def load() -> list[tuple[str, bool]]:
        urls = tuple(running.url for running in three)
        engine = UpstreamEngine("m", UpstreamOptions(urls=urls, protocol="chat", health_seconds=0.2))
        await engine.start()
        tasks = []
        for number in range(90):
            tasks.append(asyncio.create_task(heard(engine)))
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


async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(whole(GREETING, content_type="text/event-stream", connection="close"))
    writer.close()


def test_a_place_that_comes_late_is_found() -> None:
    async def wait_for_it() -> None:
        port = free_port()
        options = UpstreamOptions(url=f"http://127.0.0.1:{port}", protocol="chat", health_seconds=0.1)
        engine = UpstreamEngine("m", options)
        await engine.start()
        with pytest.raises((Unavailable, Unreachable)):
            await anext(run(engine, REQUEST))
        async with await asyncio.start_server(greeted, "127.0.0.1", port):
            async with asyncio.timeout(60):
                while engine.states()[0].state != "up":  # noqa: ASYNC110 (it is looked at now and then)
                    await asyncio.sleep(0.02)
            assert await heard(engine) == ("Hello", True)
        await engine.stop()

    asyncio.run(wait_for_it())


def test_places_that_are_started_with_the_pool_are_found_at_once() -> None:
    async def start_together() -> None:
        ports = free_port(), free_port()
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        engine = UpstreamEngine("m", UpstreamOptions(urls=urls, protocol="chat", health_seconds=600))
        await engine.start()
        assert [place.state for place in engine.states()] == ["out", "out"]
        for at, port in enumerate(ports):
            await asyncio.sleep(0.7)
            async with await asyncio.start_server(greeted, "127.0.0.1", port):
                async with asyncio.timeout(60):
                    while engine.states()[at].state != "up":  # noqa: ASYNC110 (it is looked at now and then)
                        await asyncio.sleep(0.02)
                assert await heard(engine) == ("Hello", True)
        await engine.stop()

    asyncio.run(start_together())


@pytest.mark.parametrize("early", [0.0, 1.0])
def test_what_does_not_come_is_not_looked_for_all_the_time(monkeypatch: pytest.MonkeyPatch, early: float) -> None:
    monkeypatch.setattr(upstream, "STARTUP_SECONDS", early)
    monkeypatch.setattr(upstream, "STARTUP_PROBE_INTERVAL", 0.3)

    async def wait_in_vain() -> int:
        options = UpstreamOptions(url=f"http://127.0.0.1:{free_port()}", protocol="chat", health_seconds=60)
        engine = UpstreamEngine("m", options)
        await engine.start()
        await asyncio.sleep(2)
        looks = engine.states()[0].failures
        await engine.stop()
        return looks

    assert asyncio.run(wait_in_vain()) in (range(2, 6) if early else [1])


def test_a_server_that_is_slow_to_list_its_models_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upstream, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr(upstream, "FIRST_PROBE_SECONDS", 0.05)

    async def talk(url: str) -> None:
        engine = UpstreamEngine("m", UpstreamOptions(url=url, protocol="chat", health_seconds=0.01))
        await engine.start()
        for _ in range(8):
            assert await heard(engine) == ("Hello", True)
            await asyncio.sleep(0.1)
        assert engine.states()[0].state == "up"
        await engine.stop()

    with BadServer() as server:
        server.play(HELLO)
        server.also(["hang"], path="/v1/models")
        asyncio.run(talk(server.url))
    words = [record.getMessage() for record in caplog.records]
    assert len(words) < 9
    assert "is slow: listing its models takes longer than 0.1 s" in words[0]


def asked(app: App, method: str, path: str, **fields: object) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await client.post(
                "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "x"}]}
            )
            answer = await client.request(method, path, json=fields or None, headers={HEADER: app.admin_token})
        await app.stop()
        return answer

    return asyncio.run(ask())


def test_the_operator_sees_and_drains_places() -> None:
    with BadServer() as one, BadServer() as two:
        one.play(HELLO)
        two.play(HELLO)
        app = upstream_app(one.url, {"url": two.url, "weight": 2})
        places = asked(app, "GET", "/admin/upstreams").json()["data"]
        assert [(place["model"], place["url"], place["state"]) for place in places] == [
            ("m", one.url, "up"),
            ("m", two.url, "up"),
        ]
        drained = asked(upstream_app(one.url, two.url), "POST", "/admin/upstreams/drain", model="m", url=one.url)
        assert [place["state"] for place in drained.json()["data"]] == ["drained", "up"]
        for same in (f"{one.url}/", f"{one.url}/v1"):
            drained = asked(upstream_app(one.url, two.url), "POST", "/admin/upstreams/drain", model="m", url=same)
            assert [place["state"] for place in drained.json()["data"]] == ["drained", "up"]
        back = asked(upstream_app(one.url), "POST", "/admin/upstreams/drain", model="m", url=one.url, drain=False)
        assert back.json()["data"][0]["state"] == "up"
        unknown = asked(upstream_app(one.url), "POST", "/admin/upstreams/drain", model="m", url="http://other")
        assert unknown.status_code == 404


@pytest.mark.parametrize("count", [1, 3])
def test_where_nobody_is_left_it_is_said(count: int) -> None:
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

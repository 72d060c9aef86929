"""Upstream servers that form a loop."""

import asyncio
from typing import Any

import httpx
import pytest
import uvicorn
from tools.ports import free_port

from dragoman.core import loop_guard
from dragoman.core.errors import LoopDetected
from dragoman.server.app import App
from tests.engines.upstream_app import CHAT, USER, ask, upstream_app
from tests.support.bad_server import HELLO, BadServer

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/embeddings": {"input": "hello"},
    "/v1/messages/count_tokens": {"messages": USER},
}


async def call_loop(ports: list[int], path: str) -> tuple[httpx.Response, list[int]]:
    """Return the response of the first server, and the number of requests per server."""
    counts = [0] * len(ports)

    def counted(app: App, at: int) -> object:
        async def call(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            counts[at] += scope.get("path") == path
            await app(scope, receive, send)

        return call

    apps = [upstream_app(f"http://127.0.0.1:{port}", silence_seconds=5) for port in [*ports[1:], ports[0]]]
    configs = [
        uvicorn.Config(counted(app, at), port=port, log_level="warning", lifespan="off")  # type: ignore[arg-type]
        for at, (app, port) in enumerate(zip(apps, ports, strict=True))
    ]
    servers = [uvicorn.Server(config) for config in configs]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    while not all(server.started for server in servers):  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=20) as client:
        answer = await client.post(path, json={"model": "m"} | ASKS[path])
    for app in apps:
        await app.stop()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)
    return answer, counts


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("length", [1, 3])
def test_loop_is_detected_after_one_round(path: str, length: int) -> None:
    answer, counts = asyncio.run(call_loop([free_port() for _ in range(length)], path))
    assert answer.status_code == 502
    assert "leads back to" in answer.text
    assert counts == [2] + [1] * (length - 1)


def test_via_header_is_extended_if_valid(server: BadServer) -> None:
    server.play(HELLO)
    before = f"{'a' * 16},{'b' * 16}"
    for received, prefix in {before: f"{before},", "../etc, x": "", "": ""}.items():
        assert ask(upstream_app(server.url), headers={"x-dragoman-via": received}).status_code == 200
        head = next(head for head in reversed(server.heads) if CHAT in head)
        line = next(line for line in head.split("\r\n") if line.startswith("x-dragoman-via: "))
        assert line.startswith(f"x-dragoman-via: {prefix}")
        assert len(line) == len(f"x-dragoman-via: {prefix}") + 16


def test_number_of_hops_is_limited() -> None:
    loop_guard.store_path_header(b",".join([b"a" * 16] * (loop_guard.MAX_HOPS + 1)))
    with pytest.raises(LoopDetected):
        loop_guard.check("b" * 16, "m")
    loop_guard.store_path_header(None)
    loop_guard.check("b" * 16, "m")

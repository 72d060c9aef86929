"""Stop and death of a server with several front ends."""

import asyncio
import signal
from pathlib import Path

import httpx

from tests.server.test_frontends import IN_WORKER, MODELS, NUMBERS, many, streamed_text
from tests.server.test_shutdown_and_logs import gone
from tests.support.requests import CHAT, HELLO, eventually, refused, under_way
from tests.support.server_process import Running, serving


def test_graceful_stop_under_load(tmp_path: Path) -> None:
    models = {name: MODELS[name] for name in ("echo", "numbers", "endless", "single-in-worker")}
    config = {"models": models, "grace_seconds": 3, "drain_seconds": 3}

    async def whole(running: Running) -> tuple[list[tuple[str, str]], httpx.Response, int]:
        async with many(running) as client:
            await client.post(CHAT, json={"messages": HELLO, "model": "numbers", "max_tokens": 1})
            names = ["numbers"] * 6 + ["endless"] * 6 + ["single-in-worker"] * 2
            tasks = [asyncio.create_task(streamed_text(client, name)) for name in names]
            waiting = asyncio.create_task(client.post(CHAT, json={"messages": HELLO, "model": "endless"}))
            for model, count, queued in (("endless", 7, 0), ("single-in-worker", 1, 1)):
                await asyncio.to_thread(under_way, running, model, count, queued)
            running.process.send_signal(signal.SIGTERM)
            while (ready := await client.get("/ready")).status_code == 200:
                pass
            return await asyncio.gather(*tasks), await waiting, ready.status_code

    with serving(tmp_path, config, "--workers", "2") as running:
        children = running.children()
        told, waited, ready = asyncio.run(whole(running))
        assert running.process.wait(60) == 0
        assert all(gone(pid) for pid in children)
    assert ready == 503
    assert told[:6] == [(NUMBERS, "done")] * 6
    assert all("the server is stopping" in end or end == "cut off" for _, end in told[6:])
    assert "ERROR" not in running.log.read_text()
    assert [end for _, end in told[6:12]] == ["the server is stopping"] * 6
    refused(waited, 503)
    events = running.events()
    assert events[-1]["event"] == "run_end"
    assert events[-1]["requests"] == len([event for event in events if event["event"] == "request"])
    assert "Traceback" not in running.log.read_text()


def test_kill_9_of_the_parent_leaves_no_process(tmp_path: Path) -> None:
    with serving(tmp_path, {"models": {"w": IN_WORKER}}, "--workers", "3") as running:
        children = running.children()
        assert len(children) == 4
        running.process.kill()
        assert eventually(lambda: all(gone(pid) for pid in children))

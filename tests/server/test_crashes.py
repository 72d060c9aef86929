"""Workers that crash, once and repeatedly."""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.requests import CHAT, HELLO, ask, eventually, refused, talking, text_of
from tests.support.server_process import Running, serving

WORKER = {"engine": "tests.support.engines:Weighty"}
DIE = [{"role": "user", "content": "die"}]
KILLS = 8


def outcome(client: httpx.Client, name: str, stream: bool) -> str:
    """The outcome of a request: an answer or an error message."""
    if not stream:
        response = ask(client, CHAT, model=name)
        if response.status_code == 200:
            return "answered" if text_of(response) == f"{name} " * 5 else "wrong"
        message = refused(response, response.status_code)
        return f"told {response.status_code}" if message else "wrong"
    with client.stream("POST", CHAT, json={"messages": HELLO, "model": name, "stream": True}) as response:
        body = response.read().decode()
    if response.status_code != 200:
        return f"told {response.status_code}"
    if body.endswith("data: [DONE]\n\n"):
        return "answered"
    return "told in a frame" if '"error"' in body.strip().splitlines()[-1] else "wrong"


def test_each_request_gets_an_answer_or_an_error_while_a_worker_is_killed_repeatedly(tmp_path: Path) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "victim": WORKER, "other": WORKER}}
    outcomes: dict[str, Counter[str]] = {"victim": Counter(), "other": Counter()}
    ended = threading.Event()

    def keep_asking(running: Running, name: str, stream: bool) -> None:
        with talking(running) as client:
            while not ended.is_set():
                outcomes[name][outcome(client, name, stream)] += 1

    def victim(running: Running, spared: set[int]) -> int | None:
        return next((pid for pid in running.children() if pid not in spared), None)

    with serving(tmp_path, config) as running, talking(running) as client:
        client.post("/admin/models/other/load").raise_for_status()
        spared = set(running.children())
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, running, "victim", stream) for stream in (False, True)]
            asking += [pool.submit(keep_asking, running, "other", stream) for stream in (False, True)]
            try:
                for kill in range(KILLS):
                    # The pauses between restarts grow.
                    assert eventually(lambda: victim(running, spared) is not None)
                    pid = victim(running, spared)
                    assert pid is not None
                    if kill % 2:
                        answered = outcomes["victim"]["answered"]
                        assert eventually(lambda: outcomes["victim"]["answered"] > answered)  # noqa: B023
                    os.kill(pid, signal.SIGKILL)
                    assert eventually(lambda: victim(running, spared) != pid)  # noqa: B023 (called at once)
            finally:
                ended.set()
            for task in asking:
                task.result()
        assert text_of(ask(client, CHAT, model="victim")) == "victim " * 5
    assert set(outcomes["other"]) == {"answered"}
    assert set(outcomes["victim"]) <= {"answered", "told 502", "told 503", "told in a frame"}
    assert outcomes["victim"]["answered"] > 0


def test_repeatedly_crashing_model_reports_reason_and_recovers_on_demand(tmp_path: Path) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "a": WORKER}}
    with serving(tmp_path, config) as running, talking(running) as client:
        for _ in range(3):
            refused(ask(client, CHAT, model="a", messages=DIE), 502, code="engine_died")
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "failed")
        shown = client.get("/admin/models").json()["data"][1]
        assert shown["failure"] == "its process died 3 times soon after its start (exit -9)"
        assert "model a: its process died 3 times" in running.log.read_text()
        assert not running.children()
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert client.get("/admin/models").json()["data"][1].get("failure") is None


def kill(running: Running) -> None:
    for pid in running.workers():
        os.kill(pid, signal.SIGKILL)


def seen(client: httpx.Client, name: str) -> set[str]:
    """The states of a model in all routes that report one."""
    listed = {entry["id"]: entry for entry in client.get("/admin/models").json()["data"]}[name]
    model = client.get(f"/v1/models/{name}").json()
    if listed["state"] == "loading":
        assert listed["loading_seconds"] >= 0
        assert model["loading_seconds"] >= 0
        assert listed.get("memory") is None
    line = next(line for line in client.get("/metrics").text.splitlines() if f'model_state{{model="{name}"' in line)
    told = line.partition('state="')[2].partition('"')[0]
    return {listed["state"], model["state"], client.get("/ready").json()["models"][name], told}


def test_restarting_model_is_loading_and_then_answers(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"models": {"a": {**WORKER, "hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").status_code == 503)
        assert seen(client, "a") == {"loading"}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client, CHAT, model="a")
            assert eventually(lambda: client.get("/admin/models").json()["data"][0]["waiting"] == 1)
            hold.unlink()
            assert text_of(waiting.result()) == "a " * 5
        assert seen(client, "a") == {"ready"}
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize(("workers", "patience"), [(1, 0.5), (2, 0)])
def test_restart_wait_is_limited_like_first_load(tmp_path: Path, workers: int, patience: float) -> None:
    hold = tmp_path / "hold"
    models = {
        "a": {**WORKER, "hold": str(hold), "slots": 1},
        "b": {**WORKER, "hold": str(hold), "fallback": "other"},
        "other": {"engine": "scripted", "replies": [{"output": "instead"}]},
    }
    config = {"models": models, "limits": {"load_seconds": patience}}
    with serving(tmp_path, config, "--workers", str(workers)) as running, talking(running) as client:
        for name in ("b", "other"):
            client.post(f"/admin/models/{name}/load")
        assert eventually(lambda: set(client.get("/ready").json()["models"].values()) == {"ready"})
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "loading")
        with ThreadPoolExecutor(3) as pool:
            for task in [pool.submit(ask, client, CHAT, model="a", stream=at == 1) for at in range(3)]:
                refused(task.result(), 503, code="model_loading")
                assert int(task.result().headers["retry-after"]) >= 1
        assert text_of(ask(client, CHAT, model="b")) == "instead"
        hold.unlink()
        assert eventually(lambda: client.get("/ready").status_code == 200)
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5


def test_restarting_model_can_be_unloaded(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"models": {"first": {"engine": "scripted"}, "a": {**WORKER, "hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        client.post("/admin/models/a/load").raise_for_status()
        hold.touch()
        kill(running)
        assert eventually(lambda: client.get("/ready").json()["models"]["a"] == "loading")
        unloaded = client.post("/admin/models/a/unload")
        assert (unloaded.status_code, unloaded.json()["state"]) == (200, "cold")
        assert not running.workers()

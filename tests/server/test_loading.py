"""Models that cannot be loaded, or take their time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.talking import CHAT, HELLO, ask, refused, talking, text_of
from tests.serving import free_port, serving

EXPLODING = {"engine": "tests.server.engines:Exploding"}
SLOW = {"engine": "tests.server.engines:SlowToLoad"}


def test_the_only_model_that_fails_ends_the_server(tmp_path: Path) -> None:
    config = tmp_path / "dragoman.yaml"
    config.write_text("models: {bad: {engine: 'tests.server.engines:Exploding'}}")
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config), "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "dragoman: no such device"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_several_that_fails_is_told_to_both_sides(tmp_path: Path, stream: bool) -> None:
    config = {"models": {"good": {"engine": "scripted"}, "bad": EXPLODING}}
    with serving(tmp_path, config) as running, talking(running) as client:
        message = refused(ask(client, CHAT, model="bad", stream=stream), 503, code="model_failed")
        assert "device" not in message
        assert text_of(ask(client, CHAT)) == "hello"
        assert client.get("/ready").json()["models"] == {"good": "ready", "bad": "failed"}
    assert "model bad: no such device" in running.log.read_text()


def test_what_must_be_decided_waits_for_the_model(tmp_path: Path) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "slow": SLOW}, "limits": {"keepalive_seconds": 0.2}}
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(tmp_path, config) as running, talking(running) as client:
        refused(ask(client, CHAT, model="slow", stream=True, tools=[tool]), 501, param="tools")
    with serving(tmp_path, config) as running, talking(running) as client:
        body = {"messages": HELLO, "model": "slow", "stream": True, "unheard": 1}
        with client.stream("POST", CHAT, json=body) as response:
            assert response.headers["x-dragoman-ignored"] == "unheard"
            assert "at last" in response.read().decode()

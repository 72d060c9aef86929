"""Models that fail to load, or load slowly."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tools.ports import free_port

from dragoman import create_app, serve
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.models import model_host
from tests.files.test_gguf import gguf, pair, text
from tests.support.engines import Nameless, NeverStops, SlowToLoad
from tests.support.requests import CHAT, HELLO, ask, eventually, refused, talking, text_of
from tests.support.server_process import serving

EXPLODING = {"engine": "tests.support.engines:Exploding"}
SLOW = {"engine": "tests.support.engines:SlowToLoad"}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_failure_of_only_model_stops_server(tmp_path: Path, workers: str) -> None:
    config = tmp_path / "dragoman.yaml"
    # The error must not take that long.
    config.write_text("{models: {bad: {engine: 'tests.support.engines:Exploding'}}, drain_seconds: 60}")
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config), "--port", str(free_port())]
    done = subprocess.run([*command, "--workers", workers], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "dragoman: no such device"
    assert "new requests are taken" not in done.stderr
    # The author of the engine needs the traceback.
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count('raise RuntimeError("no such device")') == 1


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=len)
def test_only_failure_of_only_directory_model_stops_server(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / f"{name}.gguf").write_bytes(gguf(pair("general.architecture", 8, text("llama"))))

    port, log = free_port(), tmp_path / "server.log"
    command = [sys.executable, "-m", "dragoman", "serve", "--models-dir", str(tmp_path), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        assert eventually(lambda: "model a: not loaded: " in log.read_text())
        if len(names) == 1:
            assert process.wait(60) == 2
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=60).status_code == 200
        assert "serving the models folder on http" in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stream", [False, True])
def test_failure_of_one_model_is_reported_to_client_and_log(tmp_path: Path, stream: bool) -> None:
    config = {"models": {"good": {"engine": "scripted"}, "bad": EXPLODING}}
    with serving(tmp_path, config) as running, talking(running) as client:
        message = refused(ask(client, CHAT, model="bad", stream=stream), 503, code="model_failed")
        assert "device" not in message
        assert text_of(ask(client, CHAT)) == "hello"
        assert client.get("/ready").json()["models"] == {"good": "ready", "bad": "failed"}
    assert "model bad: no such device" in running.log.read_text()


def test_feature_checks_wait_for_loading(tmp_path: Path) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "slow": SLOW}, "limits": {"keepalive_seconds": 0.2}}
    tool = {"type": "function", "function": {"name": "f"}}
    with serving(tmp_path, config) as running, talking(running) as client:
        refused(ask(client, CHAT, model="slow", stream=True, tools=[tool]), 501, param="tools")
    with serving(tmp_path, config) as running, talking(running) as client:
        body = {"messages": HELLO, "model": "slow", "stream": True, "unheard": 1}
        with client.stream("POST", CHAT, json=body) as response:
            assert response.headers["x-dragoman-ignored"] == "unheard"
            assert "at last" in response.read().decode()


def test_engine_that_does_not_stop_does_not_block_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "STOP_SECONDS", 0.1)

    async def scenario() -> None:
        app = create_app(NeverStops())
        await app.catalog.resolve("").host.ready()
        async with asyncio.timeout(60):
            await app.stop()

    asyncio.run(scenario())


def test_ready_loads_the_model_of_a_mounted_app() -> None:
    async def scenario() -> list[int]:
        transport = httpx.ASGITransport(app=create_app(SlowToLoad()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            codes = [(await client.get("/ready")).status_code]
            async with asyncio.timeout(60):
                while codes[-1] != 200:
                    await asyncio.sleep(0.05)
                    codes.append((await client.get("/ready")).status_code)
            return codes

    assert set(asyncio.run(scenario())) == {503, 200}


def test_serve_on_public_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAGOMAN_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="no API key is set"):
        serve(NeverStops(), host="0.0.0.0", port=free_port())


def test_serve_uses_key_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Settings] = []
    monkeypatch.setenv("DRAGOMAN_API_KEY", "secret")
    monkeypatch.setattr("dragoman.server.serve.run", lambda settings, engines: given.append(settings))
    serve(NeverStops(), host="0.0.0.0", port=1)
    assert (given[0].api_keys, given[0].host, given[0].port) == (("secret",), "0.0.0.0", 1)


def test_port_in_use_is_reported_before_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            serve(NeverStops(), port=taken.getsockname()[1])


def test_engine_without_models_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="offers no models"):
        create_app(Nameless())


def test_unreachable_source_does_not_affect_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    config = {"models": {"a": {"engine": "scripted"}, "net": f"http://127.0.0.1:{free_port()}/x.gguf"}}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert "model net will be downloaded on its first request" in running.log.read_text()
        assert text_of(ask(client, CHAT, model="a")) == "hello"
        refused(ask(client, CHAT, model="net"), 503, code="model_failed")
        assert ":1: models.net: http://127.0.0.1" in running.log.read_text()
        assert text_of(ask(client, CHAT, model="a")) == "hello"


def test_download_does_not_block_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.gguf"
        config = {
            "models": {"a": {"engine": "scripted"}, "net": url},
            "limits": {"load_seconds": 0.1},
            "grace_seconds": 1,
        }
        with serving(tmp_path, config) as running, talking(running) as client:
            refused(ask(client, CHAT, model="net"), 503, code="model_loading")
            assert running.stop() == 0


def test_unreachable_default_model_stops_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    config = {"models": {"a": {"engine": "scripted"}, "net": f"http://127.0.0.1:{free_port()}/x.gguf"}}
    with (
        pytest.raises(AssertionError, match=r"the server ended:[\s\S]*model net: http"),
        serving(tmp_path, config, "--default", "net"),
    ):
        pass

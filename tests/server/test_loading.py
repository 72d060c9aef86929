"""Models that fail to load, or load slowly, and hostile files in a models folder."""

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tools.ports import free_port

from dragoman import create_app, serve
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.files.gguf import read_outline
from dragoman.models import engine_loader
from tests.support.engines import NeverStops, SlowToLoad
from tests.support.gguf_files import gguf, header, pair, sparse, tensor, text, with_tensors
from tests.support.requests import CHAT, ask, eventually, in_process, refused, talking, text_of
from tests.support.server_process import Running, Serving

SLOW = {"engine": "tests.support.engines:SlowToLoad"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    models = {
        "good": {"engine": "scripted"},
        "bad": {"engine": "tests.support.engines:Exploding"},
        "slow": SLOW,
        "slow-too": SLOW,
        "net": f"http://127.0.0.1:{free_port()}/x.gguf",
    }
    folder = tmp_path_factory.mktemp("loading")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAGOMAN_HOME", str(folder / "home"))
        with serving(folder, {"models": models, "limits": {"keepalive_seconds": 0.2}}) as running:
            yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made
        assert text_of(ask(made, CHAT)) == "hello"


def test_feature_checks_wait_for_loading(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    refused(ask(client, CHAT, model="slow", stream=True, tools=[tool]), 501, param="tools")
    response = ask(client, CHAT, model="slow-too", stream=True, unheard=1)
    assert response.headers["x-dragoman-ignored"] == "unheard"
    assert "at last" in response.text


def test_unreachable_source_does_not_affect_other_models(server: Running, client: httpx.Client) -> None:
    assert "model net will be downloaded on its first request" in server.log.read_text()
    refused(ask(client, CHAT, model="net"), 503, code="model_failed")
    assert ":1: models.net: http://127.0.0.1" in server.log.read_text()


def test_download_does_not_block_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        models = {"a": {"engine": "scripted"}, "net": f"http://127.0.0.1:{silent.getsockname()[1]}/x.gguf"}
        config = {"models": models, "limits": {"load_seconds": 0.1}, "grace_seconds": 1}
        with serving(tmp_path, config) as running, talking(running) as client:
            refused(ask(client, CHAT, model="net"), 503, code="model_loading")
            assert running.stop() == 0


def test_unreachable_default_model_stops_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    config = {"models": {"a": {"engine": "scripted"}, "net": f"http://127.0.0.1:{free_port()}/x.gguf"}}
    with (
        pytest.raises(RuntimeError, match=r"the server exited with 2:[\s\S]*model net: http"),
        serving(tmp_path, config, "--default", "net"),
    ):
        pass


def test_failure_of_only_model_stops_server(tmp_path: Path, workers: int) -> None:
    config = tmp_path / "dragoman.yaml"
    # The error must not take that long.
    config.write_text("{models: {bad: {engine: 'tests.support.engines:Exploding'}}, drain_seconds: 60}")
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config), "--port", str(free_port())]
    command += ["--workers", str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "dragoman: no such device"
    assert "new requests are taken" not in done.stderr
    # The author of the engine needs the traceback.
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count('raise RuntimeError("no such device")') == 1


@contextmanager
def serve_folder(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Path, str]]:
    """A server of the models in a folder, which need not become ready: its process, its log and its address."""
    port, log = free_port(), folder / "server.log"
    command = [sys.executable, "-m", "dragoman", "serve", "--models-dir", str(folder), "--port", str(port), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process, log, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=len)
def test_only_failure_of_only_directory_model_stops_server(
    tmp_path: Path, names: tuple[str, ...], workers: int
) -> None:
    for name in names:
        (tmp_path / f"{name}.gguf").write_bytes(gguf(pair("general.architecture", 8, text("llama"))))
    with serve_folder(tmp_path, "--workers", str(workers)) as (process, log, url):
        assert eventually(lambda: "model a: not loaded: " in log.read_text())
        if len(names) == 1:
            assert process.wait(60) == 2
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            assert httpx.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
            assert "serving the models folder on http" in log.read_text()


def test_damaged_files_in_a_models_folder_are_reported_once_before_serving(tmp_path: Path, serving: Serving) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    content = with_tensors(tensor("a", 64))
    (folder / "whole.gguf").write_bytes(content)
    (folder / "cut.gguf").write_bytes(content[:-10])
    (folder / "configured.gguf").write_bytes(content[:-20])
    (folder / "head.gguf").write_bytes(content[:50])
    models = {"echo": {"engine": "scripted"}, "configured": str(folder / "configured.gguf")}
    with serving(tmp_path, {"models": models, "models_dir": str(folder)}) as running, talking(running) as client:
        for _ in range(2):
            listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
            assert listed == ["echo", "configured", "whole"]
            refused(ask(client, CHAT, model="cut"), 404, param="model", code="model_not_found")
        log = running.log.read_text()
        before, _, _ = log.partition("serving echo, configured on http")
        for name, size in {"cut": len(content) - 10, "configured": len(content) - 20, "head": 50}.items():
            message = f"{name}.gguf is not a GGUF file: it is cut off: it has {size} bytes, and its "
            assert (before.count(message), log.count(message)) == (1, 1)


def test_damaged_default_of_a_models_folder_is_named_in_the_log(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "cut.gguf").write_bytes(with_tensors(tensor("a", 64))[:-10])
    (folder / "whole.gguf").write_bytes(with_tensors(tensor("a", 64)))
    with serve_folder(folder, "--default", "cut", "--workers", str(workers)) as (_, log, url):
        message = "model 'cut' is not served here; models: whole (aliases: none). Start with --alias 'cut=whole'"
        assert eventually(lambda: f"the default model is missing: {message}" in log.read_text())
        response = httpx.post(f"{url}{CHAT}", json={"messages": [{"role": "user", "content": "x"}]}, trust_env=False)
        assert refused(response, 404, param="model", code="model_not_found").startswith(message)
        assert log.read_text().count("cut.gguf is not a GGUF file") == 1


async def test_engine_that_does_not_stop_does_not_block_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loader, "STOP_SECONDS", 0.1)
    app = create_app(NeverStops())
    await app.catalog.resolve("").host.ready()
    async with asyncio.timeout(60):
        await app.stop()


async def test_ready_loads_the_model_of_a_mounted_app() -> None:
    async with in_process(create_app(SlowToLoad())) as client, asyncio.timeout(60):
        assert (await client.get("/ready")).status_code == 503
        while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 (another task loads it)
            await asyncio.sleep(0.05)


def test_serve_on_public_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAGOMAN_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="no API key is set"):
        serve(NeverStops(), host="0.0.0.0", port=free_port())


def test_serve_uses_key_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Settings] = []
    monkeypatch.setenv("DRAGOMAN_API_KEY", "secret")
    monkeypatch.setattr("dragoman.server.serve.run", lambda settings, engines, **rest: given.append(settings))
    serve(NeverStops(), host="0.0.0.0", port=1)
    assert (given[0].api_keys, given[0].host, given[0].port) == (("secret",), "0.0.0.0", 1)


def test_port_in_use_is_reported_before_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="is in use"):
            serve(NeverStops(), port=taken.getsockname()[1])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def with_template(original: Path, target: Path, template: str) -> None:
    """Copy a model and replace its chat template by a shorter one."""
    shutil.copyfile(original, target)
    place = read_outline(original).places["tokenizer.chat_template"]
    with target.open("r+b") as file:
        file.seek(place)
        (length,) = struct.unpack("<Q", file.read(8))
        file.write(template.encode().ljust(length))


def test_endless_template_fails_only_its_own_model(tmp_path: Path, smollm2_path: Path, serving: Serving) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    with_template(smollm2_path, folder / "endless.gguf", ENDLESS)
    sparse(folder / "sparse.gguf", header(1 << 40))
    os.mkfifo(folder / "pipe.gguf")
    (folder / "again").symlink_to(folder)
    config = {
        "models": {"echo": {"engine": "scripted"}},
        "models_dir": str(folder),
        "layout": "as-is",
        "limits": {"load_seconds": 120},
    }
    with serving(tmp_path, config) as running, talking(running) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert listed == ["echo", "endless"]
        reply = client.post(
            CHAT, json={"model": "endless", "messages": [{"role": "user", "content": "x"}]}, timeout=120
        )
        refused(reply, 503, code="model_failed")
        assert text_of(ask(client, CHAT, model="echo")) == "hello"
        told = {model["id"]: model for model in client.get("/admin/models").json()["data"]}
        assert told["endless"]["state"] == "failed"
        assert "the chat template exceeds a limit" in told["endless"]["failure"]
        assert running.workers() == []

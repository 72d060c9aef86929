"""Loading and unloading of models: single flight, keep-alive, memory budget, admin routes, names."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import create_app
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER
from tests.support.engines import Sampled
from tests.support.requests import CHAT, HELLO, ask, eventually, in_process, refused, talking, text_of
from tests.support.server_process import Running, Serving

LIGHT = {"engine": "tests.support.engines:Weighty"}
SLOW = LIGHT | {"words": 60, "pace": 0.05}
HEAVY = LIGHT | {"mebibytes": 200}
FIRST = {"engine": "scripted"}
"""The default model is loaded when the server starts: this one costs nothing."""


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model does not load while the file with its name is in this folder."""
    return tmp_path_factory.mktemp("hold")


@pytest.fixture(scope="module")
def server(hold: Path, serving: Serving) -> Iterator[Running]:
    config = {
        "models": {
            "first": FIRST,
            "shared": LIGHT | {"hold": str(hold / "shared")},
            "org/a": SLOW,
            "broken": {"engine": "tests.support.engines:Exploding"},
            "endless": LIGHT | {"hold": str(hold / "endless")},
            "again": SLOW | {"hold": str(hold / "again")},
            "sampled": {"engine": "tests.support.engines:Sampled", "sampling": {"temperature": 0.5, "max_tokens": 9}},
            "short": FIRST | {"sampling": {"max_tokens": 1}, "chunk": 2},
        },
        "aliases": {"my-alias": "first", "gpt-*": "short"},
    }
    with serving(hold, config) as running:
        yield running


def loads(running: Running, name: str) -> int:
    return running.log.read_text().count(f"model {name}: loading")


def info(client: httpx.Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {model["id"]: model for model in client.get("/admin/models").json()["data"]}[name]
    return found


def state(client: httpx.Client, name: str) -> str:
    found: str = info(client, name)["state"]
    return found


def asked(running: Running, model: str, **fields: Any) -> httpx.Response:
    with talking(running) as client:
        return ask(client, CHAT, model=model, **fields)


def post(running: Running, path: str) -> httpx.Response:
    with talking(running) as client:
        return client.post(path)


def test_ten_simultaneous_first_requests_load_once_and_its_progress_is_shown(
    server: Running, client: httpx.Client, hold: Path
) -> None:
    (hold / "shared").touch()
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(asked, server, "Shared ") for _ in range(10)]

        def progress() -> dict[str, Any]:
            shown: dict[str, Any] = client.get("/v1/models/shared").json()
            return shown

        assert eventually(lambda: progress().get("loading_progress", 0) > 0)
        shown = progress()
        assert (shown["state"], shown["loading_seconds"] > 0) == ("loading", True)
        (hold / "shared").unlink()
        for answer in answers:
            assert text_of(answer.result()) == "shared " * 5
            assert answer.result().json()["model"] == "shared"
    assert loads(server, "shared") == 1
    assert "model shared: ready after" in server.log.read_text()


def test_admin_load_and_unload(server: Running, client: httpx.Client) -> None:
    before = set(server.workers())
    loaded = client.post("/admin/models/org/a/load").json()
    assert (loaded["id"], loaded["state"], loads(server, "org/a")) == ("org/a", "ready", 1)
    assert client.post("/admin/models/ORG%2Fa/load").status_code == 200
    with client.stream("POST", CHAT, json={"messages": HELLO, "model": "org/a", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        unloading = threading.Thread(target=lambda: post(server, "/admin/models/org/a/unload"))
        unloading.start()
        time.sleep(0.2)
        assert state(client, "org/a") == "ready"
        rest = "\n".join(lines)
    assert rest.rstrip().endswith("[DONE]")
    unloading.join()
    assert state(client, "org/a") == "cold"
    assert eventually(lambda: set(server.workers()) == before)
    refused(client.post("/admin/models/unknown/load"), 404, param="model", code="model_not_found")
    refused(client.post("/admin/models/first/dance"), 404)
    refused(client.post("/admin/models/load"), 404)
    refused(client.post("/admin/models/first/unload", headers={"origin": "http://evil.example"}), 415)


def test_failed_model_is_retried_by_admin_load_but_not_by_requests(server: Running, client: httpx.Client) -> None:
    assert "no such device" in refused(client.post("/admin/models/broken/load"), 503, code="model_failed")
    failed = info(client, "broken")
    assert (failed["state"], failed["failure"]) == ("failed", "no such device")
    told = ask(client, CHAT, model="broken")
    refused(told, 503, code="model_failed")
    assert (1 <= int(told.headers["retry-after"]) <= 5, loads(server, "broken")) == (True, 1)
    refused(client.post("/admin/models/broken/load"), 503, code="model_failed")
    assert loads(server, "broken") == 2


def test_unload_aborts_endless_load(server: Running, client: httpx.Client, hold: Path) -> None:
    (hold / "endless").touch()
    before = set(server.workers())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked, server, "endless")
        assert eventually(lambda: state(client, "endless") == "loading" and set(server.workers()) > before)
        told = client.post("/admin/models/endless/unload")
        assert (told.status_code, told.json()["state"]) == (200, "cold")
        assert set(server.workers()) == before
        assert "was unloaded while it was being loaded" in refused(waiting.result(), 503)
    assert text_of(asked(server, "first"))
    assert "failure" not in info(client, "endless")


def test_unload_of_model_that_is_reloaded_immediately(server: Running, client: httpx.Client, hold: Path) -> None:
    client.post("/admin/models/again/load")
    (hold / "again").touch()
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(asked, server, "again")]
        assert eventually(lambda: info(client, "again")["running"] == 1)
        unloading = pool.submit(post, server, "/admin/models/again/unload")
        time.sleep(0.5)
        answers.append(pool.submit(asked, server, "again"))
        told = unloading.result()
        assert (told.status_code, told.json()["state"]) == (200, "loading")
        (hold / "again").unlink()
        assert all(answer.result().status_code == 200 for answer in answers)
    assert loads(server, "again") == 2


def test_configured_defaults_fill_unset_parameters(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="sampled")) == "0.5 None 9"
    assert text_of(ask(client, CHAT, model="sampled", temperature=0, top_p=0.1, max_tokens=5)) == "0.0 0.1 5"
    assert text_of(ask(client, CHAT, model="short")) == "he"
    assert text_of(ask(client, CHAT, model="short", max_tokens=2)) == "hell"


def test_names_aliases_and_suggestions(client: httpx.Client) -> None:
    for asked_name, name in (("", "first"), (" Sampled:latest ", "sampled"), ("my-alias", "first"), ("gpt-4", "short")):
        assert ask(client, CHAT, model=asked_name).json()["model"] == name
    message = refused(ask(client, CHAT, model="samplde"), 404, param="model", code="model_not_found")
    assert "did you mean sampled? models: first, shared, " in message
    assert "did you mean my-alias?" in refused(ask(client, CHAT, model="my-alais"), 404, param="model")
    assert "did you mean" not in refused(ask(client, CHAT, model="claude-3"), 404, param="model")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measured memory is not shared between tests."""
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_idle_model_is_unloaded_and_frees_memory(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"first": FIRST, "a": LIGHT | {"keep_alive": "1s"}, "b": LIGHT}, "keep_alive": 0}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="b")) == "b " * 5
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert state(client, "a") == "ready"
        assert eventually(lambda: state(client, "a") == state(client, "b") == "cold")
        assert eventually(lambda: not running.workers())
        # An unloaded model still counts as ready.
        assert client.get("/ready").status_code == 200
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert loads(running, "a") == 2


def test_least_recently_used_model_is_evicted(tmp_path: Path, home: Path, serving: Serving) -> None:
    config = {"models": {"first": FIRST, "a": HEAVY, "b": HEAVY, "c": HEAVY, "d": HEAVY | {"mebibytes": 900}}}
    with serving(tmp_path, config | {"memory": "600MiB", "turn_seconds": 0.5}) as running, talking(running) as client:
        for name in "abac":
            assert text_of(ask(client, CHAT, model=name)) == f"{name} " * 5
            time.sleep(0.2)
        states = {model["id"]: model["state"] for model in client.get("/admin/models").json()["data"]}
        assert states == {"first": "ready", "a": "ready", "b": "cold", "c": "ready", "d": "cold"}
        assert len(running.workers()) == 2
        fleet = client.get("/admin/models").json()
        assert 400 * 2**20 < fleet["used"] < fleet["memory"] == 600 * 2**20
        a = fleet["data"][1]
        assert (a["slots"], a["running"], a["waiting"]) == (4, 0, 0)
        assert a["tokens_per_second"] > 1
        assert 200 * 2**20 < a["memory"] < 350 * 2**20
        # The memory need is known after the first load.
        assert "log" in refused(ask(client, CHAT, model="d"), 503, code="model_failed")
        assert eventually(lambda: state(client, "d") == "failed")
        assert "it needs 9" in running.log.read_text()
        begun = loads(running, "d")
        refused(ask(client, CHAT, model="d"), 503, code="model_failed")
        assert loads(running, "d") == begun
    assert min(json.loads((home / "memory.json").read_text()).values()) > 200 * 2**20


def test_model_from_directory_is_served(tmp_path: Path, smollm2_path: Path, serving: Serving) -> None:
    config = {
        "models": {"first": FIRST},
        "models_dir": [str(smollm2_path.parent)],
        "layout": "as-is",
        "aliases": {"gpt-*": smollm2_path.stem},
    }
    with serving(tmp_path, config) as running, talking(running) as client:
        listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
        shown = listed[smollm2_path.stem]
        assert (shown["architecture"], shown["quantization"], shown["state"]) == ("llama", "Q4_1", "cold")
        assert shown["size"] == smollm2_path.stat().st_size
        client.timeout = 90
        reply = ask(client, CHAT, model=f"  {smollm2_path.stem.upper()}", max_tokens=4)
        assert reply.json()["model"] == smollm2_path.stem
        assert ask(client, CHAT, model="gpt-4o", max_tokens=4).json()["model"] == smollm2_path.stem
        assert loads(running, smollm2_path.stem) == 1
        for name in (f"../models/{smollm2_path.name}", str(smollm2_path), smollm2_path.name, "a\0b", "x" * 10**6):
            refused(ask(client, CHAT, model=name), 404, param="model", code="model_not_found")


async def test_reload_without_configuration_is_a_501() -> None:
    app = create_app(Sampled())
    async with in_process(app, headers={ADMIN_TOKEN_HEADER: app.admin_token}) as client:
        refused(await client.post("/admin/reload"), 501)

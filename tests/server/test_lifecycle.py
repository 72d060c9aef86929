"""Loading and unloading of models: single flight, keep-alive, memory budget, admin routes."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import create_app
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER
from dragoman.storage.keys import KeyStore
from tests.support.engines import Sampled
from tests.support.requests import CHAT, HELLO, ask, eventually, frames, refused, talking, text_of
from tests.support.server_process import Running, serving

HEAVY = {"engine": "tests.support.engines:Weighty", "mebibytes": 200}
LIGHT = {"engine": "tests.support.engines:Weighty"}
FIRST = {"engine": "scripted"}
"""The default model is loaded when the server starts: this one costs nothing."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measured memory is not shared between tests."""
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def loads(running: Running, name: str) -> int:
    return running.log.read_text().count(f"model {name}: loading")


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in client.get("/admin/models").json()["data"]}


@contextmanager
def many(running: Running, count: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(count) as pool:
        yield pool


def asked(running: Running, model: str, **fields: Any) -> httpx.Response:
    with talking(running) as client:
        return ask(client, CHAT, model=model, **fields)


def test_ten_simultaneous_first_requests_load_once_and_its_progress_is_shown(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    config = {"models": {"first": FIRST, "a": LIGHT | {"hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client, many(running, 10) as pool:
        answers = [pool.submit(asked, running, "A ") for _ in range(10)]

        def progress() -> dict[str, Any]:
            shown: dict[str, Any] = client.get("/v1/models/a").json()
            return shown

        assert eventually(lambda: progress().get("loading_progress", 0) > 0)
        shown = progress()
        assert (shown["state"], shown["loading_seconds"] > 0) == ("loading", True)
        hold.unlink()
        for answer in answers:
            assert text_of(answer.result()) == "a " * 5
            assert answer.result().json()["model"] == "a"
        assert loads(running, "a") == 1
        assert "model a: ready after" in running.log.read_text()


def test_idle_model_is_unloaded_and_frees_memory(tmp_path: Path) -> None:
    config = {"models": {"first": FIRST, "a": LIGHT | {"keep_alive": "2s"}, "b": LIGHT}, "keep_alive": 0}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert text_of(ask(client, CHAT, model="b")) == "b " * 5
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert states(client)["a"] == "ready"
        assert eventually(lambda: states(client)["a"] == states(client)["b"] == "cold")
        assert eventually(lambda: not running.children())
        # An unloaded model still counts as ready.
        assert client.get("/ready").status_code == 200
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert loads(running, "a") == 2


def test_least_recently_used_model_is_evicted(tmp_path: Path, home: Path) -> None:
    config = {"models": {"first": FIRST, "a": HEAVY, "b": HEAVY, "c": HEAVY, "d": HEAVY | {"mebibytes": 900}}}
    with serving(tmp_path, config | {"memory": "600MiB", "turn_seconds": 0.5}) as running, talking(running) as client:
        for name in "abac":
            assert text_of(ask(client, CHAT, model=name)) == f"{name} " * 5
            time.sleep(0.2)
        assert states(client) == {"first": "ready", "a": "ready", "b": "cold", "c": "ready", "d": "cold"}
        assert len(running.children()) == 2
        fleet = client.get("/admin/models").json()
        assert 400 * 2**20 < fleet["used"] < fleet["memory"] == 600 * 2**20
        a = fleet["data"][1]
        assert (a["slots"], a["running"], a["waiting"]) == (4, 0, 0)
        assert a["tokens_per_second"] > 1
        assert 200 * 2**20 < a["memory"] < 350 * 2**20
        # The memory need is known after the first load.
        message = refused(ask(client, CHAT, model="d"), 503, code="model_failed")
        assert "log" in message
        assert eventually(lambda: states(client)["d"] == "failed")
        assert "it needs 9" in running.log.read_text()
        begun = loads(running, "d")
        refused(ask(client, CHAT, model="d"), 503, code="model_failed")
        assert loads(running, "d") == begun
    assert min(json.loads((home / "memory.json").read_text()).values()) > 200 * 2**20


def test_models_that_do_not_fit_together_alternate(tmp_path: Path) -> None:
    config = {"models": {"first": FIRST, "a": HEAVY | {"pace": 0.02}, "b": HEAVY | {"pace": 0.02}}}
    turn_seconds = 1.5
    begun = time.monotonic()
    counts = {"a": 0, "b": 0}

    def loaded(running: Running) -> int:
        return loads(running, "a") + loads(running, "b")

    def keep_asking(running: Running, name: str) -> None:
        with talking(running) as client:
            while loaded(running) < 4 or min(counts.values()) <= 10:
                assert text_of(ask(client, CHAT, model=name)) == f"{name} " * 5
                counts[name] += 1

    within = config | {"memory": "400MiB", "turn_seconds": turn_seconds}
    with serving(tmp_path, within) as running, many(running, 4) as pool:
        for asking in [pool.submit(keep_asking, running, name) for name in "abab"]:
            asking.result()
        assert loaded(running) <= 3 + (time.monotonic() - begun) / turn_seconds


def test_requests_can_fail_fast_while_loading(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    config = {"models": {"first": FIRST, "a": LIGHT | {"hold": str(hold)}}, "limits": {"load_seconds": 0}}
    with serving(tmp_path, config) as running, talking(running) as client:
        for stream in (False, True):
            told = ask(client, CHAT, model="a", stream=stream)
            refused(told, 503, code="model_loading")
            assert int(told.headers["retry-after"]) >= 1
        hold.unlink()
        assert eventually(lambda: states(client)["a"] == "ready")
        assert text_of(ask(client, CHAT, model="a")) == "a " * 5
        assert loads(running, "a") == 1


def test_admin_load_and_unload(tmp_path: Path) -> None:
    slow = LIGHT | {"words": 60, "pace": 0.05}
    broken = {"engine": "tests.support.engines:Exploding"}
    config = {"models": {"first": FIRST, "org/a": slow, "broken": broken}}
    with serving(tmp_path, config) as running, talking(running) as client:
        loaded = client.post("/admin/models/org/a/load").json()
        assert (loaded["id"], loaded["state"], loads(running, "org/a")) == ("org/a", "ready", 1)
        assert client.post("/admin/models/ORG%2Fa/load").status_code == 200
        with client.stream("POST", CHAT, json={"messages": HELLO, "model": "org/a", "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            unloading = threading.Thread(target=lambda: talking_post(running, "/admin/models/org/a/unload"))
            unloading.start()
            time.sleep(0.2)
            assert states(client)["org/a"] == "ready"
            rest = "\n".join(lines)
        assert rest.rstrip().endswith("[DONE]")
        unloading.join()
        assert states(client)["org/a"] == "cold"
        assert eventually(lambda: not running.children())
        assert "no such device" in refused(client.post("/admin/models/broken/load"), 503, code="model_failed")
        failed = client.get("/admin/models").json()["data"][2]
        assert (failed["state"], failed["failure"]) == ("failed", "no such device")
        # Requests wait before a retry; an admin load retries immediately.
        told = ask(client, CHAT, model="broken")
        refused(told, 503, code="model_failed")
        assert (1 <= int(told.headers["retry-after"]) <= 5, loads(running, "broken")) == (True, 1)
        refused(client.post("/admin/models/broken/load"), 503, code="model_failed")
        assert loads(running, "broken") == 2
        refused(client.post("/admin/models/unknown/load"), 404, param="model", code="model_not_found")
        refused(client.post("/admin/models/first/dance"), 404)
        refused(client.post("/admin/models/load"), 404)
        refused(client.post("/admin/models/first/unload", headers={"origin": "http://evil.example"}), 415)


def test_unload_aborts_endless_load(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    config = {"models": {"first": FIRST, "a": LIGHT | {"hold": str(hold)}}, "limits": {"load_seconds": 600}}
    with serving(tmp_path, config) as running, talking(running) as client, many(running, 1) as pool:
        before = set(running.workers())
        waiting = pool.submit(asked, running, "a")
        assert eventually(lambda: states(client)["a"] == "loading" and set(running.workers()) > before)
        told = client.post("/admin/models/a/unload")
        assert (told.status_code, told.json()["state"]) == (200, "cold")
        assert set(running.workers()) == before
        assert "was unloaded while it was being loaded" in refused(waiting.result(), 503)
        assert text_of(asked(running, "first"))
        assert "failure" not in client.get("/admin/models").json()["data"][1]


def test_unload_of_model_that_is_reloaded_immediately(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    config = {"models": {"first": FIRST, "a": LIGHT | {"words": 60, "pace": 0.05, "hold": str(hold)}}}
    with serving(tmp_path, config) as running, talking(running) as client, many(running, 3) as pool:
        client.post("/admin/models/a/load")
        hold.touch()
        answers = [pool.submit(asked, running, "a")]
        assert eventually(lambda: client.get("/admin/models").json()["data"][1]["running"] == 1)
        unloading = pool.submit(talking_post, running, "/admin/models/a/unload")
        time.sleep(0.5)
        answers.append(pool.submit(asked, running, "a"))
        told = unloading.result()
        assert (told.status_code, told.json()["state"]) == (200, "loading")
        hold.unlink()
        assert all(answer.result().status_code == 200 for answer in answers)
        assert loads(running, "a") == 2


def talking_post(running: Running, path: str) -> httpx.Response:
    with talking(running) as client:
        return client.post(path)


def test_admin_routes_need_a_key_if_keys_exist(tmp_path: Path) -> None:
    with serving(tmp_path, {"models": {"first": FIRST}, "api_keys": ["secret"]}) as running:
        with talking(running) as client:
            refused(client.get("/admin/models"), 401)
            refused(client.post("/admin/reload"), 401)
        with talking(running, {"x-api-key": "secret"}) as client:
            assert client.get("/admin/models").status_code == 200


def test_configured_defaults_fill_unset_parameters(tmp_path: Path) -> None:
    sampled = {"engine": "tests.support.engines:Sampled", "sampling": {"temperature": 0.5, "max_tokens": 9}}
    config = {"models": {"sampled": sampled, "short": FIRST | {"sampling": {"max_tokens": 1}, "chunk": 2}}}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert text_of(ask(client, CHAT)) == "0.5 None 9"
        assert text_of(ask(client, CHAT, temperature=0, top_p=0.1, max_tokens=5)) == "0.0 0.1 5"
        assert text_of(ask(client, CHAT, model="short")) == "he"
        assert text_of(ask(client, CHAT, model="short", max_tokens=2)) == "hell"


def test_similar_names_are_suggested(tmp_path: Path) -> None:
    config = {"models": {"smollm2": FIRST, "rehearsal": FIRST}, "aliases": {"my-alias": "smollm2"}}
    with serving(tmp_path, config) as running, talking(running) as client:
        message = refused(ask(client, CHAT, model="smolm2"), 404, param="model", code="model_not_found")
        assert "did you mean smollm2? models: smollm2, rehearsal" in message
        assert "did you mean my-alias?" in refused(ask(client, CHAT, model="my-alais"), 404, param="model")
        assert "did you mean" not in refused(ask(client, CHAT, model="gpt-4o"), 404, param="model")
        assert ask(client, CHAT, model=" SmolLM2:latest ").json()["model"] == "smollm2"


def test_model_from_directory_is_served(tmp_path: Path, smollm2_path: Path) -> None:
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


def test_two_copies_of_smollm2_with_memory_for_one(tmp_path: Path, home: Path, smollm2_path: Path) -> None:
    one = {"path": str(smollm2_path), "context": 512, "slots": 2, "layout": "as-is"}
    config = {"models": {"first": FIRST, "one": one, "two": one | {"slots": 1}}, "memory": "350MiB", "turn_seconds": 1}
    with serving(tmp_path, config) as running, talking(running) as client:
        for name in ("one", "two", "one"):
            reply = ask(client, CHAT, model=name, max_tokens=4, temperature=0)
            assert reply.json()["model"] == name
            assert len(running.children()) == 1
        with client.stream(
            "POST", CHAT, json={"messages": HELLO, "model": "two", "stream": True, "max_tokens": 3}
        ) as it:
            told = frames(it.read().decode())
        assert told[-1] == "[DONE]"
        assert (loads(running, "one"), loads(running, "two")) == (2, 2)
        used = client.get("/admin/models").json()["used"]
    # At least the file and the state: the measured need, not the estimate.
    assert smollm2_path.stat().st_size < used < 350 * 2**20
    assert len(json.loads((home / "memory.json").read_text())) == 2


def test_admin_routes_need_admin_scope(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.db")
    plain, _ = store.create("anna")
    operator, _ = store.create("ops", routes=["admin"], models=["f*"])
    config = {"models": {"first": FIRST, "second": FIRST}, "keys": {"store": "keys.db", "anonymous": True}}
    with serving(tmp_path, config) as running:
        for headers in ({}, {"x-api-key": plain}):
            with talking(running, headers) as client:
                refused(client.get("/admin/models"), 403, code="insufficient_permissions")
                refused(client.post("/admin/reload"), 403, code="insufficient_permissions")
        with talking(running, {"x-api-key": operator}) as client:
            assert [model["id"] for model in client.get("/admin/models").json()["data"]] == ["first"]
            assert client.post("/admin/models/first/unload").status_code == 200
            refused(client.post("/admin/models/second/load"), 403, param="model", code="insufficient_permissions")
            assert client.post("/admin/reload").status_code == 200


def test_reload_without_configuration_is_a_501() -> None:
    async def scenario() -> httpx.Response:
        app = create_app(Sampled())
        transport, headers = httpx.ASGITransport(app), {ADMIN_TOKEN_HEADER: app.admin_token}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return await client.post("/admin/reload")

    refused(asyncio.run(scenario()), 501)

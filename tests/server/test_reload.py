"""Reloading the configuration under load."""

import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.config.loading import default_address
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.server.routes import build_app
from dragoman.storage.database import Database
from tests.support.requests import CHAT, HELLO, ask, eventually, recorded, refused, talking, text_of
from tests.support.server_process import Running, Serving, server_fixture

SCRIPTED = {"engine": "scripted"}
WORKER = {"engine": "tests.support.engines:Weighty"}
NOT_RELOADED = "configuration not reloaded: "


server = server_fixture({"models": {"first": SCRIPTED}})
"""A server for tests that begin with a configuration of their own."""


def write(running: Running, config: dict[str, Any]) -> None:
    (running.log.parent / "dragoman.json").write_text(json.dumps({"models_dir": []} | config))


def reload(running: Running, **models: Any) -> httpx.Response:
    """Reload a configuration of these models after the first one."""
    write(running, {"models": {"first": SCRIPTED, **models}})
    with talking(running) as client:
        return client.post("/admin/reload")


def asked(running: Running, name: str) -> httpx.Response:
    with talking(running) as client:
        return ask(client, CHAT, model=name)


def test_fingerprint_changes_with_the_options_of_a_model(server: Running) -> None:
    def fingerprint() -> str:
        found: str = asked(server, "second").json()["system_fingerprint"]
        return found

    reload(server, second=SCRIPTED)
    before = fingerprint()
    assert fingerprint() == before
    assert asked(server, "first").json()["system_fingerprint"] == before
    reload(server, second=SCRIPTED | {"context": 4000})
    assert fingerprint() != before
    reload(server, second=SCRIPTED)
    assert fingerprint() == before


def test_reload_under_load_fails_no_request(server: Running, client: httpx.Client) -> None:
    before = {
        "kept": WORKER | {"sampling": {"max_tokens": 4}},
        "changed": WORKER | {"words": 3},
        "gone": WORKER | {"words": 40, "pace": 0.05},
    }
    after = {
        "models": {"first": SCRIPTED, "kept": WORKER, "changed": WORKER | {"words": 7}, "new": SCRIPTED},
        "aliases": {"gone": "kept"},
    }
    answers: Counter[tuple[str, str]] = Counter()
    ended = threading.Event()

    def keep_asking(name: str) -> None:
        with talking(server) as client:
            while not ended.is_set():
                answers[name, text_of(ask(client, CHAT, model=name))] += 1

    reload(server, **before).raise_for_status()
    for name in before:
        client.post(f"/admin/models/{name}/load").raise_for_status()
    workers = set(server.workers())
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, name) for name in ("first", "kept", "changed", "changed")]
        try:
            assert eventually(lambda: {name for name, _ in answers} == {"first", "kept", "changed"})
            reload_amid_a_stream(server, after)
            assert eventually(lambda: len(answers) == 5), answers
        finally:
            ended.set()
        for task in asking:
            task.result()
    assert text_of(ask(client, CHAT, model="new")) == "hello"
    # The worker of `kept` is the same; those of the others have ended.
    assert eventually(lambda: len(server.workers()) == 2)
    assert len(workers & set(server.workers())) == 1
    log = server.log.read_text()
    assert log.count("model kept: loading") == 1
    assert "model changed: unloading: its configuration has changed" in log
    assert "model gone: unloading: it is no longer configured" in log
    assert set(answers) == {
        ("first", "hello"),
        ("kept", "kept " * 4),
        ("kept", "kept " * 5),
        ("changed", "changed " * 3),
        ("changed", "changed " * 7),
    }


def reload_amid_a_stream(running: Running, after: dict[str, Any]) -> None:
    """While a model that will be removed is still generating."""
    body = {"messages": HELLO, "model": "gone", "stream": True}
    with talking(running) as client, client.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        write(running, after)
        with talking(running) as other:
            assert other.post("/admin/reload").json() == {
                "models": ["first", "kept", "changed", "new"],
                "added": ["new"],
                "changed": ["kept", "changed"],
                "removed": ["gone"],
                "restart_needed": [],
            }
        assert text_of(asked(running, "gone")) == "kept " * 5
        rest = "\n".join(lines)
    assert rest.count('"gone "') == 40
    assert rest.rstrip().endswith("[DONE]")


TICKING = SCRIPTED | {"tokens_per_second": 20, "replies": [{"output": "tick" * 20}]}


@pytest.mark.parametrize("model", [WORKER | {"pace": 0.2}, TICKING], ids=["in a worker", "here"])
def test_queued_requests_of_removed_model_are_served(
    server: Running, client: httpx.Client, model: dict[str, Any]
) -> None:
    reload(server, busy=model | {"slots": 1}).raise_for_status()
    client.post("/admin/models/busy/load").raise_for_status()

    def in_hand() -> int:
        busy = client.get("/admin/models").json()["data"][1]
        return int(busy["running"] + busy["waiting"])

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(asked, server, "busy") for _ in range(4)]
        assert eventually(lambda: in_hand() + sum(task.done() for task in asking) == 4)
        assert reload(server).status_code == 200
        for task in asking:
            assert text_of(task.result())
    refused(ask(client, CHAT, model="busy"), 404, param="model")
    assert eventually(lambda: not server.workers())


def test_invalid_configuration_changes_nothing(server: Running, client: httpx.Client) -> None:
    reload(server).raise_for_status()
    before = server.log.read_text().count(NOT_RELOADED)
    write(server, {"models": {"first": SCRIPTED | {"chunk": 0}, "b": "./gone.gguf"}, "strict": "x"})
    message = refused(client.post("/admin/reload"), 400, code="invalid_config")
    assert "dragoman.json:1: models.first.chunk: expected int >= 1" in message
    assert "dragoman.json:1: strict: expected bool, got str" in message
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: server.log.read_text().count(NOT_RELOADED) == before + 2)
    assert "models.b: no file" in refused(reload(server, b="./gone.gguf"), 400, code="invalid_config")
    assert text_of(ask(client, CHAT)) == "hello"
    refused(ask(client, CHAT, model="b"), 404, param="model")


def test_invalid_model_file_changes_nothing(server: Running, client: httpx.Client) -> None:
    (server.log.parent / "text.gguf").write_text("a text of more than a few bytes")
    reload(server, m=WORKER | {"words": 2}).raise_for_status()
    assert text_of(ask(client, CHAT, model="m")) == "m m "
    message = refused(reload(server, m="./text.gguf"), 400, code="invalid_config")
    assert "dragoman.json:1: models.m: " in message
    assert "text.gguf is not a GGUF file" in message
    before = server.log.read_text().count(NOT_RELOADED)
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: server.log.read_text().count(NOT_RELOADED) > before)
    assert text_of(ask(client, CHAT, model="m")) == "m m "
    assert "model m: unloading" not in server.log.read_text()


def test_sighup_reloads_and_reports_settings_that_need_a_restart(server: Running, client: httpx.Client) -> None:
    changed = {"models": {"second": SCRIPTED}, "host": "localhost", "limits": {"write_seconds": 3, "choices": 2}}
    write(server, changed | {"memory": "1GiB", "keep_alive": 5})
    server.process.send_signal(signal.SIGHUP)
    assert eventually(lambda: "read again; models: second" in server.log.read_text())
    assert "these settings change only after a restart: host, limits.write_seconds" in server.log.read_text()
    assert ask(client, CHAT).json()["model"] == "second"
    refused(ask(client, CHAT, model="first"), 404, param="model")
    refused(ask(client, CHAT, n=3), 400, param="n")
    assert client.get("/admin/models").json()["memory"] == 2**30


def test_first_key_closes_the_server(server: Running, client: httpx.Client) -> None:
    write(server, {"models": {"first": SCRIPTED}, "api_keys": ["secret"]})
    assert client.post("/admin/reload").status_code == 200
    refused(ask(client, CHAT), 401)
    write(server, {"models": {"first": SCRIPTED}})
    assert client.post("/admin/reload", headers={"x-api-key": "secret"}).status_code == 200
    assert text_of(ask(client, CHAT)) == "hello"


def test_reload_reopens_event_log(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"a": SCRIPTED}}
    with serving(tmp_path, config) as running, talking(running) as client:
        for by_signal in (True, False):
            running.event_log.rename(tmp_path / f"events.{by_signal}")
            if by_signal:
                running.process.send_signal(signal.SIGHUP)
            else:
                client.post("/admin/reload").raise_for_status()
            assert eventually(running.event_log.exists)
            ask(client, CHAT).raise_for_status()
            assert recorded(running, event="request", scope="chat")
        assert running.stop() == 0
        assert running.events()[-1]["event"] == "run_end"


def test_unservable_model_is_a_warning_at_start(tmp_path: Path, serving: Serving) -> None:
    (tmp_path / "text.gguf").write_text("a text of more than a few bytes")
    cloud = {"engine": "upstream", "url": "http://127.0.0.1:9/v1", "key_env": "NOBODY_HAS_SET_THIS"}
    config = {"models": {"first": SCRIPTED, "m": "./text.gguf", "cloud": cloud}}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert text_of(ask(client, CHAT)) == "hello"
        # The missing key must not block other changes.
        write(running, {"models": {**config["models"], "new": SCRIPTED}})
        assert client.post("/admin/reload").json()["added"] == ["new"]
        write(running, {"models": {**config["models"], "n": "./text.gguf"}})
        message = refused(client.post("/admin/reload"), 400, code="invalid_config")
        assert "models.n: " in message
        assert "models.m: " not in message
    warned = [line for line in running.log.read_text().splitlines() if "WARNING" in line]
    assert "dragoman.json:1: models.m: " in warned[0] + warned[1]
    assert "NOBODY_HAS_SET_THIS" in warned[0] + warned[1]


def test_reload_applies_operational_settings(tmp_path: Path, serving: Serving) -> None:
    keys = {"limits": {"requests_per_minute": 3}}
    config: dict[str, Any] = {"models": {"first": SCRIPTED}, "api_keys": ["a", "b"], "keys": keys}
    with serving(tmp_path, config) as running, talking(running, {"x-api-key": "a"}) as client:
        assert ask(client, CHAT).headers["x-ratelimit-remaining-requests"] == "2"
        changed = config | {
            "keys": {"limits": {"requests_per_minute": 5}, "store": "other.db"},
            "api_keys": ["a"],
            "cors": {"origins": ["https://app.example"]},
            "proxies": ["127.0.0.1"],
            "telemetry": {"metrics": "off", "log_format": "json"},
            "socket": "here.sock",
            "drain_seconds": 1,
        }
        write(running, changed)
        told = client.post("/admin/reload").json()
        assert told["restart_needed"] == ["socket", "telemetry.log_format"]
        # A second reload reports the same settings again.
        assert client.post("/admin/reload").json()["restart_needed"] == ["socket", "telemetry.log_format"]
        reply = client.post(CHAT, json={"messages": HELLO}, headers={"origin": "https://app.example"})
        # Earlier use still counts: two requests and two reloads.
        assert reply.headers["x-ratelimit-remaining-requests"] == "1"
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        refused(client.get("/metrics"), 404)
        refused(client.get("/v1/models", headers={"x-api-key": "b"}), 401)


def test_last_key_of_public_server_cannot_be_removed(tmp_path: Path, serving: Serving) -> None:
    config: dict[str, Any] = {"models": {"first": SCRIPTED}, "api_keys": ["a"], "host": "0.0.0.0"}
    with serving(tmp_path, config) as running, talking(running, {"x-api-key": "a"}) as client:
        for host in ("0.0.0.0", "127.0.0.1"):
            write(running, config | {"api_keys": [], "host": host})
            assert "no API key is set" in refused(client.post("/admin/reload"), 400, code="invalid_config")
        assert ask(client, CHAT).status_code == 200
        refused(client.get("/v1/models", headers={"x-api-key": ""}), 401)


def test_storage_that_another_server_uses_is_no_changed_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    other = Database(default_address())
    other.open()
    try:
        config = {"models": {"first": SCRIPTED}, "storage": default_address()}
        with serving(tmp_path, config) as running, talking(running) as client:
            assert "keeps its state in memory" in running.log.read_text()
            assert client.post("/admin/reload").json()["restart_needed"] == []
            write(running, config | {"storage": str(tmp_path / "new.db")})
            assert client.post("/admin/reload").json()["restart_needed"] == ["storage"]
    finally:
        other.close()


def test_default_storage_that_cannot_be_written_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    Path(default_address()).mkdir()
    config = {"models": {"first": SCRIPTED}, "storage": default_address()}
    with serving(tmp_path, config) as running, talking(running) as client:
        log = running.log.read_text()
        assert "cannot be opened: " in log
        assert "--storage PATH" in log
        assert "keeps its state in memory" in log
        assert ask(client, CHAT).status_code == 200


def test_reload_applies_the_size_limit_to_conversations_and_lines_of_batches(server: Running) -> None:
    long = "x" * 3000
    item = {"role": "user", "content": long}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "first", "messages": [item]}}
    with talking(server) as client:
        conversation = client.post("/v1/conversations", json={}).json()["id"]
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line).encode()}).json()[
            "id"
        ]
        write(server, {"models": {"first": SCRIPTED}, "limits": {"body_bytes": 4500}})
        assert client.post("/admin/reload").status_code == 200
        added = [client.post(f"/v1/conversations/{conversation}/items", json={"items": [item]}) for _ in range(2)]
        assert [reply.status_code for reply in added] == [200, 413]
        write(server, {"models": {"first": SCRIPTED}, "limits": {"body_bytes": 3000}})
        assert client.post("/admin/reload").status_code == 200
        asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()["id"]
        assert eventually(lambda: client.get(f"/v1/batches/{batch}").json()["status"] == "failed")
        assert client.get(f"/v1/batches/{batch}").json()["errors"]["data"][0]["code"] == "line_too_long"


async def test_fixed_settings_keep_their_initial_values() -> None:
    before = Settings(models=(ModelSpec("m", "scripted"),), models_dir=(), limits=Limits(stall_seconds=5, queue=7))
    limits = Limits(stall_seconds=9, body_seconds=1, queue=3)
    after = Settings(models=(ModelSpec("n", "scripted"),), models_dir=(), limits=limits, port=1, strict=True)

    app = build_app(before, reload_settings=lambda: after)
    told = await app.reload()
    assert told.restart_needed == ("port", "limits.body_seconds", "limits.stall_seconds")
    assert app.settings.limits == Limits(stall_seconds=5, queue=3)
    assert (app.settings.port, app.settings.strict) == (before.port, True)
    assert app.catalog.resolve("n").host.limits == app.settings.limits
    await app.stop()

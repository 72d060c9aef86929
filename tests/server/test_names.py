"""Names of models, `models.yaml`, and the settings that change errors, reasoning and the log."""

import json
from pathlib import Path

import httpx

from tests.support.requests import CHAT, COMPLETIONS, ask, eventually, frames, refused, talking, text_of
from tests.support.server_process import Running, Serving, command_of, server_fixture

OUTPUT = "<think>First idea.</think><think>Second idea.</think>Yes."
THOUGHT = "First idea.\n\nSecond idea."
server = server_fixture(
    {
        "models": {
            "thinker": {"engine": "scripted", "format": "hermes", "replies": [{"output": OUTPUT}]},
            "cold": {"engine": "scripted", "crash_after": 100_000},
        },
        "limits": {"load_seconds": 0},
        "errors": "lethean",
        "reasoning_fields": ["reasoning_content", "thought"],
        "require_model": True,
        "telemetry": {"log_requests": True},
    }
)


def test_reasoning_fields_in_a_reply_and_a_stream(client: httpx.Client) -> None:
    message = ask(client, CHAT, model="thinker").json()["choices"][0]["message"]
    reasoning = {"reasoning_content": THOUGHT, "thought": THOUGHT}
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None} | reasoning
    deltas = [
        frame["choices"][0]["delta"] for frame in frames(ask(client, CHAT, model="thinker", stream=True).text)[:-1]
    ]
    for field in reasoning:
        assert "".join(delta.get(field, "") for delta in deltas) == THOUGHT
    assert not any("reasoning" in delta for delta in deltas)


def test_error_types_of_lethean(client: httpx.Client) -> None:
    missing = ask(client, CHAT, model="none")
    refused(missing, 404, param="model", code="model_not_found")
    assert missing.json()["error"]["type"] == "model_not_found"
    loading = ask(client, CHAT, model="cold", stream=True)
    refused(loading, 503, code="model_loading")
    assert loading.json()["error"]["type"] == "model_loading"
    assert int(loading.headers["retry-after"]) >= 1


def test_request_without_a_model_is_refused(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        assert refused(ask(client, path), 400, param="model").startswith("model: required, but missing")
    refused(ask(client, CHAT, model=" "), 400, param="model")


def test_ignored_parameters_are_recorded(server: Running, client: httpx.Client) -> None:
    response = ask(client, CHAT, model="thinker", guess_me=1, seed=2)
    assert response.headers["x-dragoman-ignored"] == "seed, guess_me"
    request_id = response.json()["id"]
    assert eventually(lambda: any(event.get("id") == request_id for event in server.events()))
    start, *events = server.events()
    assert next(event["ignored"] for event in events if event.get("id") == request_id) == ["seed", "guess_me"]
    assert all("ignored" not in event for event in events if event.get("status") == 404)
    assert start["models"] == [{"name": name, "engine": "scripted", "device": "cpu"} for name in ("thinker", "cold")]
    lines = server.log.read_text().splitlines()
    assert any(request_id in line and line.endswith("ignored: seed, guess_me") for line in lines)
    assert all(line[:2] == "20" and line[10] == " " for line in lines if "dragoman.requests" in line)


def test_names_with_the_same_file_share_a_process(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"a": {"source": "smollm2", "context": 512}, "b": {"source": "smollm2", "context": 512}}}
    with serving(tmp_path, config | {"aliases": {"mine": "yours", "yours": "B:latest"}}) as running:
        with talking(running) as client:
            replies = {name: ask(client, CHAT, model=name, max_tokens=4, temperature=0) for name in ("a", "b", "mine")}
            assert len({text_of(reply) for reply in replies.values()}) == 1
            assert {name: reply.json()["model"] for name, reply in replies.items()} == {"a": "a", "b": "b", "mine": "b"}
            assert client.get("/v1/models/b").json()["max_model_len"] == 512
        assert len([child for child in running.children() if b"worker_main" in command_of(child)]) == 1


def test_models_yaml_is_read_again_after_a_change(tmp_path: Path, serving: Serving) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("first: {engine: scripted, nickname: x}\nmodels:\n  second: {engine: scripted}\n")
    config = {"models": {"own": {"engine": "scripted"}}, "models_dir": []}
    with serving(tmp_path, config, "--models-yaml", str(file)) as running, talking(running) as client:
        [warning] = [line for line in running.log.read_text().splitlines() if "ignored keys: nickname" in line]
        assert " WARNING dragoman: --models-yaml " in warning
        assert f"{file}:1: model first: " in warning
        for name in ("own", "first", "second"):
            assert ask(client, CHAT, model=name).status_code == 200
        refused(ask(client, CHAT, model="third"), 404, param="model")
        file.write_text(json.dumps({"third": {"engine": "scripted"}}))
        assert eventually(lambda: ask(client, CHAT, model="third").status_code == 200)
        refused(ask(client, CHAT, model="first"), 404, param="model")
        file.write_text("third: {engine: unheard-of}")
        assert eventually(lambda: "models.third.engine" in running.log.read_text())
        assert ask(client, CHAT, model="third").status_code == 200

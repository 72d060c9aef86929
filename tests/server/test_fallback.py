"""Fallback models, with real servers in front and behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tools.ports import free_port

from dragoman.storage.keys import KeyStore
from tests.support.bad_server import HEL, BadServer, cut, refused
from tests.support.requests import CHAT, HELLO, ask, frames, recorded, talking, text_of
from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving

KEY = "sk-static"


def scripted(output: str, **options: Any) -> dict[str, Any]:
    return {"engine": "scripted", "replies": [{"output": output}], **options}


def upstream(url: str, **options: Any) -> dict[str, Any]:
    return {"engine": "upstream", "url": url, "protocol": "chat", "health_seconds": 0, **options}


@pytest.fixture(scope="module")
def behind() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, behind: BadServer, serving: Serving) -> Iterator[Running]:
    folders = [tmp_path_factory.mktemp(name) for name in ("cloud", "front")]
    (folders[1] / "broken.gguf").write_bytes(b"GGUF")
    unreachable = f"http://127.0.0.1:{free_port()}"
    with serving(folders[0], {"models": {"there": scripted("from the cloud")}}) as cloud:
        models = {
            "local": scripted("from here"),
            "gone": upstream(unreachable, fallback="local"),
            "bad": upstream(behind.url, model="m", fallback="local"),
            "well": upstream(behind.url, model="m", fallback="local"),
            "cloud": upstream(cloud.url, model="there"),
            "busy": scripted("slowly " * 4, tokens_per_second=10, slots=1, fallback="cloud"),
            "broken": {"path": "./broken.gguf", "fallback": "gone"},
            "lost": upstream(unreachable, fallback="also-lost"),
            "also-lost": upstream(unreachable),
            "hidden": upstream(unreachable, fallback="secret"),
            "secret": scripted("confidential"),
        }
        config = {"models": models, "limits": {"queue": 0}, "api_keys": [KEY], "keys": {"store": "keys.db"}}
        with serving(folders[1], config) as running:
            yield running


def chat(front: Running, model: str, **fields: Any) -> httpx.Response:
    with talking(front, {"authorization": f"Bearer {KEY}"}) as client:
        return ask(client, CHAT, model=model, **fields)


def answered(response: httpx.Response) -> tuple[str, str]:
    """The model that answered, and its reply."""
    text = text_of(response)
    return response.json()["model"], text


def test_unreachable_upstream_uses_fallback(front: Running) -> None:
    response = chat(front, "gone")
    assert answered(response) == ("local", "from here")
    [record] = recorded(front, id=response.headers["x-request-id"])
    assert (record["model"], record["status"]) == ("local", 200)
    assert "error" not in record


def test_stream_names_the_fallback_model(front: Running) -> None:
    told = frames(chat(front, "gone", stream=True).text)
    assert told[-1] == "[DONE]"
    assert {entry["model"] for entry in told[:-1]} == {"local"}
    assert "".join(entry["choices"][0]["delta"].get("content", "") for entry in told[:-1]) == "from here"


def test_fallback_in_every_protocol(front: Running) -> None:
    with sdk(front, KEY) as client:
        response = client.responses.create(model="gone", input="hello")
        assert (response.model, response.output_text) == ("local", "from here")
    with anthropic_sdk(front, KEY) as claude:
        message = claude.messages.create(model="gone", max_tokens=50, messages=[{"role": "user", "content": "hello"}])
        assert message.model == "local"
        assert isinstance(message.content[0], anthropic.types.TextBlock)
        assert message.content[0].text == "from here"


def test_full_queue_uses_fallback(front: Running) -> None:
    with talking(front, {"authorization": f"Bearer {KEY}"}) as client:
        body = {"model": "busy", "messages": HELLO, "stream": True}
        with client.stream("POST", CHAT, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            assert answered(chat(front, "busy")) == ("cloud", "from the cloud")
            assert sum('"model":"busy"' in line for line in lines) > 3
    assert answered(chat(front, "busy")) == ("busy", "slowly " * 4)


def test_load_failure_and_missing_model(front: Running) -> None:
    """Several fallbacks in a row."""
    assert answered(chat(front, "broken")) == ("local", "from here")


@pytest.mark.parametrize("status", ["429 Too Many", "500 Oops", "503 Busy", "401 No", "404 Where"])
def test_server_errors_use_fallback(front: Running, behind: BadServer, status: str) -> None:
    behind.play(refused(status, retry_after="0"))
    assert answered(chat(front, "bad")) == ("local", "from here")
    assert len(behind.requests[CHAT]) <= 1


def test_client_errors_do_not_use_fallback(front: Running, behind: BadServer) -> None:
    behind.play(refused("400 Bad", "the messages are no good"))
    response = chat(front, "well")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the messages are no good")
    assert chat(front, "gone", temperature="hot").status_code == 400


def test_no_fallback_after_first_event(front: Running, behind: BadServer) -> None:
    behind.play([*cut(HEL), "close"])
    assert chat(front, "well").status_code == 502
    told = frames(chat(front, "well", stream=True).text)
    assert {entry["model"] for entry in told[:-1]} == {"well"}
    assert told[-1]["error"]["code"] == "stream_cut_off"


def test_first_error_is_returned_if_all_fail(front: Running) -> None:
    response = chat(front, "lost")
    assert response.status_code in (502, 503)
    [record] = recorded(front, id=response.headers["x-request-id"])
    assert record["model"] == "lost"


def test_fallback_respects_key_scopes(front: Running) -> None:
    secret, _ = KeyStore(front.log.parent / "keys.db").create("anna", models=("hidden",))
    with talking(front, {"authorization": f"Bearer {secret}"}) as client:
        assert ask(client, CHAT, model="hidden").status_code in (502, 503)
    assert answered(chat(front, "hidden")) == ("secret", "confidential")


def test_ignored_parameters_are_those_of_the_fallback(front: Running, behind: BadServer) -> None:
    """The first model honours the seed; the fallback does not."""
    response = chat(front, "gone", seed=7)
    assert answered(response)[0] == "local"
    assert response.headers["x-dragoman-ignored"] == "seed"
    behind.play(refused("500 Oops"))


def test_fallback_changes_with_reload(tmp_path: Path, serving: Serving) -> None:
    unreachable = f"http://127.0.0.1:{free_port()}"
    config: dict[str, Any] = {"models": {"a": upstream(unreachable), "b": scripted("b")}, "default": "b"}
    with serving(tmp_path, config) as running, talking(running) as client:
        assert ask(client, CHAT, model="a").status_code in (502, 503)
        config["models"]["a"]["fallback"] = "b"
        (tmp_path / "dragoman.json").write_text(json.dumps(config))
        assert client.post("/admin/reload").json()["changed"] == ["a"]
        assert answered(ask(client, CHAT, model="a")) == ("b", "b")

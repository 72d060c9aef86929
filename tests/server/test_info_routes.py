"""Routes that generate nothing: models, health, readiness."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dragoman import __version__
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.models import Catalog, StaticInfo
from tests.support.gguf_files import gguf, pair, text
from tests.support.raw_http import raw
from tests.support.requests import CHAT, ask, refused, talking, text_of
from tests.support.server_process import Running, Serving


def test_models(client: httpx.Client) -> None:
    response = client.get("/v1/models")
    assert response.headers["x-request-id"].startswith("req-")
    listed = response.json()
    assert listed["object"] == "list"
    names = [model["id"] for model in listed["data"]]
    assert names[:3] == ["echo", "poet", "slow"]
    assert "org/nested" in names
    assert "gpt-*" not in names
    for model in listed["data"]:
        assert model["object"] == "model"
        assert model["owned_by"] == "dragoman"
        assert 0 < model["created"] <= time.time()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("echo", "echo"),
        ("ECHO", "echo"),
        ("org/nested", "org/nested"),
        ("org%2Fnested", "org/nested"),
        ("org%2fnested", "org/nested"),
        ("gpt-4o", "poet"),
    ],
)
def test_one_model(client: httpx.Client, path: str, name: str) -> None:
    model = client.get(f"/v1/models/{path}").json()
    assert (model["id"], model["object"]) == (name, "model")
    assert set(model) >= {"id", "object", "created", "owned_by"}


def test_context_is_shown_after_loading(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="short")) == "hello"
    model = client.get("/v1/models/short").json()
    assert model["max_model_len"] == 20
    assert model["state"] == "ready"


def write_model(file: Path) -> None:
    """A truncated model file."""
    template = "{% for m in messages %}<tool_call>{{ m }}</tool_call>{% endfor %}"
    pairs = (
        pair("general.architecture", 8, text("llama")),
        pair("llama.context_length", 4, (2048).to_bytes(4, "little")),
        pair("tokenizer.chat_template", 8, text(template)),
    )
    file.write_bytes(gguf(*pairs))


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    """A server with models that are not loaded, under another name."""
    folder = tmp_path_factory.mktemp("cold")
    write_model(folder / "m.gguf")
    (folder / "bad.gguf").write_bytes(b"GGUF")
    models = {
        "first": {"engine": "scripted"},
        "mine": "./m.gguf",
        "set": {"path": "./m.gguf", "context": 512, "format": "plain"},
        "broken": "./bad.gguf",
        "rehearsal": {"engine": "scripted", "context": 99},
        "own": {"engine": "tests.support.engines:Calling"},
    }
    with serving(folder, {"models": models, "hosts": ["127.0.0.1", "LLM.example"]}) as running:
        yield running


def test_configured_hosts(cold: Running) -> None:
    for host, status in [("llm.example:8000", 200), ("localhost", 400), ("other.example", 400)]:
        with talking(cold, {"host": host}) as client:
            assert client.get("/health").status_code == status


def test_info_of_unloaded_model(cold: Running) -> None:
    with talking(cold) as client:
        listed = {model["id"]: model for model in client.get("/v1/models").json()["data"]}
        one = client.get("/v1/models/mine").json()
        anthropic = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    known = {name: (model.get("format"), model.get("max_model_len")) for name, model in listed.items()}
    assert known == {
        "first": ("plain", None),
        "mine": ("hermes", 2048),
        "set": ("plain", 512),
        "broken": (None, None),
        "rehearsal": ("plain", 99),
        "own": (None, None),
    }
    assert [model["state"] for model in listed.values()] == ["ready", *["cold"] * 5]
    assert one == listed["mine"]
    contexts = {model["id"]: (model["max_input_tokens"], model["max_tokens"]) for model in anthropic}
    assert contexts == {name: (context, context) for name, (_, context) in known.items()}


def test_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file)
    spec = ModelSpec("mine", "llama", str(file))
    gone = ModelSpec("gone", "llama", str(tmp_path / "gone.gguf"))
    wrong = ModelSpec("wrong", "llama", str(file), {"colour": "red"})
    catalog = Catalog(Settings(models=(spec, gone, wrong)))

    async def read() -> list[StaticInfo]:
        return [await model.static_info() for model in catalog.models.values()]

    known = [StaticInfo("hermes", 2048), StaticInfo(file="missing"), StaticInfo()]
    assert asyncio.run(read()) == known
    file.unlink()
    assert asyncio.run(read()) == known


@pytest.mark.parametrize("name", ["nothing", "org", "org/nested/more", "echo/"])
def test_unknown_model(client: httpx.Client, name: str) -> None:
    message = refused(client.get(f"/v1/models/{name}"), 404, param="model", code="model_not_found")
    assert "echo" in message


def test_path_is_not_normalized(scripted: Running) -> None:
    answer = raw(scripted, b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    refused(answer.response, 404, param="model", code="model_not_found")


def test_root_and_health(client: httpx.Client) -> None:
    assert client.get("/").json() == {"name": "dragoman", "version": __version__}
    assert client.get("/health").json() == client.get("/ping").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": __version__}
    for path in ("/", "/health", "/ping", "/version", "/v1/models", "/v1/models/echo"):
        response = client.head(path)
        assert (response.status_code, response.content) == (200, b"")
        assert int(response.headers["content-length"]) > 0
        assert response.headers["x-request-id"]


def test_ready(client: httpx.Client) -> None:
    response = client.get("/ready")
    assert response.status_code == 200
    assert response.json()["status"] == "ready"
    assert response.json()["models"]["echo"] == "ready"
    assert set(response.json()["models"]["failing"]) <= set("coldready")

"""`dragoman models`, run as a command."""

import json
import re
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from tools.ports import free_port

from dragoman.cli.models import Row, format_rows
from dragoman.storage.keys import KeyStore
from tests.cli.test_cli import refused, run
from tests.support.bad_server import BadServer, answer
from tests.support.certificates import write_certificate
from tests.support.gguf_files import gguf, pair, text
from tests.support.requests import listened_on
from tests.support.server_process import Running, serving, serving_at

TEMPLATE = "{% for m in messages %}<tool_call>{{ m }}</tool_call>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.gguf").write_bytes(
        gguf(
            pair("general.architecture", 8, text("llama")),
            pair("llama.context_length", 4, (2048).to_bytes(4, "little")),
            pair("tokenizer.chat_template", 8, text(TEMPLATE)),
        )
    )
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    return tmp_path


def listed(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    done = run(folder, "models", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_table_is_aligned_and_omits_empty_columns() -> None:
    rows = [Row("a", engine="llama", context=4096, state="here"), Row("longer", engine="scripted", state="missing")]
    assert format_rows(rows).splitlines() == [
        "NAME    ENGINE    CONTEXT  STATE",
        "a       llama     4096     here",
        "longer  scripted  -        missing",
    ]


def test_built_in_model_without_configuration(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text(f"port: {free_port()}\n")
    done = run(tmp_path, "models")
    assert done.returncode == 0
    assert re.fullmatch(r"the server at http://127\.0\.0\.1:\d+ does not answer; models of .*:\n", done.stderr)
    head, row = done.stdout.splitlines()
    assert head.split() == ["NAME", "ENGINE", "FORMAT", "SOURCE", "STATE"]
    assert row.split()[:2] == ["smollm2", "llama"]
    assert row.endswith("not downloaded")


def test_adapters_are_listed_beside_their_model(folder: Path) -> None:
    (folder / "dragoman.yaml").write_text("models: {mine: {path: ./m.gguf, adapters: {mine-legal: ./legal.gguf}}}")
    rows = listed(folder)
    assert list(rows) == ["mine", "mine-legal"]
    assert rows["mine-legal"] == rows["mine"] | {"name": "mine-legal"}


def test_models_of_a_configuration(folder: Path) -> None:
    (folder / "v.gguf").write_bytes(
        gguf(pair("general.architecture", 8, text("bert")), pair("bert.attention.causal", 7, b"\0"))
    )
    (folder / "qwen").mkdir()
    (folder / "qwen/config.json").write_text('{"max_position_embeddings": 40960}')
    (folder / "qwen/chat_template.jinja").write_text("{{ messages }}<tool_call>{{ tools }}")
    code = "from dragoman import Engine\n\n\nclass Shout(Engine):\n    def generate(self, request):\n        yield ''\n"
    (folder / "my_module.py").write_text(code)
    (folder / "team.yaml").write_text(
        "models:\n"
        "  mine: ./m.gguf\n"
        "  short: {path: ./m.gguf, context: 512, layout: as-is}\n"
        "  set: {path: ./m.gguf, format: plain}\n"
        "  vectors: ./v.gguf\n"
        "  gone: ./gone.gguf\n"
        "  broken: ./bad.gguf\n"
        "  rehearsal: {engine: scripted, context: 99}\n"
        "  own: {engine: 'my_module:Shout'}\n"
        "  q: {engine: vllm, source: ./qwen}\n"
        "  none: {engine: vllm, source: ./no}\n"
        "  hub: {engine: vllm, source: a/b}\n"
    )
    rows = listed(folder, "--config", "team.yaml")
    assert [(row["engine"], row["format"], row["context"], row["state"]) for row in rows.values()] == [
        ("llama", "hermes", 2048, "here"),
        ("llama", "hermes", 512, "here"),
        ("llama", "plain", 2048, "here"),
        ("llama", None, None, "here"),
        ("llama", "auto", None, "missing"),
        ("llama", "auto", None, "unreadable"),
        ("scripted", "plain", 99, "here"),
        ("my_module:Shout", None, None, "here"),
        ("vllm", "hermes", 40960, "here"),
        ("vllm", "auto", None, "missing"),
        ("vllm", "auto", None, "here"),
    ]
    assert rows["mine"]["source"] == "m.gguf"
    assert {row["layout"] for row in rows.values()} == {None}


def test_models_in_models_dir(folder: Path) -> None:
    (folder / "dragoman.yaml").write_text("{models: {mine: ./m.gguf}, models_dir: .}")
    (folder / "other.gguf").write_bytes((folder / "m.gguf").read_bytes())
    rows = listed(folder)
    assert list(rows) == ["mine", "other"]
    assert rows["other"] | {"name": "mine", "source": rows["mine"]["source"]} == rows["mine"]
    (folder / "dragoman.yaml").write_text("models_dir: .")
    assert list(listed(folder)) == ["m", "other"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_models_of_a_running_server(tmp_path: Path, scripted: Running, suffix: str) -> None:
    rows = listed(tmp_path, "--url", scripted.url + suffix)
    assert "org/nested" in rows
    echo = rows["echo"]
    assert (echo["format"], echo["device"], echo["state"], echo["engine"]) == ("plain", "cpu", "ready", None)


def test_server_at_the_configured_address(tmp_path: Path) -> None:
    config = {"models": {"first": {"engine": "scripted"}, "org/b": {"engine": "scripted", "slots": 3}}}
    with serving(tmp_path, config) as running:
        (tmp_path / "dragoman.yaml").write_text(f"port: {running.port}\nmodels: {{other: ./m.gguf}}\n")
        assert set(listed(tmp_path)) == {"first", "org/b"}
        assert run(tmp_path, "models").stderr == f"models of the server at {running.url}:\n"
        assert set(listed(tmp_path, "--configured")) == {"other"}
        row = json.loads(run(tmp_path, "models", "load", "org/b", "--json").stdout)
        assert (row["name"], row["state"], row["slots"]) == ("org/b", "ready", 3)
        done = run(tmp_path, "models", "load", "org/b")
        assert (done.returncode, done.stdout) == (0, "org/b: ready\n")
        row = listed(tmp_path)["org/b"]
        assert (row["state"], row["slots"]) == ("ready", 3)
        assert run(tmp_path, "models", "unload", "org/b", "--url", running.url).stdout == "org/b: cold\n"
        assert "404 Not Found: model 'c' is not served here" in refused(run(tmp_path, "models", "load", "c"))
    assert set(listed(tmp_path)) == {"other"}


def test_server_requires_a_key(tmp_path: Path) -> None:
    config = {"models": {"one": {"engine": "scripted"}}, "api_keys": ["secret"]}
    with serving(tmp_path, config) as running:
        words = refused(run(tmp_path, "models", "--url", running.url))
        assert words == f"--url {running.url}: the server answered 401 Unauthorized; give --api-key"
        assert "one" in listed(tmp_path, "--url", running.url, "--api-key", "secret")
        done = run(tmp_path, "models", "--url", running.url, environ={"DRAGOMAN_API_KEY": "secret"})
        assert done.returncode == 0


def test_key_without_admin_scope_can_only_list(tmp_path: Path) -> None:
    config = {"models": {"one": {"engine": "scripted", "slots": 3}}, "keys": {"store": "keys.db"}}
    store = KeyStore(tmp_path / "keys.db")
    plain, _ = store.create("anna")
    operator, _ = store.create("ops", routes=["admin"])
    with serving(tmp_path, config) as running:
        (tmp_path / "dragoman.yaml").write_text(f"port: {running.port}\nmodels: {{other: {{engine: scripted}}}}\n")
        assert refused(run(tmp_path, "models")).endswith("the server answered 401 Unauthorized; give --api-key")
        assert listed(tmp_path, "--api-key", plain)["one"]["slots"] is None
        assert listed(tmp_path, "--api-key", operator)["one"]["slots"] == 3
        words = refused(run(tmp_path, "models", "unload", "one", "--api-key", plain))
        assert "403 Forbidden: this key may not use admin routes; it allows: batches, chat" in words
        assert run(tmp_path, "models", "unload", "one", "--api-key", operator).stdout == "one: cold\n"


@pytest.mark.parametrize("place", ["tls", "socket", "both"])
def test_server_with_tls_or_unix_socket(tmp_path: Path, place: str) -> None:
    tls = write_certificate(tmp_path)
    config: dict[str, Any] = {"models": {"one": {"engine": "scripted"}}, "hosts": ["models.example"]}
    if place != "socket":
        config["tls"] = {"certificate": "server.pem", "key": "server.key"}
    if place != "tls":
        config["socket"] = "here.sock"

    def connect(port: int) -> httpx.Client:
        assert place == "tls" or listened_on(tmp_path / "here.sock")
        trusted = ssl.create_default_context(cafile=tls.certificate) if place != "socket" else True
        transport = httpx.HTTPTransport(verify=trusted, uds=None if place == "tls" else str(tmp_path / "here.sock"))
        scheme = "http" if place == "socket" else "https"
        address = f"{scheme}://localhost:{port}"
        return httpx.Client(base_url=address, transport=transport, headers={"host": "models.example"})

    with serving_at(tmp_path, config, connect) as (running, _):
        (tmp_path / "dragoman.yaml").write_text(json.dumps(config | {"port": running.port}))
        row = listed(tmp_path, "--config", "dragoman.yaml")["one"]
        assert row["state"] == "ready"
        done = run(tmp_path, "models", "unload", "one")
        assert (done.returncode, done.stdout) == (0, "one: cold\n"), done.stderr
        if place == "tls":
            words = refused(run(tmp_path, "models", "--url", f"https://localhost:{running.port}"))
            assert "to trust a self-signed certificate, set $SSL_CERT_FILE" in words


def test_unix_socket_url(tmp_path: Path) -> None:
    def connect(_: int) -> httpx.Client:
        assert listened_on(tmp_path / "here.sock")
        return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(tmp_path / "here.sock")))

    config = {"models": {"one": {"engine": "scripted"}}, "socket": "here.sock"}
    with serving_at(tmp_path, config, connect):
        assert "one" in listed(tmp_path, "--url", "unix:here.sock")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "127.0.0.1:8000"], "expected an address such as http://127.0.0.1:8000"),
        (["--url", "file:///etc/passwd"], "expected an address"),
        (["--url", "http://127.0.0.1:{port}"], "no answer: "),
        (["--url", "http://[x"], "expected an address"),
        (["--url", "http://a b"], "no answer: "),
        (["load"], "load needs the NAME of a model"),
        (["load", "a", "--configured"], "--configured cannot be combined with --url, load or unload"),
        (["--url", "http://127.0.0.1:1", "--configured"], "--configured cannot be combined"),
        (["sing", "a"], "invalid choice: 'sing'"),
        (["--api-key", "k"], "--api-key is for a running server: give its --url too"),
        (["--config", "none.yaml"], "cannot read the configuration none.yaml"),
        (["--config", "a", "--url", "b"], "not allowed with argument"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    formatted = [argument.format(port=free_port()) for argument in arguments]
    assert words in refused(run(tmp_path, "models", *formatted))


def test_api_below_another_path(tmp_path: Path) -> None:
    with BadServer() as server:
        server.also(answer({"data": [{"id": "big"}]}), path="/api/v4/models")
        assert list(listed(tmp_path, "--url", f"{server.url}/api/v4")) == ["big"]


def test_answer_is_not_a_model_list(tmp_path: Path) -> None:
    with BadServer() as server:
        server.also(answer({"status": "ok"}), path="/v1/models")
        words = refused(run(tmp_path, "models", "--url", server.url))
    assert "the answer is not a list of models" in words

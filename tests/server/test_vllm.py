"""Model directories served by vLLM, with a fake vLLM."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.requests import frames
from tests.support.server_process import Running, Serving

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"
STAND_IN = Path(__file__).parent.parent / "engines" / "fakevllm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "models" / "org" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "model.safetensors").write_bytes(bytes(8))
    return folder


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    """Servers find a stand-in for vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
        yield


@pytest.fixture(scope="module")
def server(folder: Path, stand_in: None, serving: Serving) -> Iterator[Running]:
    with serving(folder, {"models_dir": str(folder / "models")}) as running:
        yield running
        assert running.stop() == 0


def ask(running: Running, text: str, **fields: object) -> httpx.Response:
    body = {"model": "org/tiny", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


def streamed(running: Running, text: str) -> list[str]:
    """The pieces of a reply, frame by frame."""
    *chunks, done = frames(ask(running, text, stream=True).text)
    assert done == "[DONE]"
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]


@pytest.mark.usefixtures("stand_in")
def test_vllm_errors_name_the_model_path(tmp_path: Path) -> None:
    config = tmp_path / "dragoman.yaml"
    model = "    engine: vllm\n    source: hf:some/model\n    args: {max-num-seqs: 0}\n"
    config.write_text(f"port: 0\nmodels_dir: []\nmodels:\n  m:\n{model}")
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    words = f"{config}:4: models.m: vllm: hf:some/model: args.max-num-seqs: Input should be greater"
    assert done.stderr.splitlines()[-1].startswith(f"dragoman: {words}")


def test_model_directory_is_served_if_vllm_is_installed(server: Running) -> None:
    listed = httpx.get(f"{server.url}/v1/models", trust_env=False, timeout=60).json()["data"]
    assert [model["id"] for model in listed] == ["org/tiny"]
    reply = ask(server, "Hällo").json()
    assert reply["choices"][0]["message"]["content"] == "Hällo"
    assert reply["usage"]["completion_tokens"] == len("Hällo".encode())
    with ThreadPoolExecutor(40) as pool:
        counted = list(pool.map(lambda number: streamed(server, f"count {number}"), range(20, 60)))
    assert ["".join(pieces) for pieces in counted] == [" ".join(map(str, range(count))) for count in range(20, 60)]
    refused = ask(server, "x", logprobs=True, top_logprobs=20, temperature=1.5, logit_bias={"999999": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert ask(server, "again").json()["choices"][0]["message"]["content"] == "again"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("engine", [[], ["--engine", "vllm"]])
def test_model_directory_on_the_command_line(tmp_path: Path, folder: Path, engine: list[str], serving: Serving) -> None:
    with serving(tmp_path, {}, *engine, "--model", f"org/tiny={folder}/models/org/tiny") as running:
        assert ask(running, "Hello").json()["choices"][0]["message"]["content"] == "Hello"
        assert running.stop() == 0


def test_model_directory_without_vllm_is_a_501_with_hint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", "").removeprefix(f"{STAND_IN}{os.pathsep}"))
    config = {"models_dir": str(folder / "models"), "models": {"s": {"engine": "scripted"}}}
    with serving(tmp_path, config) as running:
        refused = ask(running, "Hello")
        assert refused.status_code == 501
        assert "pip install 'dragoman[vllm]'" in refused.json()["error"]["message"]
        assert running.stop() == 0


def documented(row: str) -> list[str]:
    """The names in a row of the page for users of vLLM's own server."""
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} |"))
    return re.findall(r"`([^`]+)`", line.removeprefix(f"| {row} |").partition(" | ")[0])


def test_fields_and_routes_are_as_documented(server: Running) -> None:
    everywhere, in_chats = documented("ignored"), documented("ignored in a chat only")
    in_completions = documented("ignored in completions only")
    assert len(everywhere) > 20
    odd = {name: [name] for name in everywhere}
    routes = re.findall(r"^\| (`/[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    absent = [path for row in routes for path in re.findall(r"`([^`]+)`", row)]
    assert len(absent) > 20
    chat = ask(server, "Hello", max_tokens=1, **odd, echo=True, best_of=2, prompt_logprobs=1, return_token_ids=True)
    assert {*chat.headers["x-dragoman-ignored"].split(", ")} == {*everywhere, *in_chats}
    body = {
        "model": "org/tiny",
        "prompt": "Hello",
        "max_tokens": 1,
        "echo": True,
        "return_token_ids": True,
        "prompt_logprobs": 1,
        "continue_final_message": True,
        "add_generation_prompt": False,
    } | odd
    completion = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30, trust_env=False)
    assert {*completion.headers["x-dragoman-ignored"].split(", ")} == {*everywhere, *in_completions}
    for path in absent:
        assert httpx.post(f"{server.url}{path}", json={}, trust_env=False, timeout=60).status_code == 404, path

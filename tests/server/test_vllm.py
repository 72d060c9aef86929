"""Over HTTP, with the stand-in for vLLM: a folder of the models folder is served, where vLLM is installed."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving import Running, serving

STAND_IN = Path(__file__).parent.parent / "engines" / "fakevllm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "org" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "model.safetensors").write_bytes(bytes(8))
    return tmp_path


def ask(running: Running, text: str, **fields: object) -> httpx.Response:
    body = {"model": "org/tiny", "messages": [{"role": "user", "content": text}], **fields}
    return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)


def streamed(running: Running, text: str) -> list[str]:
    """The pieces of a reply, frame by frame."""
    body = {"model": "org/tiny", "messages": [{"role": "user", "content": text}], "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=30, trust_env=False) as reply:
        data = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    frames = [json.loads(entry) for entry in data]
    return [frame["choices"][0]["delta"].get("content") or "" for frame in frames if frame["choices"]]


def test_a_folder_is_served_where_vllm_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    with serving(folder, {"models_dir": str(folder / "models")}) as running:
        listed = httpx.get(f"{running.url}/v1/models", trust_env=False).json()["data"]
        assert [model["id"] for model in listed] == ["org/tiny"]
        reply = ask(running, "Hällo").json()
        assert reply["choices"][0]["message"]["content"] == "Hällo"
        assert reply["usage"]["completion_tokens"] == len("Hällo".encode())
        with ThreadPoolExecutor(40) as pool:
            counted = list(pool.map(lambda number: streamed(running, f"count {number}"), range(20, 60)))
        assert ["".join(pieces) for pieces in counted] == [" ".join(map(str, range(count))) for count in range(20, 60)]
        refused = ask(running, "x", logprobs=True, top_logprobs=20, temperature=1.5, logit_bias={"999999": 1})
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert ask(running, "again").json()["choices"][0]["message"]["content"] == "again"
        assert running.stop() == 0


@pytest.mark.parametrize("engine", [[], ["--engine", "vllm"]])
def test_a_folder_that_the_command_line_names(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: list[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    with serving(folder, {}, *engine, "--model", f"org/tiny={folder}/models/org/tiny") as running:
        assert ask(running, "Hello").json()["choices"][0]["message"]["content"] == "Hello"
        assert running.stop() == 0


def test_where_it_is_not_a_folder_is_a_501_that_tells_the_way_out(folder: Path) -> None:
    with serving(folder, {"models_dir": str(folder / "models"), "models": {"s": {"engine": "scripted"}}}) as running:
        refused = ask(running, "Hello")
        assert refused.status_code == 501
        assert "pip install 'dragoman[vllm]'" in refused.json()["error"]["message"]
        assert running.stop() == 0

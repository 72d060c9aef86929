"""What `dragoman check` finds wrong with models of vLLM, without vLLM."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.engines.vllm.options import VllmOptions, arguments
from dragoman.engines.vllm.preflight import mistakes
from dragoman.models.static_info import foreseen, wrong_files
from tests.cli.test_cli import run
from tests.engines.vllm_model import WITH_VLLM

WITHOUT_VLLM = pytest.mark.skipif(WITH_VLLM, reason="that it is not there is told too")
SMALL = {"hidden_size": 64}
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def adapter(folder: Path, files: dict[str, bytes], config: str | None = '{"r": 8}') -> str:
    folder.mkdir()
    if config is not None:
        (folder / "adapter_config.json").write_text(config)
    for ending, content in files.items():
        (folder / f"adapter_model.{ending}").write_bytes(content)
    return str(folder)


def tensors(shapes: dict[str, list[int]]) -> bytes:
    """The header is all that is looked at."""
    header = json.dumps({name: {"dtype": "F16", "shape": shape} for name, shape in shapes.items()}).encode()
    return struct.pack("<Q", len(header)) + header


def found(path: str, **options: Any) -> list[tuple[str, str]]:
    return list(mistakes(VllmOptions(path, **options)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:no folder here", "'no folder here' is neither a folder nor ORG/REPO of the hub"),
        ("hf:https://example.org/x", "'https://example.org/x' is neither"),
        ("hf:smollm2", "smollm2 is a GGUF file, for `engine: llama`"),
        ("hf:a/b/c", "neither"),
    ],
)
def test_sources_that_are_none(source: str, words: str) -> None:
    ((key, told),) = found(source)
    assert key == "source"
    assert words in told


@pytest.mark.parametrize("source", ["hf:Qwen/Qwen3-8B", "some/model", "hf:gpt2", "/told/by/others"])
def test_sources_that_may_be_some(source: str) -> None:
    assert not found(source)


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    assert "has no config.json" in found(str(tmp_path))[0][1]
    assert not found(model(tmp_path, SMALL))


def test_arguments_are_given_once() -> None:
    args = {"max-model-len": 5, "max_num_seqs": 4, "max-num-seqs": 4, "model": "x", "dtype": "half"}
    assert dict(found("a/b", context=5, args=args)) == {
        "args.max-model-len": "context sets it; give it once",
        "args.max_num_seqs": "given twice, also as max-num-seqs",
        "args.model": "source sets it; give it once",
    }


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (None, {}, "there is no adapter_config.json in it"),
        ("{}", {}, "names no rank"),
        ("{", {}, "is not JSON"),
        ('{"r": 8}', {}, "has no weights of an adapter"),
        ('{"r": 8}', {"safetensors": b"garbage!"}, "cannot be read as safetensors"),
        ('{"r": 8}', {"safetensors": b""}, "cannot be read as safetensors"),
        (
            '{"r": 8}',
            {"safetensors": tensors({Q_PROJ: [8, 576]})},
            "of a model whose layers are 576 wide; those of this are 64",
        ),
    ],
)
def test_adapters_that_are_none(tmp_path: Path, config: str | None, files: dict[str, bytes], words: str) -> None:
    adapters = {"leg": adapter(tmp_path / "leg", files, config)}
    ((key, told),) = found(model(tmp_path, SMALL), adapters=adapters)
    assert key == "adapters.leg"
    assert words in told


@pytest.mark.parametrize(
    "files",
    [
        {"bin": b""},
        {"safetensors": tensors({Q_PROJ: [8, 64]})},
        {"safetensors": tensors({f"vision_tower{Q_PROJ}": [8, 9], Q_PROJ.replace("q_proj", "o_proj"): [8, 9]})},
    ],
)
@pytest.mark.parametrize("config", [SMALL, {"text_config": SMALL}, {}])
def test_adapters_that_may_be_some(tmp_path: Path, files: dict[str, bytes], config: dict[str, Any]) -> None:
    assert not found(model(tmp_path, config), adapters={"leg": adapter(tmp_path / "leg", files)})


def test_the_home_folder_is_found_wherever_a_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter(tmp_path / "leg", {"safetensors": tensors({Q_PROJ: [8, 576]})}, '{"r": 12}')
    folder = model(tmp_path / "m", SMALL | {"max_position_embeddings": 77})
    options = VllmOptions("~/m", adapters={"leg": "~/leg"})
    ((_, told),) = mistakes(options)
    assert "those of this are 64" in told
    args = arguments(options)
    assert (args["model"], args["max_lora_rank"]) == (folder, 16)
    spec = ModelSpec("m", "vllm", "~/m")
    assert (wrong_files([spec]), foreseen(spec).context) == ([], 77)


@WITHOUT_VLLM
def test_they_are_told_with_their_lines(tmp_path: Path) -> None:
    adapter(tmp_path / "leg", {})
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n  m:\n    engine: vllm\n    source: ./leg\n    slots: 4\n"
        "    args:\n      max_num_seqs: 4\n    adapters:\n      leg: ./leg\n"
    )
    told = run(tmp_path, "check").stderr.splitlines()
    assert [line.split(" ")[1:3] for line in told] == [
        ["dragoman.yaml:3:", "models.m.engine:"],
        ["dragoman.yaml:4:", "models.m.source:"],
        ["dragoman.yaml:7:", "models.m.args.max_num_seqs:"],
        ["dragoman.yaml:9:", "models.m.adapters.leg:"],
    ]


@WITHOUT_VLLM
def test_vllm_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models:\n  m: {engine: vllm, source: a/b}\n")
    assert run(tmp_path, "check").stderr.startswith("dragoman: dragoman.yaml:2: models.m.engine: vllm is not installed")

"""Configuration errors of vLLM models: found without vLLM, or reported by it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.engines.vllm.options import VllmOptions, build_engine_args, describe_error, find_errors, last_line
from dragoman.models import read_static_info
from tests.cli.test_cli import run
from tests.engines.fakevllm.vllm.values import ValidationError
from tests.engines.vllm_model import WITH_VLLM

WITHOUT_VLLM = pytest.mark.skipif(WITH_VLLM, reason="a missing vllm is one more error")
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
    """A safetensors file with only a header."""
    header = json.dumps({name: {"dtype": "F16", "shape": shape} for name, shape in shapes.items()}).encode()
    return struct.pack("<Q", len(header)) + header


def found(path: str, **options: Any) -> list[tuple[str, str]]:
    return list(find_errors(VllmOptions(path, **options)))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:no folder here", "'no folder here' is neither a directory nor ORG/REPO on the hub"),
        ("hf:https://example.org/x", "'https://example.org/x' is neither"),
        ("hf:smollm2", "smollm2 is a GGUF file, for `engine: llama`"),
        ("hf:a/b/c", "neither"),
    ],
)
def test_invalid_sources(source: str, words: str) -> None:
    ((key, message),) = found(source)
    assert key == "source"
    assert words in message


@pytest.mark.parametrize("source", ["hf:Qwen/Qwen3-8B", "some/model", "hf:gpt2", "/missing/directory"])
def test_valid_sources(source: str) -> None:
    assert not found(source)


def test_directory_without_config_json(tmp_path: Path) -> None:
    assert "has no config.json" in found(str(tmp_path))[0][1]
    assert not found(model(tmp_path, SMALL))


def test_arguments_set_twice() -> None:
    args = {"max-model-len": 5, "max_num_seqs": 4, "max-num-seqs": 4, "model": "x", "dtype": "half"}
    assert dict(found("a/b", context=5, args=args)) == {
        "args.max-model-len": "already set by the option context; set only one of them",
        "args.max_num_seqs": "set twice, also as max-num-seqs",
        "args.model": "already set by the option source; set only one of them",
    }


@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        (None, None, "it has no adapter_config.json"),
        ("{}", None, "has no rank `r`"),
        ('{"r": 0}', None, "has no rank `r`"),
        ("[]", None, "has no rank `r`"),
        ("{", None, "is not JSON"),
        ('{"r": 8}', None, "has no adapter weights"),
        ('{"r": 8}', b"garbage!", "cannot be read as safetensors"),
        ('{"r": 8}', b"", "cannot be read as safetensors"),
        ('{"r": 8}', struct.pack("<Q", 2) + b"[]", "cannot be read as safetensors"),
        ('{"r": 8}', tensors({Q_PROJ: [8, 576]}), "for a model with hidden size 576; this model has 64"),
    ],
)
def test_invalid_adapters(tmp_path: Path, config: str | None, weights: bytes | None, words: str) -> None:
    files = {} if weights is None else {"safetensors": weights}
    ((key, message),) = found(model(tmp_path, SMALL), adapters={"leg": adapter(tmp_path / "leg", files, config)})
    assert key == "adapters.leg"
    assert words in message


@pytest.mark.parametrize(
    "files",
    [
        {"bin": b""},
        {"safetensors": tensors({Q_PROJ: [8, 64]})},
        {"safetensors": tensors({f"vision_tower{Q_PROJ}": [8, 9], Q_PROJ.replace("q_proj", "o_proj"): [8, 9]})},
    ],
)
@pytest.mark.parametrize("config", [SMALL, {"text_config": SMALL}, {}])
def test_valid_adapters(tmp_path: Path, files: dict[str, bytes], config: dict[str, Any]) -> None:
    assert not found(model(tmp_path, config), adapters={"leg": adapter(tmp_path / "leg", files)})


def test_paths_and_names_in_engine_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter(tmp_path / "leg", {"safetensors": tensors({Q_PROJ: [8, 576]})}, '{"r": 12}')
    folder = model(tmp_path / "m", SMALL | {"max_position_embeddings": 77})
    options = VllmOptions("~/m", adapters={"leg": "~/leg"}, args={"max-num-seqs": 4})
    ((_, message),) = find_errors(options)
    assert "this model has 64" in message
    args = build_engine_args(options)
    assert (args["model"], args["max_lora_rank"], args["max_num_seqs"]) == (folder, 16, 4)
    spec = ModelSpec("m", "vllm", "~/m")
    assert (spec.locate(), read_static_info(spec).context) == (Path(folder), 77)


@WITHOUT_VLLM
def test_check_reports_errors_with_lines(tmp_path: Path) -> None:
    adapter(tmp_path / "leg", {})
    (tmp_path / "dragoman.yaml").write_text(
        "models:\n  m:\n    engine: vllm\n    source: ./leg\n    slots: 4\n"
        "    args:\n      max_num_seqs: 4\n    adapters:\n      leg: ./leg\n"
    )
    lines = run(tmp_path, "check").stderr.splitlines()
    assert [line.split(" ")[1:3] for line in lines] == [
        ["dragoman.yaml:3:", "models.m.engine:"],
        ["dragoman.yaml:4:", "models.m.source:"],
        ["dragoman.yaml:7:", "models.m.args.max_num_seqs:"],
        ["dragoman.yaml:9:", "models.m.adapters.leg:"],
    ]


@WITHOUT_VLLM
def test_check_reports_missing_vllm(tmp_path: Path) -> None:
    (tmp_path / "dragoman.yaml").write_text("models:\n  m: {engine: vllm, source: a/b}\n")
    assert run(tmp_path, "check").stderr.startswith("dragoman: dragoman.yaml:2: models.m.engine: vllm is not installed")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ValidationError((("max_num_batched_tokens",), "Too few", 0), (("max_num_seqs",), "Too few", 0)),
            "args.max-num-seqs: Too few, not 0; SchedulerConfig.max_num_batched_tokens: Too few, not 0",
        ),
        (
            ValidationError((("dtype", "literal"), "Not 'half'", "x"), (("dtype", "instance"), "No dtype", "x")),
            "args.dtype: Not 'half' or No dtype, not 'x'",
        ),
        (ValidationError((("max_model_len",), "Should be less", 9)), "context: Should be less, not 9"),
        (ValidationError(((), "Value error, 9 heads need 4", object())), "9 heads need 4"),
        (ValueError("one\n  two"), "one two"),
        (TypeError(), "TypeError"),
    ],
)
def test_errors_name_their_argument(error: Exception, words: str) -> None:
    options = VllmOptions("m", context=9, args={"max-num-seqs": 0, "dtype": "x"})
    assert describe_error(error, options) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Call failed: Worker failed with error 'it's for others', please check the stack trace", "it's for others"),
        ("LoRA rank 600\nis greater", "is greater"),
        ("", "ValueError"),
    ],
)
def test_last_line_extracts_worker_error(text: str, words: str) -> None:
    assert last_line(ValueError(text)) == words

"""The list of models in the form of Lethean's server."""

from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.config.models_yaml import read_models_yaml
from dragoman.core.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def test_entries_at_the_root_and_below_models(file: Path) -> None:
    (file.parent / "weights").mkdir()
    (file.parent / "weights/config.json").write_text("{}")
    (file.parent / "weights/model.safetensors").write_bytes(b"")
    file.write_text(
        "gemma: ./gemma.gguf\n"
        "weights: {path: weights, quant: 4}\n"
        "models:\n  Llama: {path: /abs/llama.gguf, context: 512}\n  other: sub/other.gguf\n"
    )
    found = read_models_yaml(str(file))
    assert {name: (model.engine, model.source, model.options) for name, model in found.items()} == {
        "gemma": ("llama", str(file.parent / "gemma.gguf"), {}),
        "weights": ("vllm", str(file.parent / "weights"), {}),
        "Llama": ("llama", "/abs/llama.gguf", {"context": 512}),
        "other": ("llama", str(file.parent / "sub/other.gguf"), {}),
    }
    assert {name: model.ignored_keys for name, model in found.items() if model.ignored_keys} == {"weights": ("quant",)}


def test_the_configuration_takes_precedence(file: Path) -> None:
    file.write_text("A: a.gguf\nb: b.gguf\n")
    config = file.parent / "own.yaml"
    config.write_text("models: {a: smollm2}\nmodels_yaml: models.yaml\n")
    settings = load_settings(str(config), Flags(), {})
    assert [(model.name, model.source) for model in settings.models] == [
        ("a", "smollm2"),
        ("b", str(file.parent / "b.gguf")),
    ]
    only = load_settings(None, Flags(models_yaml=str(file)), {})
    assert [model.name for model in only.models] == ["A", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: x.gguf\nb: {context: many, path: y.gguf}", ":2: models.b.context: expected int"),
        ("a: 5", ":1: models.a: expected a source or a mapping, got int"),
        ("models: [a]", ":1: models: expected mapping, got list"),
        ("../a: x.gguf", ":1: models.../a: a model name may contain"),
        ("- a", ":1: expected a mapping"),
    ],
)
def test_errors_name_the_line_of_the_list(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(None, Flags(models_yaml=str(file)), {})
    assert f"{file}{message}" in str(caught.value)


def test_missing_list(file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_settings(None, Flags(models_yaml=str(file)), {})

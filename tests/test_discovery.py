"""Models in a folder: their names, what their files say, and names that are no names."""

import json
import struct
from pathlib import Path

import pytest

from dragoman.discovery import Discovery, Found, names_in
from tests.test_gguf import gguf, pair, text


def model(architecture: str = "llama", file_type: int | None = None, size: int = 0) -> bytes:
    pairs = [pair("general.architecture", 8, text(architecture))]
    if file_type is not None:
        pairs.append(pair("general.file_type", 4, struct.pack("<I", file_type)))
    return gguf(*pairs) + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "org/Split").mkdir(parents=True)
    (folder / "Tiny.gguf").write_bytes(model(file_type=15))
    (folder / "Big-Q4_K_M.gguf").write_bytes(model(size=10))
    (folder / "Big-Q8_0.gguf").write_bytes(model(size=20))
    (folder / "two words.gguf").write_bytes(model("qwen3"))
    for at in (1, 2, 3):
        (folder / f"org/Split/Split.Q6_K-0000{at}-of-00003.gguf").write_bytes(model("gemma3", size=at))
    (folder / "half-00001-of-00002.gguf").write_bytes(model())
    (folder / "mmproj.gguf").write_bytes(model("clip"))
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("no model")
    (folder / "org/hf-model").mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "org/hf-model/config.json").write_text(json.dumps(config))
    (folder / "org/hf-model/model.safetensors").write_bytes(bytes(100))
    (folder / "org/mistral").mkdir()
    (folder / "org/mistral/params.json").write_text('{"dim": 64}')
    (folder / "org/mistral/consolidated.safetensors").write_bytes(bytes(100))
    (tmp_path / "secret.gguf").write_bytes(model())
    (folder / "out.gguf").symlink_to(tmp_path / "secret.gguf")
    (folder / "away").symlink_to(tmp_path)
    (folder / "round").symlink_to("round")
    (folder / "linked.gguf").symlink_to("Tiny.gguf")
    return folder


@pytest.fixture
def discovery(folder: Path) -> Discovery:
    made = Discovery([folder, folder / "not there"])
    made.look()
    return made


def test_what_is_found(folder: Path, discovery: Discovery) -> None:
    length = len(model("gemma3"))
    assert {found.name: (found.kind, found.architecture, found.quantisation) for found in discovery.found.values()} == {
        "Tiny": ("gguf", "llama", "Q4_K_M"),
        "Big-Q4_K_M": ("gguf", "llama", "Q4_K_M"),
        "Big-Q8_0": ("gguf", "llama", "Q8_0"),
        "two-words": ("gguf", "qwen3", None),
        "org/Split/Split.Q6_K": ("gguf", "gemma3", "Q6_K"),
        "org/hf-model": ("folder", "Qwen3ForCausalLM", "bfloat16"),
        "org/mistral": ("folder", None, None),
        "linked": ("gguf", "llama", "Q4_K_M"),
    }
    split = discovery.found["org/split/split.q6_k"]
    assert split.size == 3 * length + 6
    assert split.path == str((folder / "org/Split/Split.Q6_K-00001-of-00003.gguf").resolve())
    assert discovery.found["org/hf-model"].size == 100


def test_a_last_part_that_several_have_is_nobody_s_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/same", "b/same", "b/same-Q8_0", "b/other-Q4_0", "b/other-Q8_0", "UPPER"):
        path = tmp_path / f"{name}.{'GGUF' if name.isupper() else 'gguf'}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(model(size=len(name)))
    (tmp_path / "half-00001-of-00002.gguf").write_bytes(model())
    discovery = Discovery([tmp_path])
    for _ in range(3):
        discovery.look()
    assert caplog.text.count("is not complete") == 1
    assert discovery.resolve("same") is None
    assert [found.name for found in discovery.called("same")] == ["a/same", "b/same-Q8_0", "b/same"]
    names = {wanted: found.name for wanted in WANTED if (found := discovery.resolve(wanted))}
    assert names == WANTED


WANTED = {
    "a/same": "a/same",
    "b/same": "b/same",
    "b/same:q8_0": "b/same-Q8_0",
    "same:q8_0": "b/same-Q8_0",
    "other": "b/other-Q4_0",
    "upper": "UPPER",
}


def test_names_without_opening_anything(folder: Path) -> None:
    assert {"tiny", "broken", "org/hf-model", "org/split/split.q6_k"} <= names_in([folder])
    assert not {"out", "away/secret", "half"} & names_in([folder])


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("tiny", "Tiny"),
        ("big-q8_0", "Big-Q8_0"),
        ("big", "Big-Q8_0"),
        ("big:q4_k_m", "Big-Q4_K_M"),
        ("big:latest", "Big-Q8_0"),
        ("big:7b", "Big-Q8_0"),
        ("big:q5_k_m", None),
        ("tiny:q4_k_m", "Tiny"),
        ("tiny:latest", "Tiny"),
        ("split", "org/Split/Split.Q6_K"),
        ("split.q6_k", "org/Split/Split.Q6_K"),
        ("split:q6_k", "org/Split/Split.Q6_K"),
        ("hf-model", "org/hf-model"),
        ("out", None),
        ("away/secret", None),
        ("../secret", None),
        ("/etc/passwd", None),
        ("tiny.gguf", None),
        ("tiny\0", None),
        ("", None),
        ("x" * 1_000_000, None),
        ("q8_0", None),
    ],
)
def test_which_model_a_name_means(discovery: Discovery, wanted: str, name: str | None) -> None:
    found = discovery.resolve(wanted)
    assert (found and found.name) == name


def test_looking_again_sees_what_is_new_and_what_has_gone(folder: Path, discovery: Discovery) -> None:
    (folder / "Tiny.gguf").write_bytes(model("phi3", file_type=7))
    (folder / "new.gguf").write_bytes(model())
    (folder / "Big-Q8_0.gguf").unlink()
    discovery.look()
    tiny = discovery.found["tiny"]
    assert isinstance(tiny, Found)
    assert (tiny.architecture, tiny.quantisation) == ("phi3", "Q8_0")
    assert "new" in discovery.found
    assert "big-q8_0" not in discovery.found
